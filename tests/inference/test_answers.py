"""Recorded answers of vLLM 0.30 and 0.32, each route, as one `Generation`."""

import copy
import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shmrl.errors import EngineError
from shmrl.inference import answers
from shmrl.inference.answers import Generation, parse_generation, parse_metrics, read_generation
from shmrl.payload import _answers

DATA = Path(__file__).parents[1] / "data" / "vllm"


def recorded(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def test_the_0_32_form() -> None:
    got = parse_generation(recorded("v0.32.0_v2runner_interp_inference_v1_generate"), "u", {"logprobs": 3, "top_k": 8})
    assert got.token_ids == [113, 471, 498, 407]
    assert got.logprobs[0] == -2.041332483291626
    assert got.top_logprobs is not None
    assert list(got.top_logprobs)[3] == (
        [407, 113, 461],
        [-2.4339373111724854, -1.5120623111724854, -1.7308123111724854],
    )
    assert got.sampling_mask is not None
    assert next(iter(got.sampling_mask)) == [19, 113, 130, 237, 407, 471, 498, 504]
    assert got.weight_versions == [("step-7", 0, 4)]
    assert (got.finish_reason, got.stop_reason, got.url) == ("length", None, "u")
    assert got.routed_experts is not None
    assert got.routed_experts.startswith("k05VTVBZ")


def test_the_0_30_form() -> None:
    answer = recorded("v0.30.0_v1runner_processed_inference_v1_generate")
    got = parse_generation(answer, "u", {"logprobs": 3, "top_k": 8})
    assert got.token_ids == [377, 250, 290, 454]
    assert got.top_logprobs is not None
    assert next(iter(got.top_logprobs))[0] == [377, 179, 483]
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
    assert next(iter(got.top_logprobs)) == head
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


def rows(found: Iterable[Any] | None) -> list[Any]:
    assert found is not None
    return list(found)


def masked() -> tuple[dict[str, Any], Any]:
    """The recorded answer with 40 heads, once without its sampling mask, and that mask."""
    answer = recorded("v0.32.0_v2_generate_topk_topp_minp")
    native = answer["choices"][0].pop("sampling_mask")
    return answer, native


ASKED = {"logprobs": 40, "top_k": 40, "top_p": 0.8}


def test_masks_are_derived_from_heads_that_hold_every_kept_id() -> None:
    answer, native = masked()
    assert rows(parse_generation(answer, "u", ASKED).sampling_mask) == native
    assert parse_generation(answer, "u", ASKED | {"top_k": 41}).sampling_mask is None
    raw = copy.deepcopy(answer)
    for entry in raw["choices"][0]["logprobs"]["content"]:  # raw log-probabilities: the mass is not 1
        entry["top_logprobs"] = [e | {"logprob": e["logprob"] - 0.5} for e in entry["top_logprobs"]]
    assert parse_generation(raw, "u", ASKED).sampling_mask is None


def test_heads_are_narrowed_to_what_was_wanted_after_the_mask_was_read_off_them() -> None:
    answer, native = masked()
    wide = parse_generation(answer, "u", ASKED)
    narrow = parse_generation(answer, "u", ASKED, head=4)
    assert rows(narrow.sampling_mask) == native
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
    assert (got.token_ids, got.logprobs, rows(got.top_logprobs), rows(got.sampling_mask)) == ([], [], [], [])


# ----------------------------------------------------------------------------------------------- the reader in C


def facts(got: Generation) -> Any:
    """All of it, to compare."""
    heads, kept = got.top_logprobs, got.sampling_mask
    own = [struct.pack("d", value) for value in got.logprobs]
    arrays = [None if some is None else list(some) for some in (heads, kept)] + [
        got.routed_experts,
        got.weight_versions,
    ]
    return got.token_ids, own, got.finish_reason, got.stop_reason, *arrays


def both(text: bytes, sampling: dict[str, Any]) -> tuple[Any, Any, bool]:
    """What the reader in C and what a JSON library makes of a text, errors included; whether the former read it."""
    outcomes: list[Any] = []
    for split in (answers._split, lambda *_, **__: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(answers, "_split", split)
            try:
                outcomes.append(facts(read_generation(text, "u", sampling, int(sampling.get("logprobs") or 0))))
            except EngineError:
                outcomes.append(EngineError)
    return outcomes[0], outcomes[1], _answers.split(text) is not None


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.json")))
def test_recorded_answers_read_in_c_are_what_a_json_library_reads(name: str, indent: int | None) -> None:
    text = json.dumps(recorded(name), indent=indent).encode()
    in_c, by_library, known = both(text, {"logprobs": 3, "top_k": 8})
    assert in_c == by_library
    assert known == ("chat" not in name or "token_id:" in text.decode())


def made_up(random: Random) -> bytes:
    """An answer of any of the forms that are read in C: keys in any order, other keys between them."""

    def text(n: int) -> str:
        return "".join(random.choices('aZ09 /\\"\n\té€😀', k=random.randrange(n)))

    def shuffled(members: dict[str, Any]) -> dict[str, Any]:
        extra = {
            key: random.choice([None, 7, -1.5, True, text(40), [1, "]"], {"a": {}}]) for key in ("rank", "bytes", "x")
        }
        members = members | dict(random.sample(sorted(extra.items()), random.randrange(4)))
        return dict(random.sample(list(members.items()), len(members)))

    def number() -> float:
        exact, wide = struct.unpack("f", random.randbytes(4))[0], struct.unpack("d", random.randbytes(8))[0]
        return random.choice(
            [value if math.isfinite(value) else -9999.0 for value in (exact, wide)] + [-random.random()]
        )

    def entry() -> dict[str, Any]:
        token = random.randrange(200_000)
        name = random.choice([{"token_id": token}, {"token": f"token_id:{token}"}])
        return shuffled(name | {"logprob": number()})

    n = random.randrange(4)
    masks = [random.choices(range(200_000), k=random.randrange(3)) for _ in range(n)]
    content = [shuffled(entry() | {"top_logprobs": [entry() for _ in range(random.randrange(1, 5))]}) for _ in range(n)]
    choice = {
        "token_ids": random.choices(range(200_000), k=n),
        "finish_reason": "stop",
        "logprobs": random.choice([None, {"content": content}]),
        "sampling_mask": random.choice([None, masks]),
        "routed_experts": random.choice([None, "k05V" * random.randrange(30)]),
        "stop_reason": random.choice([None, 3, text(9)]),
    }
    choices = [shuffled(choice), {"index": 1}][: random.randrange(1, 3)]
    whole = json.dumps(
        shuffled({"choices": choices}), indent=random.choice([None, 2]), ensure_ascii=random.random() < 0.5
    )
    return whole.encode()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_read_in_c_is_what_a_json_library_reads(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        text = made_up(random)
        in_c, by_library, known = both(text, {"logprobs": 2, "top_k": 2})
        assert in_c == by_library, text
        assert known, text


@pytest.mark.parametrize("seed", range(4))
def test_a_broken_answer_is_read_as_a_json_library_reads_it(seed: int) -> None:
    """Cut, or with other characters in it: the same values, or the same refusal."""
    random = Random(seed)
    for _ in range(400):
        text = made_up(random).decode().encode("ascii", "ignore")
        at = random.randrange(len(text) + 1)
        between = random.choice(["", "null", "1e5", '"token_ids":', "".join(random.choices('0-"[]{},:\\en. ', k=2))])
        rest = b"" if random.random() < 0.2 else text[at + random.randrange(4) :]
        broken = text[:at] + between.encode() + rest
        in_c, by_library, _ = both(broken, {"logprobs": 2, "top_k": 2})
        assert in_c == by_library, broken


SPELLINGS = "0 -0 -0.0 12 -1.5 0.1 1E5 1e-5 -1.25e+2 5e-324 1e-400 1e400 2.2250738585072011e-308 9007199254740993 " + (
    "-1.7976931348623157e308 0.30000000000000004 123456789012345678901234567890 0.00000000000000000000000000012345 "
    "1.00000000000000011102230246251565 -10.123456001281738 1.0000000000000000000000000000000000000000001e-1"
)


@pytest.mark.parametrize("spelled", SPELLINGS.split())
def test_numbers_in_every_spelling(spelled: str) -> None:
    text = '{"choices":[{"token_ids":[1],"logprobs":{"content":[{"token_id":1,"logprob":%s,"top_logprobs":[]}]}}]}'
    parts = _answers.split((text % spelled).encode())
    assert parts is not None
    assert parts[2] is not None
    assert parts[2][0] == struct.pack("d", float(spelled))


@pytest.mark.parametrize("spelled", ["01", "+1", ".5", "1.", "1e", "--1", "NaN", "Infinity", "0x1", "1_0", "\u0661"])
def test_what_is_no_number_in_json_is_left_to_the_library(spelled: str) -> None:
    text = '{"choices":[{"logprobs":{"content":[{"token_id":1,"logprob":%s,"top_logprobs":[]}]}}]}'
    assert _answers.split((text % spelled).encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"choices":[{"token_ids":[1],"token_ids":[2]}]}',
        '{"choices":[{"token_ids":[1]}],"choices":[]}',
        '{"choices":[{"token\\u005fids":[1]}]}',
        '{"choices":[{"token_ids":[2147483648]}]}',
        '{"choices":[{"token_ids":[-1]}]}',
        '{"choices":[{"token_ids":[1.0]}]}',
        '{"choices":[{"sampling_mask":[[1],null]}]}',
        '{"choices":[{"routed_experts":"a\\/b"}]}',
        '{"choices":[{"logprobs":{"content":[{"token":"A","logprob":-1}]}}]}',
        '{"choices":[{"logprobs":{"content":[{"token":"token_id:","logprob":-1}]}}]}',
        '{"choices":[{"logprobs":{"content":[{"token_id":1}]}}]}',
        '{"x":' + "[" * 100 + "]" * 100 + "}",
        '{"choices":[]} {}',
        '"text"',
        "",
    ],
)
def test_other_forms_are_left_to_the_library(text: str) -> None:
    assert _answers.split(text.encode()) is None


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a b\n# TYPE vllm:n counter\nvllm:n{engine="0",x="a b"} 2.0\nvllm:n{engine="1"} 3e0\nup 1\n'
    assert parse_metrics(text) == {"vllm:n": 5.0, "up": 1.0}
