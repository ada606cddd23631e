"""Heads and kept sets: lists and arrays of the same, what is stored of them, masks that are read off heads."""

import json
from pathlib import Path

import numpy as np
import pytest

from shmrl.errors import PayloadError
from shmrl.inference.answers import parse_generation
from shmrl.payload.heads import Heads, KeptSets

RECORDED = Path(__file__).parent.parent / "data" / "vllm"


def recorded(name, width):
    return parse_generation(json.loads((RECORDED / f"{name}.json").read_text()), "u", {"logprobs": width})


def test_recorded_032_answer():
    answer = recorded("v0.32.0_v2_generate_topk_topp_minp", 40)
    assert answer.token_ids == [407, 329, 421, 407, 69, 471]
    assert list(answer.top_logprobs.kept()) == list(answer.sampling_mask)  # the derived set is the engine's own
    assert answer.sampling_mask.counts.tolist() == [17, 19, 13, 16, 17, 18]
    assert answer.sampling_mask.ids[:3].tolist() == [19, 77, 81]
    ids, logprobs = answer.top_logprobs.rows(answer.token_ids, 40)
    assert ids.shape == (6, 41)
    assert ids[:, 0].tolist() == answer.token_ids
    assert np.allclose(logprobs[:, 0], answer.logprobs)
    assert np.allclose(np.exp(logprobs[:, 1:].astype(float)).sum(1), 1, atol=1e-4)
    assert np.allclose(answer.top_logprobs.mass(), 1, atol=1e-4)
    assert np.isneginf(logprobs[0]).sum() == 40 - 17


def test_recorded_030_answer():
    answer = recorded("v0.30.0_v1runner_processed_inference_v1_generate", 3)
    ids, _ = answer.top_logprobs.rows(answer.token_ids, 3)
    assert ids[0].tolist() == [377, 179, 483, 377]  # sampled first, then the top 3 by probability


def test_layouts():
    """The sampled token is among the best three, or comes before them."""
    heads = Heads.of([([7, 2, 9], [-0.2, -2.1, -0.1]), ([4, 7, 2, 9], [-6.0, -0.2, -2.1, -9999.0])])
    ids, logprobs = heads.rows([7, 4], 3)
    assert ids.tolist() == [[7, 9, 7, 2], [4, 7, 2, 9]]
    assert logprobs[0].tolist() == pytest.approx([-0.2, -0.1, -0.2, -2.1])
    assert np.isneginf(logprobs[1, 3])
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)


def test_narrowing_keeps_the_sampled_token_and_the_best():
    heads = Heads.of([([4, 7, 2, 9], [-6.0, -2.1, -0.2, -9999.0]), ([7], [-0.5])])
    assert [ids for ids, _ in heads.narrowed(2)] == [[4, 2, 7], [7, 7]]


@pytest.mark.parametrize(
    ("top", "position"),
    [
        ([([1, 2], [-0.1, None])], (0, 1)),
        ([([1, 2], [-0.1, -0.2]), ([1], [-0.1])], 1),
        ([([1, 2], [-0.1, -0.2]), ([1, 2], [-0.1])], 1),
        ([([3, 2], [-0.1, -0.2])], 0),
    ],
)
def test_heads_that_are_incomplete(top, position):
    with pytest.raises(PayloadError) as caught:
        Heads.of(top).rows([1] * len(top), 2)
    assert (caught.value.field, caught.value.position) == ("head", position)


def test_masks():
    kept = KeptSets.of([[5, 9], [5], [7, 7, 2]])
    assert (kept.counts.tolist(), kept.ids.tolist()) == ([2, 1, 3], [5, 9, 5, 7, 7, 2])
    both = KeptSets.joined([KeptSets.unrestricted(2), kept])
    assert list(both) == [[], [], [5, 9], [5], [7, 7, 2]]
    with pytest.raises(PayloadError, match="None at position 1"):
        KeptSets.of([[1], None])
    with pytest.raises(PayloadError, match="mask: id 2147483648 is beyond int32"):
        KeptSets.of([[1], [2**31]])


def test_kept_sets_and_mass_of_heads_with_repeats():
    """The sampled token stands twice where it is among the best: once is enough."""
    half = float(np.log(0.5))
    heads = Heads.of([([9, 3, 9], [half, half, half]), ([8, 1], [-9999.0, 0.0]), ([], [])])
    assert list(heads.kept()) == [[3, 9], [1], []]
    assert heads.mass().tolist() == pytest.approx([1.0, 1.0, 0.0])
