"""Packing from metadata alone: nothing here has an arena."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmrl.errors import PayloadError
from shmrl.payload import pack
from shmrl.payload.pack import UNEVEN, estimated_flops
from shmrl.types import Handle, Sample


def ref(i, T, *, S=None, fields=("routing", "head", "mask"), node=1, **meta):
    handle = Handle.pack(node=node, arena=1, slot=i, generation=0, nbytes=T, nonce=b"\0" * 8)
    shapes = {"routing": (2, 2, 8), "head": (4,), "mask": ()}
    meta = {"source": f"s{i}", "shapes": {name: shapes[name] for name in fields}} | meta
    return Sample(((handle, 0, T),), T, T // 2 if S is None else S, T - 1, tuple(fields), meta)


def contents(ranks):
    return sorted(s.handles[0].slot for rank in ranks for batch in rank for s in batch.samples)


def test_five_samples_on_four_ranks_have_equal_counts():
    samples = [ref(i, 10 + i) for i in range(5)]
    ranks = pack(samples, seq_len=16, num_ranks=4)
    assert [len(rank) for rank in ranks] == [2, 2, 2, 2]
    assert contents(ranks) == [0, 1, 2, 3, 4]
    dummies = [b for rank in ranks for b in rank if not b.samples]
    assert len(dummies) == 3
    assert all(b.num_tokens == 1 and b.shapes["routing"] == (2, 2, 8) for b in dummies)
    roomy = pack(samples, seq_len=64, num_ranks=4)
    assert [len(rank) for rank in roomy] == [1, 1, 1, 1]
    assert all(rank[0].samples for rank in roomy)  # no rank idles while another has two


def test_ten_samples_in_four_micro_batches_keep_their_references():
    ranks = pack([ref(i, 8) for i in range(10)], seq_len=24, num_ranks=4)
    assert sorted((len(rank[0].samples) for rank in ranks), reverse=True) == [3, 3, 2, 2]
    assert contents(ranks) == list(range(10))
    assert all(len(rank[0].handles) == len(rank[0].samples) for rank in ranks)


def test_work_is_level():
    samples = [ref(i, T) for i, T in enumerate([4000, 1000, 1000, 1000, 1000, 1000, 1000, 1000, 3000, 2000])]
    ranks = pack(samples, seq_len=4096, num_ranks=2)
    work = [sum(estimated_flops(s) for b in rank for s in b.samples) for rank in ranks]
    assert max(work) < 1.2 * min(work)


def test_routed_and_unrouted_samples_never_share():
    plain = ("head", "mask")
    samples = [ref(0, 5), ref(1, 5, fields=plain), ref(2, 5, fields=plain, S=0), ref(3, 5)]
    ranks = pack(samples, seq_len=100, num_ranks=1)
    kinds = [{("routing" in s.fields) for s in b.samples if s.S} for b in ranks[0]]
    assert sorted(map(list, kinds)) == [[False], [True]]
    assert [b.fields for b in ranks[0] if "routing" in b.fields] == [("routing", "head", "mask")]
    alone = pack([ref(0, 5), ref(1, 5, fields=plain, S=0)], seq_len=100, num_ranks=1)
    assert len(alone[0]) == 1  # nothing is trained on the unrouted one: it may join


def test_head_and_mask_may_be_missing():
    samples = [ref(0, 5), ref(1, 5, fields=("routing",)), ref(2, 5, fields=("routing", "mask"))]
    (batch,) = pack(samples, seq_len=100, num_ranks=1)[0]
    assert batch.fields == ("routing", "head", "mask")


@pytest.mark.parametrize(("multiple", "padding"), [(1, 0), (64, 0), (128, 64)])
def test_one_rule_for_the_padded_length(multiple, padding):
    (batch,) = pack([ref(0, 7744)], seq_len=8192, num_ranks=1, pad_to_multiple_of=multiple)[0]
    assert (batch.padding, batch.num_tokens) == (padding, 7744 + padding)


def test_too_long_and_impossible():
    with pytest.raises(PayloadError, match="s7 has 101 tokens, a micro batch holds 1 to 100"):
        pack([ref(7, 101)], seq_len=100, num_ranks=1)
    with pytest.raises(PayloadError, match="0 tokens"):
        pack([ref(7, 5).truncated(0)], seq_len=100, num_ranks=1)
    for seq_len, ranks, multiple in ((100, 0, 1), (100, 1, 0), (100, 1, 64)):
        with pytest.raises(ValueError, match="cannot pack"):
            pack([ref(0, 5)], seq_len=seq_len, num_ranks=ranks, pad_to_multiple_of=multiple)


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"logprobs_mode": "raw"}, {"logprobs_mode": "processed"}, "logprobs mode"),
        ({"head_has_sampled": True}, {"head_has_sampled": False}, "head_has_sampled"),
        ({"shapes": {"head": (4,)}}, {"shapes": {"head": (5,)}}, "head row shape"),
    ],
)
def test_sources_that_cannot_be_trained_together_are_named(first, second, what):
    with pytest.raises(PayloadError, match=f"{what} differs: .* in math, .* in code"):
        pack([ref(0, 5, source="math", **first), ref(1, 5, source="code", **second)], seq_len=100, num_ranks=1)


def on_nodes(*lengths):
    """Samples of these lengths, node by node."""
    placed = [(node, T) for node, theirs in enumerate(lengths) for T in theirs]
    return [ref(i, T, node=node) for i, (node, T) in enumerate(placed)]


def cost_of_losing(ranks, node):
    """Samples in micro batches that have one of this node."""
    micros = [micro.samples for rank in ranks for micro in rank]
    return sum(len(m) for m in micros if any(sample.handles[0].node == node for sample in m))


@pytest.mark.parametrize(("num_ranks", "seq_len"), [(1, 4096), (1, 320), (2, 256), (2, 4096), (4, 256)])
def test_a_lost_node_costs_its_own_samples_and_no_others(num_ranks, seq_len):
    samples = on_nodes([60, 50, 40, 30, 20, 10, 50, 60], [10, 20, 30, 40, 50, 60, 60, 50])
    ranks = pack(samples, seq_len=seq_len, num_ranks=num_ranks)
    assert contents(ranks) == list(range(16))
    assert [cost_of_losing(ranks, node) for node in (0, 1)] == [8, 8]


def test_micro_batches_by_node_are_as_many_and_as_level():
    lengths = [[200 + 37 * (i * (node + 3) % 50) for i in range(64)] for node in range(4)]
    together = [T for theirs in lengths for T in theirs]
    mixed = pack(on_nodes(together), seq_len=8192, num_ranks=4)
    apart = pack(on_nodes(*lengths), seq_len=8192, num_ranks=4)
    assert len(apart[0]) == len(mixed[0])
    work = [max(sum(estimated_flops(s) for b in rank for s in b.samples) for rank in ranks) for ranks in (apart, mixed)]
    assert work[0] <= UNEVEN * work[1]
    assert [cost_of_losing(apart, node) for node in range(4)] == [64] * 4


def test_work_stays_level_where_one_node_has_most_of_it():
    ranks = pack(on_nodes([100] * 9, [100] * 3), seq_len=4096, num_ranks=2)
    assert [sum(len(micro.samples) for micro in rank) for rank in ranks] == [6, 6]


def test_a_micro_batch_is_of_several_nodes_where_there_are_more_of_those():
    ranks = pack(on_nodes(*[[100]] * 6), seq_len=4096, num_ranks=2)
    assert [len(micro.samples) for rank in ranks for micro in rank] == [3, 3]
    assert [cost_of_losing(ranks, node) for node in range(6)] == [3] * 6


def test_what_does_not_fit_beside_its_own_goes_to_another_nodes():
    samples = on_nodes([90, 10], [60, 40], [70, 30])
    ranks = pack(samples, seq_len=100, num_ranks=1)
    assert len(ranks[0]) == 3
    tight = pack(on_nodes([90], [60, 50], [30, 40, 10]), seq_len=100, num_ranks=1)
    assert contents(tight) == list(range(6))


def test_nothing_to_pack():
    assert pack([], seq_len=100, num_ranks=2) == [[], []]


@settings(max_examples=150)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 64), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=40),
    ranks=st.integers(1, 5),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_every_sample_exactly_once_within_bounds(lengths, ranks, multiple):
    samples = [
        ref(i, T, S=T if trained else 0, fields=("routing", "mask") if routed else ("mask",), node=node)
        for i, (T, routed, trained, node) in enumerate(lengths)
    ]
    packed = pack(samples, seq_len=64, num_ranks=ranks, pad_to_multiple_of=multiple)
    assert contents(packed) == list(range(len(samples)))
    assert len({len(rank) for rank in packed}) == 1
    for batch in (b for rank in packed for b in rank):
        assert 0 < batch.num_tokens <= 64
        assert batch.num_tokens % multiple == 0
        trained = {"routing" in s.fields for s in batch.samples if s.S}
        assert len(trained) <= 1
        assert ("routing" in batch.fields) >= (trained == {True})
        assert set(batch.shapes) == set(batch.fields)
