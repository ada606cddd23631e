"""A step's hand-over through the arena and through HTTP; `python -m benches.step` has the comparison with its bars.

`pytest benches/bench_step.py --benchmark-only`.
"""

from __future__ import annotations

import pytest

from benches.step import KINDS, compared, running


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_step(benchmark, kind):
    """16 samples of 1,000 to 16,000 tokens, two ranks: encode, publish, gather, let go."""
    with running(samples=16, readers=2) as run:
        compared(run)
        benchmark.group = "a whole step"
        step = benchmark.pedantic(run.step, args=(kind,), rounds=5)
        benchmark.extra_info["MB"] = run.nbytes / 1e6
        assert 0 < step.publish < step.step
