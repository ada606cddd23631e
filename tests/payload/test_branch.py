"""What a branch refuses, with field, position and value in the error."""

import numpy as np
import pytest

from shmrl.errors import PayloadError
from shmrl.payload import Branch, registry
from tests.payload.branches import make, routes

LOSS = [0, 1, 1]
LOGPROBS = [0.0, -0.5, -0.25]


def refused(field, *, position=..., value=..., tokens=(1, 2, 3), loss=LOSS, logprobs=LOGPROBS, **more):
    with pytest.raises(PayloadError) as caught:
        Branch(tokens, loss, logprobs, **more)
    error = caught.value
    assert error.field == field, error
    assert position is ... or error.position == position
    assert value is ... or error.value == value
    return str(error)


def test_counts_and_types():
    branch = make(7, 4, L=2, K=2)
    assert (branch.T, branch.S, branch.R, branch.layers, branch.num_experts) == (7, 3, 6, (0, 1), 8)
    assert branch.tokens.dtype == np.int32
    assert branch.loss_mask.dtype == np.bool_
    assert branch.logprobs.dtype == np.float32


@pytest.mark.parametrize("rows", [5, 8])
def test_routing_rows_are_one_less_than_tokens_or_equal(rows):
    for fine in (6, 7):
        assert fine == make(7, 4, rows=fine).R
    with pytest.raises(PayloadError, match=f"{rows} rows for 7 tokens; expected 6 .* or 7 .s0"):
        Branch(range(7), [0] * 7, [0.0] * 7, routing=routes(rows), num_experts=8, meta={"source": "s0"})


def test_one_token_has_no_row():
    assert make(1, 1, rows=0).R == 0


def test_a_row_of_zeros_is_a_capture_bug():
    rows = np.array([[[0, 1, 2, 3]], [[0, 0, 0, 0]]])
    message = refused("routing", position=(1, 0, 1), value=0, routing=rows, num_experts=8)
    assert "token 1, layer slot 0" in message
    Branch([1, 2], [0, 0], [0.0, 0.0], routing=[[[0]]], num_experts=8)  # K = 1: expert 0 is a choice like any other


@pytest.mark.parametrize("bad", [8, -1])
def test_ids_are_experts(bad):
    refused("routing", position=(1, 0, 1), value=bad, routing=[[[0, 1]], [[5, bad]]], num_experts=8)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
def test_every_integer_type_is_checked(dtype):
    rows = np.array([[[0, 1]], [[5, 5]]], dtype)
    refused("routing", position=(1, 0, 1), value=5, routing=rows, num_experts=8)


def test_byte_order_does_not_matter():
    rows = np.array([[[0, 1]], [[300, 2]]], ">u2")
    assert Branch([1, 2, 3], [0] * 3, [0.0] * 3, routing=rows, num_experts=512).rows["routing"].values[1, 0, 0] == 300


def test_routing_needs_the_number_of_experts():
    refused("num_experts", routing=routes(2))


def test_layers_are_counted():
    refused("routing", routing=routes(2, L=2), num_experts=8, layers=[3, 4, 5], value=2)
    refused("layers", routing=routes(2, L=2), num_experts=8, layers=[3, 3])


@pytest.mark.parametrize(("bad", "position"), [(float("nan"), 1), (float("inf"), 1)])
def test_logprobs_are_numbers(bad, position):
    refused("logprobs", position=position, logprobs=[0.0, bad, -0.5])
    refused("logprobs", logprobs=[0.0, -0.5])
    refused("logprobs", position=(2,), value=None, logprobs=[0.0, -0.5, None])


def test_a_sampled_token_has_a_logprob():
    refused("logprobs", position=2, logprobs=[0.0, -0.5, float("-inf")])


def test_head_keeps_minus_inf_and_refuses_nan_and_none():
    ids = [[2, 5], [3, 6]]
    kept = Branch([1, 2, 3], LOSS, LOGPROBS, head=(ids, [[-0.5, float("-inf")], [-0.1, float("-inf")]]))
    assert np.isneginf(kept.rows["head_logprobs"].values[:, 1]).all()
    refused("head_logprobs", position=(0, 1), head=(ids, [[-0.5, float("nan")], [-0.1, -0.2]]))
    refused("head_logprobs", position=(1, 0), head=(ids, [[-0.5, -0.1], [float("inf"), -0.2]]))
    refused("head_logprobs", position=(0, 1), value=None, head=(ids, [[-0.1, None], [-0.1, -0.2]]))


