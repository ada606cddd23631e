"""Engine wire forms, recorded and made up, and a conversation over turns."""

import base64
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmrl.errors import PayloadError
from shmrl.payload import BranchBuilder
from shmrl.payload.forms import engine_rows, routed_experts
from tests.payload.branches import routes

RECORDED = Path(__file__).parent.parent / "data" / "vllm"


def choice(name):
    return json.loads((RECORDED / f"{name}.json").read_text())["choices"][0]


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return base64.b64encode(out.getvalue()).decode()


def raw(array, dtype="<i4"):
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def test_every_form_gives_the_same_rows():
    rows = np.stack([np.random.default_rng(i).permutation(128)[:8] for i in range(64 * 48)]).reshape(64, 48, 8)
    rows = rows.astype(np.uint8)
    described = {"data": raw(rows, "u1"), "shape": [64, 48, 8], "dtype": "uint8", "start": 5}
    for value, start in (
        (npy(rows), None),
        (raw(rows), None),
        (described, 5),
        (described | {"data": rows.tobytes(), "start": None}, None),
        (rows, None),
    ):
        got, where = routed_experts(value, layers=48, top_k=8)
        assert where == start
        assert np.array_equal(got, rows)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 101])
def test_any_rows_are_decoded_into_any_place(columns):
    """Groups of three bytes are cut at either end, and a .npy's header is not a whole number of them."""
    rows = np.arange(7 * columns).astype(np.uint8).reshape(7, columns, 1)
    for value in (npy(rows), {"data": raw(rows, "u1"), "shape": rows.shape, "dtype": "u1"}):
        encoded, _ = engine_rows(value)
        for first in range(8):
            for last in range(first, 8):
                out = np.full((last - first + 2, columns, 1), 255, np.uint8)
                encoded.into(out[1:-1], first)
                assert np.array_equal(out[1:-1], rows[first:last])
                assert (out[[0, -1]] == 255).all()


@pytest.mark.parametrize("at", [0, 3, 30, 57])
@pytest.mark.parametrize("character", ["!", "=", "\u00e4"])
def test_a_bad_character_is_an_error_where_rows_are_read(at, character):
    rows = np.arange(44, dtype=np.uint8).reshape(11, 4, 1)
    text = raw(rows, "u1")
    value = {"data": text[:at] + character + text[at + 1 :], "shape": rows.shape, "dtype": "u1"}
    with pytest.raises(PayloadError, match=f"routing: not base64: {len(text)} characters, stopped at") as caught:
        engine_rows(value)[0].rows()
    assert at - 3 <= caught.value.position <= at + 3


def test_long_base64():
    rows = np.random.default_rng(0).integers(0, 128, (16_384, 48, 8)).astype(np.uint8)
    text = raw(rows, "u1")
    assert (rows.nbytes, len(text)) == (6_291_456, 8_388_608)
    got, _ = routed_experts({"data": text, "shape": rows.shape, "dtype": "u1"})
    assert np.array_equal(got, rows)


@pytest.mark.parametrize("n", range(8))
def test_base64_of_every_length(n):
    data = bytes(range(200, 200 + n))
    got, _ = routed_experts({"data": base64.b64encode(data).decode(), "shape": [n, 1, 1], "dtype": "u1"})
    assert got.tobytes() == data


