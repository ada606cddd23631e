"""Every assembled row equals what was encoded, whatever was cut, sliced, shared or padded."""

import mmap
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmrl.errors import ChecksumError, LostPayload, PayloadError
from shmrl.payload import Branch, assemble, encode, pack, ragged, register_field, sequence_first, zigzag
from shmrl.payload.registry import routing_padding
from shmrl.types import MicroBatch
from tests.payload.branches import make, routes

TAG = "run1/src/g/e"


def batch_of(*samples, padding=0):
    return MicroBatch(tuple(samples), padding=padding)


def check(batch, at, branch, n=None):
    """Positions at .. at + n of the batch are the first n of the branch."""
    n = branch.T if n is None else n
    here = slice(at, at + n)
    loss = branch.loss_mask[:n]
    sampled = int(loss.sum())
    assert np.array_equal(batch.tokens[here], branch.tokens[:n])
    assert np.array_equal(batch.positions[here], np.arange(n))
    assert np.array_equal(batch.loss_mask[here], loss)
    assert np.array_equal(batch.logprobs[here], branch.logprobs[:n])
    if "routing" in branch.rows:
        rows = branch.rows["routing"].values[:n]
        assert np.array_equal(batch.routing[here][: len(rows)], rows)
        assert batch.routing_covered[here].tolist() == [True] * len(rows) + [False] * (n - len(rows))
    if "head_ids" in branch.rows:
        assert np.array_equal(batch.head_covered[here], loss)
        assert np.array_equal(batch.head_ids[here][loss], branch.rows["head_ids"].values[:sampled])
        assert np.array_equal(batch.head_logprobs[here][loss], branch.rows["head_logprobs"].values[:sampled])
        assert np.isneginf(batch.head_logprobs[here][~loss]).all()
    if "mask" in branch.rows:
        counts = branch.rows["mask"].counts[:sampled]
        assert np.array_equal(batch.mask_counts[here], np.where(loss, np.pad(counts, (0, n))[np.cumsum(loss) - 1], 0))
        first = int(batch.mask_counts[:at].sum())
        assert np.array_equal(batch.mask_ids[first : first + counts.sum()], branch.rows["mask"].values[: counts.sum()])


def test_three_samples_and_padding(arena):
    branches = [make(37, 20), make(24, 10, salt=1), make(9, 3, salt=2)]
    samples = [encode(arena, branch, tag=TAG) for branch in branches]
    batch = assemble(arena, batch_of(*samples, padding=10))
    for branch, at in zip(branches, (0, 37, 61), strict=True):
        check(batch, at, branch)
    assert batch.seq_lens.tolist() == [37, 24, 9]
    assert batch.tokens[70:].tolist() == [0] * 10
    assert batch.positions[70:].tolist() == list(range(10))
    assert not batch.loss_mask[70:].any()
    assert not batch.logprobs[70:].any()
    assert np.array_equal(batch.routing[70:], routing_padding(10, (2, 2), 8))
    assert not batch.routing_covered[70:].any()
    assert (batch.routing.dtype, batch.layers, batch.num_experts) == (np.uint8, (0, 1), 8)


def test_the_missing_tail_is_marked_not_invented(arena):
    sample = encode(arena, make(7, 3), tag=TAG)
    batch = assemble(arena, batch_of(sample))
    assert batch.routing_covered.tolist() == [True] * 6 + [False]
    assert np.array_equal(batch.routing[:6], routes(6))
    whole = assemble(arena, batch_of(encode(arena, make(7, 3, rows=7), tag=TAG)))
    assert whole.routing_covered.all()


def test_a_cut_sample_is_fully_covered(arena):
    branch = make(18_058, 17_000, L=3)
    sample = encode(arena, branch, tag=TAG)
    before = arena.stats()["blocks"]
    cut = sample.truncated(17_804)
    assert (cut.T, cut.R, sample.R) == (17_804, 17_804, 18_057)
    batch = assemble(arena, batch_of(cut))
    assert batch.routing_covered.all()
    check(batch, 0, branch, 17_804)
    assert batch.head_covered.sum() == 804
    assert arena.stats()["blocks"] == before