def test_head_has_one_row_per_sampled_token():
    refused("head_ids", head=([[2, 5]], [[-0.5, -1.0]]), value=1)


def test_head_columns_with_the_sampled_token_first():
    meta = {"head_has_sampled": True, "head_k": 3}
    ids = [[2, 2, 7, 9], [3, 1, 7, 9]]
    logprobs = np.full((2, 4), -1.0)
    Branch([1, 2, 3], LOSS, LOGPROBS, head=(ids, logprobs), meta=meta)
    refused("head", value=3, head=(np.array(ids)[:, 1:], logprobs[:, 1:]), meta=meta)
    message = refused("head", position=1, head=([[2, 2, 7, 9], [1, 3, 7, 9]], logprobs), meta=meta)
    assert "the sampled token is 3" in message


def test_mask_counts_sum_to_its_ids():
    tokens, loss, logprobs = [5, 5, 4, 7], [1, 0, 1, 1], [-0.1, 0, -0.1, -0.1]
    ids = [5, 9, 4, 7, 7, 2]
    branch = Branch(tokens, loss, logprobs, mask=(ids, [2, 0, 1, 3]))
    assert branch.rows["mask"].counts.tolist() == [2, 1, 3]
    with pytest.raises(PayloadError, match="counts sum to 5, there are 6 values"):
        Branch(tokens, loss, logprobs, mask=(ids, [2, 0, 1, 2]))
    with pytest.raises(PayloadError, match="at position 1, which is not a trained token"):
        Branch(tokens, loss, logprobs, mask=(ids, [2, 1, 0, 3]))
    with pytest.raises(PayloadError, match="4 tokens"):
        Branch(tokens, loss, logprobs, mask=(ids, [2, 1, 3]))


def test_the_sampled_id_is_in_its_kept_set():
    refused("mask", position=2, value=3, mask=([2, 9, 4, 5], [0, 2, 2]))


def test_a_mask_row_has_a_cap():
    registry.set_cap("mask", 512)
    ids = np.arange(151_936)
    message = refused("mask", position=1, value=151_936, mask=(ids, [0, 151_936, 0]))
    assert "the cap is 512" in message


@pytest.mark.parametrize("sampling", [{"top_p": 0.95}, {"top_k": 20}, {"min_p": 0.05}])
def test_truncated_sampling_needs_a_mask(sampling):
    message = refused("mask", meta={"source": "math", "group": "g1", **sampling})
    assert "math/g1" in message
    refused("mask", position=1, meta=sampling, mask=([3], [0, 0, 1]))


def test_untruncated_sampling_needs_none():
    assert "mask" not in Branch([1, 2, 3], LOSS, LOGPROBS, meta={"top_p": 1.0, "top_k": -1, "min_p": 0.0}).rows
    assert "mask" not in Branch([1, 2, 3], [0, 0, 0], [0, 0, 0], meta={"top_p": 0.9}).rows  # nothing was sampled


def test_tokens_and_loss_mask():
    refused("tokens", position=1, value=-5, tokens=[1, -5, 3])
    refused("tokens", tokens=[], loss=[], logprobs=[])
    refused("tokens", tokens=[1.5, 2.0, 3.0])
    refused("tokens", position=(1,), value=None, tokens=[1, None, 3])
    refused("loss_mask", position=0, value=2, loss=[2, 0, 0])
    refused("loss_mask", loss=[1, 0])


def test_meta_holds_plain_values():
    refused("meta", position="reward", meta={"reward": np.float32(1.0)})
    refused("meta", position="ids", meta={"ids": np.arange(3)})
    refused("meta", meta={"logprobs_mode": "cooked"}, value="cooked")


def test_an_unregistered_field_is_named():
    refused("hidden", fields={"hidden": np.zeros((3, 4))})


def test_arrays_at_odd_addresses_are_as_good():
    raw = b"x" + np.array([[[3, 1]], [[0, 2]]], np.int32).tobytes()
    routing = np.frombuffer(raw, np.int32, offset=1).reshape(2, 1, 2)
    assert not routing.flags.aligned
    branch = Branch([5, 6, 7], [0, 1, 1], [0, -0.1, -0.7], routing=routing, num_experts=4)
    assert branch.rows["routing"].values.flags.aligned
    with pytest.raises(PayloadError, match="3"):
        Branch([5, 6, 7], [0, 1, 1], [0, -0.1, -0.7], routing=routing, num_experts=3)
