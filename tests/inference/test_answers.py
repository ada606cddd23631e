"""Recorded answers of vLLM 0.30 and 0.32, each route, as one `Generation`."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from shmrl.errors import EngineError
from shmrl.inference.answers import parse_generation, parse_metrics

DATA = Path(__file__).parents[1] / "data" / "vllm"


def recorded(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def test_the_0_32_form() -> None:
    got = parse_generation(recorded("v0.32.0_v2runner_interp_inference_v1_generate"), "u", {"logprobs": 3, "top_k": 8})
    assert got.token_ids == [113, 471, 498, 407]
    assert got.logprobs[0] == -2.041332483291626
    assert got.top_logprobs is not None
    assert got.top_logprobs[3] == ([407, 113, 461], [-2.4339373111724854, -1.5120623111724854, -1.7308123111724854])
    assert got.sampling_mask is not None
    assert got.sampling_mask[0] == [19, 113, 130, 237, 407, 471, 498, 504]
    assert got.weight_versions == [("step-7", 0, 4)]
    assert (got.finish_reason, got.stop_reason, got.url) == ("length", None, "u")
    assert got.routed_experts is not None
    assert got.routed_experts.startswith("k05VTVBZ")


def test_the_0_30_form() -> None:
    answer = recorded("v0.30.0_v1runner_processed_inference_v1_generate")
    got = parse_generation(answer, "u", {"logprobs": 3, "top_k": 8})
    assert got.token_ids == [377, 250, 290, 454]
    assert got.top_logprobs is not None
    assert got.top_logprobs[0][0] == [377, 179, 483]
    assert (got.sampling_mask, got.weight_versions) == (None, [])  # 3 heads cannot hold 8 kept ids


@pytest.mark.parametrize(
    ("name", "token_ids", "head"),
    [
        (
            "v0.30.0_v1runner_processed_completion_routed_experts",
            [377, 250, 290, 454, 377, 157],
            (
                [377, 179, 483, 360],
                [-1.8835622072219849, -1.3523122072219849, -1.8210622072219849, -2.0241870880126953],
            ),
        ),
        (
            "v0.32.0_v2runner_interp_completion_routed_experts",
            [113, 471, 498, 407, 69, 331],
            ([113, 407, 237, 471], [-2.041332483291626, -1.635082483291626, -1.853832483291626, -2.072582483291626]),
        ),
    ],
)
def test_the_completions_form(name: str, token_ids: list[int], head: Any) -> None:
    got = parse_generation(recorded(name), "u", {"logprobs": 4, "top_k": 8})
    assert got.token_ids == token_ids
    assert got.top_logprobs is not None
    assert got.top_logprobs[0] == head
    assert got.logprobs[0] == head[1][0]
    assert (got.finish_reason, got.sampling_mask, got.weight_versions) == ("length", None, [])
    assert got.routed_experts is not None


@pytest.mark.parametrize(
    ("name", "token_ids", "width"),
    [
        ("v0.30.0_v1runner_processed_chat_routed_experts", None, 5),
        ("v0.32.0_v2runner_interp_chat_routed_experts", [436, 122, 143, 135], 5),
    ],
)
def test_the_chat_form(name: str, token_ids: list[int] | None, width: int) -> None:
    answer = recorded(name)
    got = parse_generation(answer, "u", {"logprobs": width})
    assert got.token_ids == (token_ids or answer["choices"][0]["token_ids"])
    assert got.top_logprobs is not None
    assert [len(ids) for ids, _ in got.top_logprobs] == [width] * 4
    assert [ids[0] for ids, _ in got.top_logprobs] == got.token_ids


def masked() -> tuple[dict[str, Any], Any]:
    """The recorded answer with 40 heads, once without its sampling mask, and that mask."""
    answer = recorded("v0.32.0_v2_generate_topk_topp_minp")
    native = answer["choices"][0].pop("sampling_mask")
    return answer, native


ASKED = {"logprobs": 40, "top_k": 40, "top_p": 0.8}


def test_masks_are_derived_from_heads_that_hold_every_kept_id() -> None:
    answer, native = masked()
    assert parse_generation(answer, "u", ASKED).sampling_mask == native
    assert parse_generation(answer, "u", ASKED | {"top_k": 41}).sampling_mask is None
    raw = copy.deepcopy(answer)
    for entry in raw["choices"][0]["logprobs"]["content"]:  # raw log-probabilities: the mass is not 1
        entry["top_logprobs"] = [e | {"logprob": e["logprob"] - 0.5} for e in entry["top_logprobs"]]
    assert parse_generation(raw, "u", ASKED).sampling_mask is None


def test_heads_are_narrowed_to_what_was_wanted_after_the_mask_was_read_off_them() -> None:
    answer, native = masked()
    wide = parse_generation(answer, "u", ASKED)
    narrow = parse_generation(answer, "u", ASKED, head=4)
    assert narrow.sampling_mask == native
    assert wide.top_logprobs is not None
    assert narrow.top_logprobs is not None
    for sampled, (ids, values), (all_ids, all_values) in zip(
        narrow.token_ids, narrow.top_logprobs, wide.top_logprobs, strict=True
    ):
        best = sorted(zip(all_values, all_ids, strict=True), reverse=True)[:4]
        assert ids[0] == sampled
        assert sorted(zip(values[1:], ids[1:], strict=True), reverse=True) == best
    assert parse_generation(answer, "u", ASKED, head=0).top_logprobs is None


NULL_HEAD = {"logprob": -1.0, "top_logprobs": None}
NULL_IN_HEAD = {"logprob": -1.0, "top_logprobs": [{"token_id": 1, "logprob": None}]}
TEXT_IN_HEAD = {"logprob": -1.0, "top_logprobs": [{"token": "A", "logprob": -1.0}]}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": None}]},
        {"choices": [{"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}]}}]},
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"content": [{"logprob": None}]}}]},
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"content": [NULL_HEAD]}}]},
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"content": [NULL_IN_HEAD]}}]},
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"content": [TEXT_IN_HEAD]}}]},
        {"choices": [{"token_ids": None, "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}]},
    ],
)
def test_unreadable_answers(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"^u sent"):
        parse_generation(answer, "u", {"logprobs": 1})


@pytest.mark.parametrize("logprobs", [{"content": []}, None])
def test_an_abort_before_the_first_token(logprobs: Any) -> None:
    choice = {"token_ids": [], "finish_reason": "abort", "logprobs": logprobs, "sampling_mask": []}
    got = parse_generation({"choices": [choice]}, "u", {"logprobs": 3, "top_k": 8})
    assert (got.token_ids, got.logprobs, got.top_logprobs, got.sampling_mask) == ([], [], [], [])


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a b\n# TYPE vllm:n counter\nvllm:n{engine="0",x="a b"} 2.0\nvllm:n{engine="1"} 3e0\nup 1\n'
    assert parse_metrics(text) == {"vllm:n": 5.0, "up": 1.0}