def test_truncation_cuts_ids_and_counts_together(arena):
    branch = Branch([5, 5, 4, 7], [1, 0, 1, 1], [-0.1, 0, -0.1, -0.1], mask=([5, 9, 4, 7, 7, 2], [2, 0, 1, 3]))
    sample = encode(arena, branch, tag=TAG)
    batch = assemble(arena, batch_of(sample.truncated(3), padding=2))
    assert batch.mask_ids.tolist() == [5, 9, 4]
    assert batch.mask_counts.tolist() == [2, 0, 1, 0, 0]


@pytest.mark.parametrize("n", [0, 1, 19, 20, 21, 36, 37])
def test_every_cut(arena, n):
    branch, other = make(37, 20), make(9, 3, salt=1)
    cut = encode(arena, branch, tag=TAG).truncated(n)
    batch = assemble(arena, batch_of(cut, encode(arena, other, tag=TAG)))
    check(batch, 0, branch, n)
    check(batch, n, other)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.lists(st.booleans(), min_size=1, max_size=80), st.floats(0, 1)), min_size=1, max_size=4))
def test_any_turns_any_cuts(arena, drawn):
    branches = [make(len(loss), 0, salt=i, loss=loss) for i, (loss, _) in enumerate(drawn)]
    samples = [encode(arena, branch, tag=TAG) for branch in branches]
    lengths = [round(share * branch.T) for branch, (_, share) in zip(branches, drawn, strict=True)]
    batch = assemble(arena, batch_of(*(s.truncated(n) for s, n in zip(samples, lengths, strict=True)), padding=3))
    at = 0
    for branch, n in zip(branches, lengths, strict=True):
        check(batch, at, branch, n)
        at += n
    assert len(batch.mask_ids) == batch.mask_counts.sum()
    arena.free([handle for sample in samples for handle in sample.handles])


def test_a_reference_beyond_what_is_stored_is_an_error(arena):
    sample = encode(arena, make(9, 3), tag=TAG)
    handle = sample.handles[0]
    with pytest.raises(ValueError, match="truncate a sample of 9 tokens to 10"):
        sample.truncated(10)
    for change, words in (
        ({"segments": ((handle, 0, 12),), "T": 12}, r"positions \[0, 12\) of a block of 9"),
        ({"T": 8}, "segments of 9 tokens, T = 8"),
        ({"R": 5}, "its reference says 5"),
        ({"R": 9}, "its reference says 9"),
    ):
        broken = type(sample)(**{name: getattr(sample, name) for name in sample.__slots__} | change)
        with pytest.raises(PayloadError, match=words):
            assemble(arena, batch_of(broken))
    with pytest.raises(PayloadError, match="less than the rows"):
        assemble(arena, batch_of(sample, padding=-1))