def test_double_base64_is_refused():
    rows = routes(40, L=4, K=2)
    twice = base64.b64encode(raw(rows).encode()).decode()
    with pytest.raises(PayloadError, match="base64 of base64"):
        routed_experts({"data": twice, "shape": rows.shape, "dtype": "i4"})
    with pytest.raises(PayloadError, match="bytes for shape"):
        routed_experts(base64.b64encode(raw(routes(41, L=4, K=2)).encode()).decode(), layers=4, top_k=3)
    with pytest.raises(PayloadError):
        routed_experts(base64.b64encode(npy(rows).encode()).decode())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("hello there", "unknown wire form str: 'hello there'"),
        (b"\x93NUMPY", "unknown wire form bytes"),
        (7, "unknown wire form int: '7'"),
        ("k05VTVBZ????", "not base64: 12 characters, stopped at 8"),
        ("k05VTVBZAQ", "not base64"),
        ({"data": "AAAA"}, "lacks"),
        ({"data": "AAAA", "shape": [1, 1, 1], "dtype": "f4"}, "expected integers"),
        ({"data": "AAAA", "shape": [1, 1, 1], "dtype": "i4"}, "3 bytes for shape"),
        ({"data": "AAAA", "shape": [1, 1, 3], "dtype": "int7"}, "dtype 'int7'"),
        ({"data": "AAAA", "shape": [1, None, 3], "dtype": "u1"}, "shape"),
        (np.zeros((3, 4)), "expected integers"),
    ],
)
def test_what_nobody_sends(value, words):
    with pytest.raises(PayloadError, match=words):
        routed_experts(value)


def test_npy_that_cannot_be_routing():
    with pytest.raises(PayloadError, match="Fortran"):
        routed_experts(npy(np.asfortranarray(np.zeros((3, 2, 2), np.uint8))))
    with pytest.raises(PayloadError, match="expected integers"):
        routed_experts(npy(np.zeros((3, 2, 2), np.float32)))
    with pytest.raises(PayloadError, match=r"expected integers \[n, 48, K\]"):
        routed_experts(npy(np.zeros((3, 2, 2), np.uint8)), layers=48)
    whole = base64.b64decode(npy(np.zeros((3, 2, 2), np.uint8)))
    with pytest.raises(PayloadError, match="11 bytes for shape"):
        routed_experts(base64.b64encode(whole[:-1]).decode())


# ------------------------------------------------------------------------------------------------------ conversations


@dataclass
class Answer:
    token_ids: list[int]
    total: int = 0
    start: int = 0
    salt: int = 0
    finish_reason: str = "stop"
    version: Any = "step-3"
    logprobs: list[float] = field(init=False)

    def __post_init__(self):
        self.logprobs = [-0.5] * len(self.token_ids)
        self.top_logprobs = [([t, t + 1], [-0.5, -1.0]) for t in self.token_ids]
        self.routed_experts = npy(routes(self.total, salt=self.salt).astype(np.uint8)[self.start : -1])
        self.sampling_mask = [[t, t + 1] for t in self.token_ids]
        self.weight_versions = [(self.version, 0, len(self.token_ids))]


def builder():
    return BranchBuilder(num_experts=8, layers=[0, 1], top_k=2, head_k=2, mask=True)


def test_columns_of_dense_layers_are_dropped():
    """vLLM returns one for every decoder layer; those without a router are made of zeros."""
    rows = np.zeros((3, 4, 2), np.uint8)
    rows[:, [1, 3]] = routes(3)
    answer = Answer([4], total=4)
    answer.routed_experts = npy(rows)
    b = BranchBuilder(num_experts=8, layers=(1, 3), decoder_layers=4, top_k=2)
    b.add_turn([1, 2, 3], answer)
    branch = b.branch({})
    assert branch.layers == (1, 3)
    assert np.array_equal(branch.rows["routing"].values, routes(3))
    answer.routed_experts = npy(rows[:, :3])
    with pytest.raises(PayloadError, match=r"\(3, 3, 2\), expected integers \[n, 4, 2\]"):
        BranchBuilder(num_experts=8, layers=(1, 3), decoder_layers=4, top_k=2).add_turn([1, 2, 3], answer)


def test_three_turns_with_an_abort():
    b = builder()
    b.add_turn([1, 2, 3, 4], Answer([5, 6, 7], total=7))
    assert b.covered == 6
    aborted = Answer([10, 11], total=11, salt=1, finish_reason="abort")
    b.add_turn([1, 2, 3, 4, 5, 6, 7, 8, 9], aborted)
    b.add_turn(list(range(1, 12)), Answer([12], total=12, start=10, salt=2, version=4))
    branch = b.branch({"source": "math", "top_p": 0.9})
    assert branch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert branch.loss_mask.tolist() == [False] * 4 + [True] * 3 + [False] * 2 + [True] * 3
    expected = np.concatenate([routes(6), routes(12, salt=1)[6:10], routes(12, salt=2)[10:11]])
    assert np.array_equal(branch.rows["routing"].values, expected)
    assert branch.rows["head_ids"].values[:, 0].tolist() == [5, 6, 7, 10, 11, 12]
    assert branch.rows["mask"].counts.tolist() == [2] * 6
    assert (branch.meta["version_start"], branch.meta["version_end"]) == (3, 4)
    assert branch.meta["head_has_sampled"]


