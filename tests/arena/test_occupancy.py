"""How much of the arena is used by payloads when a request must be refused, on a stream shaped like RL training.

Rollouts of lognormal length (median 6,000 tokens, at most 32,768) leave three blocks each: routing 384 B per token, a
top-k head 768, a ragged mask of 64 to 400. They leave first in, first out by training step with some jitter; 12% are
dropped early, as filtering does.
"""

import random
import statistics
import subprocess

import pytest

from tests.arena.test_crashes import build

ROLLOUTS, STEP = 6000, 128


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build(tmp_path_factory.mktemp("occupancy"), "occupancy_driver", ["-O2"])


def stream(seed):
    """Lines "routing head mask dropped key" for the driver."""
    sizes, order = random.Random(seed), random.Random(seed + 1)
    for i in range(1, ROLLOUTS + 1):
        tokens = min(32768, max(256, int(sizes.lognormvariate(8.7, 0.8))))
        mask, dropped = sizes.randint(64, 400), sizes.random() < 0.12
        step = i // STEP
        key = step * STEP - STEP // 2 if dropped else (step + order.choice([0, 0, 0, 1, 1, 2, 3])) * STEP
        yield f"{tokens * 384} {tokens * 768} {tokens * mask} {int(dropped)} {key}\n"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_payloads_fill_the_arena_before_anything_is_refused(driver, seed):
    done = subprocess.run(
        [driver, str(ROLLOUTS // 4)], input="".join(stream(seed)), capture_output=True, text=True, check=True
    )
    occupancy = sorted(map(float, done.stdout.split()))
    assert len(occupancy) > 400
    assert statistics.median(occupancy) >= 0.95
    assert occupancy[0] >= 0.79
