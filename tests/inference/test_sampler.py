"""Sampling against values written out by hand."""

import math

import numpy as np
import pytest
import torch

from shmrl.inference.embedded.params import Limits, SamplingParams
from shmrl.inference.embedded.sampler import Batch, Picked, Sampler, draw_keys, gumbel

CPU = torch.device("cpu")
PROBS = [0.05, 0.4, 0.1, 0.25, 0.2]  # by rank: ids 1, 3, 4, 2, 0


def draw(sampling: list[dict], *, seeds: list[int] | None = None, raw: bool = False, position: int = 0) -> Picked:
    rows = len(sampling)
    params = [SamplingParams.parse(given, Limits(5, 64, -1)) for given in sampling]
    batch = Batch(params, seeds or list(range(rows)), CPU)
    logits = torch.tensor([PROBS] * rows).log() + 3.0
    return Sampler(5, CPU, raw=raw)(logits, batch, [position] * rows, logits)


def kept(**sampling: float) -> list[int] | None:
    ids = draw([sampling]).kept[0]
    return None if ids is None else ids.tolist()


def test_which_ids_are_kept() -> None:
    assert kept() is None
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.6) == [1, 3]  # 0.4 alone is not enough
    assert kept(top_p=0.66) == [1, 3, 4]
    assert kept(min_p=0.3) == [1, 3, 4]  # at least 0.12
    assert kept(top_k=3, top_p=0.9) == [1, 3, 4]
    assert kept(top_p=1e-6) == [1]
    assert kept(temperature=0.0, top_k=2) is None


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    assert kept(top_k=2, top_p=0.61) == [1]  # 0.4 of 0.65 is 0.615
    assert kept(top_k=2, top_p=0.62) == [1, 3]
    assert kept(top_k=4, top_p=0.9) == [1, 2, 3, 4]  # 0.85 of 0.95 is 0.895: not yet enough
    assert kept(min_p=0.6, top_p=0.61) == [1]


def test_logprobs_are_those_of_the_draw() -> None:
    picked = draw([{"top_k": 2, "logprobs": 5}, {"logprobs": 3}, {"temperature": 0.0, "logprobs": 2}])
    assert picked.head_ids[0, :2].tolist() == [1, 3]
    assert picked.head_logprobs[0, :2] == pytest.approx([math.log(0.4 / 0.65), math.log(0.25 / 0.65)])
    assert picked.head_logprobs[0, 2:].tolist() == [-math.inf] * 3
    assert picked.head_ids[1, :3].tolist() == [1, 3, 4]
    assert picked.head_logprobs[1, :3] == pytest.approx(np.log([0.4, 0.25, 0.2]), rel=1e-5)
    assert (picked.tokens[2], picked.ranks[2]) == (1, 1)
    assert picked.logprobs[2] == pytest.approx(math.log(0.4))


def test_temperature_scales_before_top_p() -> None:
    assert kept(temperature=0.25, top_p=0.8) == [1]  # p^4: 0.0256 of 0.0312 is 0.82


def test_raw_logprobs_ignore_temperature_and_truncation() -> None:
    picked = draw([{"temperature": 0.5, "top_k": 1, "logprobs": 5}], raw=True)
    assert picked.logprobs == pytest.approx([math.log(0.4)])
    assert picked.head_logprobs[0] == pytest.approx(np.log([0.4, 0.25, 0.2, 0.1, 0.05]), rel=1e-5)
    assert picked.kept[0] is not None
    assert picked.kept[0].tolist() == [1]


@pytest.mark.parametrize(
    ("sampling", "expected"), [({}, PROBS), ({"top_k": 3}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85])]
)
def test_frequencies_follow_the_probabilities(sampling: dict, expected: list[float]) -> None:
    n = 20_000
    counts = np.bincount(draw([sampling] * n, position=7).tokens, minlength=5)
    assert counts / n == pytest.approx(expected, abs=5 * math.sqrt(0.25 / n))


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    alone = [draw([{"top_p": 0.9}], seeds=[seed], position=3).tokens[0] for seed in range(50)]
    mixed = [{"top_p": 0.9} if i % 2 == 0 else {"temperature": 0.7} for i in range(100)]
    seeds = [seed for seed in range(50) for _ in range(2)]
    assert draw(mixed, seeds=seeds, position=3).tokens[::2] == alone
    assert draw([{"top_p": 0.9}] * 50, position=4).tokens != alone


def test_noise_is_standard_gumbel_and_keys_differ() -> None:
    noise = gumbel(torch.arange(1_000_00) * 2654435761 % 2**32)
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.02)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)
    keys = draw_keys(np.arange(100, dtype=np.uint64).repeat(100), list(range(100)) * 100)
    assert len(set(keys.tolist())) == 10_000
    assert draw_keys(np.array([2**64 - 1], dtype=np.uint64), [5])[0] < 2**32