def test_untrained_turns_leave_no_rows():
    b = builder()
    b.add_turn([1, 2], Answer([3, 4], total=4))
    b.add_turn([1, 2, 3, 4, 5], Answer([6], total=6), trainable=False)
    branch = b.branch({})
    assert branch.loss_mask.tolist() == [False, False, True, True, False, False]
    assert branch.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0]
    assert (branch.S, branch.R) == (2, 5)
    assert branch.rows["head_ids"].count == branch.rows["mask"].count == 2


def test_an_empty_turn_changes_nothing():
    b = builder()
    b.add_turn([1, 2], Answer([3, 4], total=4))
    empty = Answer([], total=6)
    empty.routed_experts = None
    b.add_turn([1, 2, 3, 4, 5], empty)
    assert b.branch({}).tokens.tolist() == [1, 2, 3, 4]


def test_another_prompt_is_another_branch():
    b = builder()
    b.add_turn([1, 2], Answer([3, 4], total=4))
    assert b.extends([1, 2, 3, 4, 9])
    assert not b.extends([1, 2, 9])
    with pytest.raises(PayloadError, match="leaves the branch at position 2 of 4"):
        b.add_turn([1, 2, 9, 9, 9], Answer([5], total=6))
    with pytest.raises(PayloadError, match="leaves the branch at position 3 of 4"):
        b.add_turn([1, 2, 3], Answer([5], total=4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"routed_experts": None}, "routing: the engine returned none"),
        ({"routed_experts": npy(routes(9).astype(np.uint8))}, "routing: 9 rows for 4 tokens"),
        ({"routed_experts": npy(routes(1).astype(np.uint8))}, "routing: 1 rows for 4 tokens, of which 0"),
        ({"top_logprobs": None}, "head: none for 2"),
        ({"top_logprobs": [([3, 4], [-0.5, -1.0])]}, "head: 1 rows for 2"),
        ({"sampling_mask": [[3]]}, "mask: 1 kept sets for 2"),
        ({"logprobs": [-0.1]}, "logprobs: 1 for 2"),
        ({"weight_versions": [("main", 0, 2)]}, "has no number"),
    ],
)
def test_answers_that_do_not_fit_their_tokens(change, words):
    answer = Answer([3, 4], total=4)
    for name, value in change.items():
        setattr(answer, name, value)
    with pytest.raises(PayloadError, match=words):
        builder().add_turn([1, 2], answer)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("token_ids", [3, 264], "tokens: id 264 "),
        ("top_logprobs", [([3, 4], [-0.5, -1.0]), ([4, 300], [-0.5, -1.0])], "head: id 300 "),
        ("sampling_mask", [[3], [4, 70_000]], "mask: id 70000 "),
    ],
)
def test_ids_beyond_the_vocabulary_never_reach_a_rank(name, value, words):
    answer = Answer([3, 4], total=4)
    setattr(answer, name, value)
    b = BranchBuilder(head_k=2, mask=True, vocab=264)

    def whole():
        b.add_turn([1, 2], answer)
        return b.branch({})

    with pytest.raises(PayloadError, match=f"{words}is outside the model's vocabulary of 264"):
        whole()


def test_no_mask_from_the_engine_means_no_restriction():
    answer = Answer([3, 4], total=4)
    answer.sampling_mask = None
    b = builder()
    b.add_turn([1, 2], answer)
    assert b.branch({"top_p": 1.0}).rows["mask"].counts.tolist() == [0, 0]
    with pytest.raises(PayloadError, match="no kept ids at position 2"):
        b.branch({"top_p": 0.9})