def test_padding_spreads_over_experts_and_ranks():
    rows = routing_padding(16, (48, 8), 128, 8)
    assert all(len(set(row)) == 8 for row in rows.reshape(-1, 8).tolist())
    for layer in range(48):
        assert np.bincount(rows[:, layer].ravel() // 16, minlength=8).tolist() == [16] * 8
        assert np.bincount(rows[:, layer].ravel(), minlength=128).max() == 1
    assert rows[0, 0].tolist() == [0, 16, 32, 48, 64, 80, 96, 112]
    assert rows[0, 1].tolist() == [1, 17, 33, 49, 65, 81, 97, 113]
    with pytest.raises(PayloadError, match="over 7 expert-parallel shards"):
        routing_padding(16, (48, 8), 128, 7)
    assert sorted(routing_padding(3, (1, 6), 6, 2)[1, 0].tolist()) == [0, 1, 2, 3, 4, 5]


def test_padding_is_numbered_after_slicing(arena):
    sample = encode(arena, make(9, 3, K=2, E=8), tag=TAG)
    batch = assemble(arena, batch_of(sample, padding=8), tokens=[(0, 0, 4), (1, 4, 8)], expert_parallel=4)
    assert np.array_equal(batch.routing[4:], routing_padding(4, (2, 2), 8, 4))
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert np.array_equal(batch.routing[:4], routes(4))


def test_context_parallel_ranks_read_two_ranges_per_sequence(arena):
    branches = [make(8, 2), make(4, 1, salt=1)]
    micro_batch = batch_of(*(encode(arena, branch, tag=TAG) for branch in branches))
    whole = assemble(arena, micro_batch)
    for rank, wanted in ((0, [0, 1, 6, 7, 8, 11]), (1, [2, 3, 4, 5, 9, 10])):
        share = assemble(arena, micro_batch, tokens=zigzag([8, 4], 2, rank))
        assert share.seq_lens.tolist() == [4, 2]
        for name in ("tokens", "positions", "loss_mask", "logprobs", "routing_covered", "head_ids", "mask_counts"):
            assert np.array_equal(getattr(share, name), getattr(whole, name)[wanted]), name
        covered = share.routing_covered
        assert np.array_equal(share.routing[covered], whole.routing[wanted][covered])
        ends = np.cumsum(whole.mask_counts)
        kept = [i for p in wanted for i in whole.mask_ids[ends[p] - whole.mask_counts[p] : ends[p]]]
        assert share.mask_ids.tolist() == kept
    with pytest.raises(ValueError, match="sequence 1 has 5 tokens"):
        zigzag([8, 5], 2, 0)
    with pytest.raises(PayloadError, match=r"no range \(0, 0, 9\)"):
        assemble(arena, micro_batch, tokens=[(0, 0, 9)])


def test_layers_are_asked_for_by_global_id(arena):
    rows = routes(6, L=58, K=2, E=128)
    moe = Branch(range(7), [0] * 7, [0.0] * 7, routing=rows, num_experts=128, layers=range(3, 61))
    every = Branch(range(7), [0] * 7, [0.0] * 7, routing=routes(6, L=61, K=2, E=128), num_experts=128)
    dense_left_out, dense_included = (batch_of(encode(arena, branch, tag=TAG)) for branch in (moe, every))
    got = assemble(arena, dense_left_out, layers=range(30, 46))
    assert got.layers == tuple(range(30, 46))
    assert np.array_equal(got.routing[:6], rows[:, 27:43])
    assert np.array_equal(
        assemble(arena, dense_included, layers=range(30, 46)).routing[:6], routes(6, 61, 2, 128)[:, 30:46]
    )
    scattered = assemble(arena, dense_left_out, layers=[60, 3, 4, 9])
    assert np.array_equal(scattered.routing[:6], rows[:, [57, 0, 1, 6]])
    with pytest.raises(PayloadError, match=r"layers: \[2\] are not among the stored ones"):
        assemble(arena, dense_left_out, layers=[2, 3])


def test_a_rank_of_four_stages_and_two_context_ranks_reads_an_eighth(arena):
    branch = make(32, 8, L=48)
    micro_batch = batch_of(encode(arena, branch, tag=TAG))
    full = assemble(arena, micro_batch)
    share = assemble(arena, micro_batch, tokens=zigzag([32], 2, 1), layers=range(24, 36))
    wanted = [*range(8, 24)]
    assert np.array_equal(share.routing, full.routing[wanted][:, 24:36])
    assert share.routing.nbytes * 8 == full.routing.nbytes


def test_samples_without_routing_are_not_covered(arena):
    routed, plain = make(9, 3), make(5, 5, salt=1, routing=False)  # nothing is trained on the second
    batch = assemble(arena, batch_of(encode(arena, routed, tag=TAG), encode(arena, plain, tag=TAG)))
    check(batch, 0, routed)
    check(batch, 9, plain)
    assert not batch.routing_covered[9:].any()
    assert all(len(set(row)) == 2 for row in batch.routing.reshape(-1, 2).tolist())


def test_head_and_mask_may_be_missing_in_some(arena):
    full, bare = make(9, 3), make(6, 2, salt=1, head=0, mask=False)
    batch = assemble(arena, batch_of(encode(arena, bare, tag=TAG), encode(arena, full, tag=TAG)))
    check(batch, 0, bare)
    check(batch, 6, full)
    assert not batch.head_covered[:6].any()


def test_nothing_captured(arena):
    batch = assemble(arena, batch_of(encode(arena, Branch([1, 2], [0, 1], [0, -1.0]), tag=TAG)))
    assert batch.fields == {}
    assert batch.routing is batch.head_ids is batch.mask_ids is batch.routing_covered is None
    with pytest.raises(PayloadError, match="this batch has none"):
        batch.routing_signed()
    with pytest.raises(PayloadError, match="this batch has none"):
        batch.head_without_sampled()


def test_a_dummy_has_the_arrays_of_its_siblings(arena):
    samples = [encode(arena, make(9, 3, salt=i), tag=TAG) for i in range(3)]
    ranks = pack(samples, seq_len=16, num_ranks=2, pad_to_multiple_of=4)
    (dummy,) = (b for rank in ranks for b in rank if not b.samples)
    batch = assemble(arena, dummy)
    assert (batch.tokens.shape, batch.routing.shape, batch.head_ids.shape) == ((4,), (4, 2, 2), (4, 3))
    assert np.array_equal(batch.routing, routing_padding(4, (2, 2), 8))
    assert batch.mask_ids.shape == (0,)
    assert not batch.loss_mask.any()
    assert len(batch.seq_lens) == 0


def test_staging_is_reused_and_never_aliases_the_arena(arena):
    branches = [make(37, 20), make(24, 10, salt=1)]
    first, second = (batch_of(encode(arena, branch, tag=TAG)) for branch in branches)
    batch = assemble(arena, first)
    address = batch.routing.__array_interface__["data"][0]
    again = assemble(arena, second, out=batch)
    assert again.routing.__array_interface__["data"][0] == address
    check(again, 0, branches[1])
    again.routing[:] = 0
    again.tokens[:] = 0
    check(assemble(arena, second), 0, branches[1])
    check(assemble(arena, first, out=again), 0, branches[0])


def test_every_view_is_released(arena):
    sample = encode(arena, make(9, 3), tag=TAG)
    assemble(arena, batch_of(sample))
    with pytest.raises(PayloadError):
        assemble(arena, batch_of(sample), layers=[99])
    assert arena.free(list(sample.handles)) == 1
    assert arena.stats()["blocks"] == 0


def test_a_lost_block_is_named(arena):
    kept, lost = encode(arena, make(9, 3), tag=TAG), encode(arena, make(9, 3, salt=1), tag=TAG)
    arena.free(list(lost.handles))
    with pytest.raises(LostPayload, match=rf"slot={lost.handles[0].slot}.* of s1/g/e is gone"):
        assemble(arena, batch_of(kept, lost))
    other = encode(arena, make(5, 2, salt=2), tag=TAG)  # its slot may be the freed one: never its bytes
    with pytest.raises(LostPayload):
        assemble(arena, batch_of(lost))
    check(assemble(arena, batch_of(other)), 0, make(5, 2, salt=2))


def test_shared_prefixes_assemble_like_whole_branches(arena):
    branch = make(40, 25)
    head = tuple(branch.rows[name].values[:5] for name in ("head_ids", "head_logprobs"))
    counts = branch.rows["mask"].counts[:5]
    mask = (branch.rows["mask"].values[: counts.sum()], [0] * 25 + counts.tolist())
    first = (branch.tokens[:30], branch.loss_mask[:30], branch.logprobs[:30])
    prompt = Branch(*first, routing=routes(30), num_experts=8, head=head, mask=mask)
    shared = encode(arena, prompt, tag=TAG)
    other = make(9, 3, salt=1)
    sample = encode(arena, branch, tag=TAG, prefix=(shared, 28))
    batch = assemble(arena, batch_of(sample, encode(arena, other, tag=TAG)))
    check(batch, 0, branch)
    check(batch, 40, other)
    for n in (10, 27, 28, 29, 33):
        check(assemble(arena, batch_of(sample.truncated(n))), 0, branch, n)
    ranges = assemble(arena, batch_of(sample), tokens=[(0, 20, 35)])
    assert np.array_equal(ranges.tokens, branch.tokens[20:35])
    assert np.array_equal(ranges.routing, routes(40)[20:35])


def test_registered_fields_work_everywhere_with_no_core_change(arena):
    register_field("router_weights", "float16", ("layers", None), align="input", fill=0)
    register_field("indexer_topk", "int32", ragged, align="input", fill=-1)
    register_field("teacher", np.float32, (5,), align="sampled", fill=0)
    T, L, K = 12, 4, 3
    weights = (np.arange((T - 1) * L * K).reshape(T - 1, L, K) / 8).astype(np.float16)
    counts = L * np.minimum(np.arange(T - 1) + 1, 2048)
    topk = np.arange(counts.sum(), dtype=np.int32)
    teacher = np.arange(8 * 5, dtype=np.float32).reshape(8, 5)
    branch = make(T, 4, L=L, fields={"router_weights": weights, "indexer_topk": (topk, counts), "teacher": teacher})
    sample = encode(arena, branch, tag=TAG)
    assert sample.fields == ("routing", "head", "mask", "router_weights", "indexer_topk", "teacher")
    other = encode(arena, make(6, 2, salt=1, L=L), tag=TAG)
    (micro_batch,) = pack([sample, other], seq_len=32, num_ranks=1, pad_to_multiple_of=32)[0]
    batch = assemble(arena, micro_batch)
    check(batch, 0, branch)
    assert np.array_equal(batch.fields["router_weights"][: T - 1], weights)
    assert not batch.fields["router_weights"][T - 1 :].any()
    assert batch.covered["router_weights"].tolist() == [True] * (T - 1) + [False] * 21
    values, sizes = batch.fields["indexer_topk"]
    assert np.array_equal(values, topk)
    assert sizes.tolist() == [*counts, *[0] * 21]
    assert np.array_equal(batch.fields["teacher"][batch.covered["teacher"]], teacher)

    cut = assemble(arena, batch_of(sample.truncated(5), padding=3))
    assert cut.covered["router_weights"].tolist() == [True] * 5 + [False] * 3
    assert np.array_equal(cut.fields["indexer_topk"][0], topk[: counts[:5].sum()])
    assert np.array_equal(cut.fields["teacher"][4], teacher[0])

    share = assemble(arena, batch_of(sample), tokens=zigzag([12], 2, 0), layers=[1, 2])
    assert np.array_equal(share.fields["router_weights"][:5], weights[[0, 1, 2, 9, 10]][:, 1:3])
    assert share.fields["indexer_topk"][1].tolist() == [*counts[[0, 1, 2, 9, 10]], 0]
    assert arena.free([*sample.handles, *other.handles]) == 2
    assert arena.stats()["blocks"] == 0


def test_registered_fields_are_checked(arena):
    register_field("router_weights", "float16", ("layers", None), align="input", fill=0)
    register_field("pair", "int8", (2,), align="sampled", fill=-1)
    with pytest.raises(PayloadError, match="router_weights: nan at position"):
        make(3, 1, fields={"router_weights": np.full((2, 2, 2), np.nan)})
    with pytest.raises(PayloadError, match=r"pair: shape \(2, 3\), expected \[rows, 2\]"):
        make(3, 1, fields={"pair": np.zeros((2, 3), int)})
    with pytest.raises(PayloadError, match="pair: 200 does not fit in int8"):
        make(3, 1, fields={"pair": [[1, 200], [0, 0]]})
    with pytest.raises(PayloadError, match="already registered"):
        register_field("pair", "int16", (2,), align="sampled", fill=-1)
    with pytest.raises(PayloadError, match="already registered as a core column"):
        register_field("tokens", "int32", (), align="input", fill=0)
    with pytest.raises(PayloadError, match="cannot be stored"):
        register_field("names", "U8", (), align="input", fill=0)
    with pytest.raises(PayloadError, match="'input' or 'sampled'"):
        register_field("x", "i4", (), align="output", fill=0)


def test_token_order_is_packing_order(arena):
    """Positions written as expert ids show which token a row belongs to."""
    samples = [
        encode(arena, Branch(range(3), [0] * 3, [0.0] * 3, routing=[[[2 * i]], [[2 * i + 1]]], num_experts=8), tag=TAG)
        for i in range(2)
    ]
    batch = assemble(arena, batch_of(*samples))
    signed = batch.routing_signed()
    assert signed.ravel().tolist() == [0, 1, -1, 2, 3, -1]
    assert sequence_first(signed, batch.seq_lens, -1).ravel().tolist() == [0, 2, 1, 3, -1, -1]


def test_missing_rows_export_as_minus_one_in_a_type_that_holds_every_id(arena):
    branch = Branch([1, 2], [0, 0], [0.0, 0.0], routing=[[[255]]], num_experts=256)
    batch = assemble(arena, batch_of(encode(arena, branch, tag=TAG)))
    signed = batch.routing_signed()
    assert signed.dtype == np.int16
    assert signed.ravel().tolist() == [255, -1]
    for dtype in (np.int8, np.uint8):
        with pytest.raises(PayloadError, match="cannot hold -1 and 255"):
            batch.routing_signed(dtype)
    wide = Branch([1, 2], [0, 0], [0.0, 0.0], routing=[[[40_000]]], num_experts=50_000)
    batch = assemble(arena, batch_of(encode(arena, wide, tag=TAG)))
    with pytest.raises(PayloadError, match="int16 cannot hold"):
        batch.routing_signed(np.int16)
    assert batch.routing_signed().ravel().tolist() == [40_000, -1]


def test_head_without_the_sampled_token(arena):
    head = ([[7, 7, 2, 9]], [[-0.2, -0.2, -2.1, -3.0]])
    meta = {"head_has_sampled": True, "head_k": 3}
    sample = encode(arena, Branch([1, 7], [0, 1], [0, -0.2], head=head, meta=meta), tag=TAG)
    batch = assemble(arena, batch_of(sample))
    assert batch.head_has_sampled
    ids, logprobs = batch.head_without_sampled()
    assert ids[1].tolist() == [7, 2, 9]
    assert logprobs[1].tolist() == pytest.approx([-0.2, -2.1, -3.0])
    plain_head = ([[7, 2, 9]], [[-0.2, -2.1, -3.0]])
    plain = assemble(arena, batch_of(encode(arena, Branch([1, 7], [0, 1], [0, -0.2], head=plain_head), tag=TAG)))
    assert plain.head_without_sampled()[0][1].tolist() == [7, 2, 9]


def test_torch_is_imported_only_by_the_adapter():
    import subprocess
    import sys

    code = "import shmrl, sys; shmrl.assemble; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "."})


def flip_one_bit(arena, pattern):
    """Flips a bit of the only place in the arena's memory that holds `pattern`, behind everyone's back."""
    name = next(n for n in os.listdir("/dev/shm") if arena.address.split(":")[1] in n and n.endswith("data"))
    with open(f"/dev/shm/{name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(pattern)
        assert at >= 0
        assert memory.find(pattern, at + 1) < 0
        memory[at] ^= 1


def test_a_cut_reference_does_not_mind_damage_behind_its_cut(arena):
    rows = np.stack([np.random.default_rng(i).permutation(128)[:8] for i in range(10_000)]).reshape(10_000, 1, 8)
    branch = Branch(range(10_000), [0] * 10_000, [0.0] * 10_000, routing=rows, num_experts=128)
    sample = encode(arena, branch, tag=TAG)
    flip_one_bit(arena, rows[5000].astype(np.uint8).tobytes())
    check(assemble(arena, batch_of(sample.truncated(4000)), verify=True), 0, branch, 4000)
    with pytest.raises(ChecksumError, match="routing"):
        assemble(arena, batch_of(sample.truncated(6000)), verify=True)
    assert arena.free(list(sample.handles)) == 1
    assert arena.stats()["blocks"] == 0
