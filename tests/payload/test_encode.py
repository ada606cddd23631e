"""What a block holds, what a reference costs, and rows stored once for several branches."""

import base64
import io
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

from shmrl.arena._ctl import crc_blocks
from shmrl.errors import LostPayload, PayloadError
from shmrl.payload import (
    Branch,
    BranchBuilder,
    Routing,
    _payload,
    encode,
    micro_batches_from_wire,
    micro_batches_to_wire,
    pack,
    read_header,
    read_text,
    read_tokens,
    sample_from_wire,
    sample_to_wire,
)
from shmrl.payload.header import Header, align
from shmrl.types import MicroBatch
from tests.payload.branches import make, routes

TAG = "run1/reverse-text/g7/e3"
META = {
    "branch": "0",
    "task": "train-00017",
    "reward": 0.8333333,
    "rewards": {"lcs": 0.8333333, "format": 1.0},
    "stop_reason": "stop",
    "version_start": 1234,
    "version_end": 1235,
    "logprobs_mode": "processed",
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 512,
    "min_p": 0.05,
    "source": "reverse-text",
}


def test_the_header_is_enough_to_adopt_a_block(arena):
    sample = encode(arena, make(37, 20, L=4, meta=META), tag=TAG)
    assert (sample.T, sample.S, sample.R) == (37, 17, 36)
    assert sample.segments == ((sample.handles[0], 0, 37),)
    assert sample.fields == ("routing", "head", "mask")
    header = read_header(arena, sample.handles[0])
    assert header.sample(sample.handles[0]) == sample
    assert header.meta == {"run": "run1", "group": "g7", "episode": "e3", **META}
    assert (header.layers, header.num_experts, header.start) == ((0, 1, 2, 3), 8, 0)
    assert header.columns["routing"].shape == (36, 4, 2)
    assert header.columns["routing"].dtype == "|u1"
    assert header.columns["mask/offsets"].shape == (18,)
    assert all(column.offset % 64 == 0 for column in header.columns.values())
    assert sample.meta["temperature"] == 0.6  # read by the trainer, per sequence
    assert sample.meta["shapes"] == {"routing": (4, 2, 8), "head": (3,), "mask": ()}
    assert "rewards" not in sample.meta


def test_tokens_and_text_come_back(arena):
    messages = [{"role": "user", "content": "olleh"}, {"role": "assistant", "content": "hello"}]
    branch = Branch(range(9), [0] * 9, [0.0] * 9, messages=messages)
    sample = encode(arena, branch, tag=TAG)
    assert read_text(arena, sample) == messages
    assert read_tokens(arena, sample.truncated(4)).tolist() == [0, 1, 2, 3]
    assert read_text(arena, encode(arena, make(5, 2), tag=TAG)) is None
    with pytest.raises(PayloadError, match="meta: something that msgpack cannot carry"):
        encode(arena, make(5, 2, meta={"rewards": {"lcs": np.float32(1)}}), tag=TAG)
    with pytest.raises(PayloadError, match="text: something that msgpack cannot carry"):
        encode(arena, Branch([1], [0], [0.0], messages=[{"content": object()}]), tag=TAG)


@pytest.mark.parametrize(("E", "dtype"), [(256, "|u1"), (257, "<u2"), (512, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
@pytest.mark.parametrize("given_dtype", ["i8", "i4", "u4"])
def test_expert_ids_are_stored_in_the_narrowest_type(arena, E, dtype, given_dtype):
    rows = np.stack([np.random.default_rng(i).permutation(E)[:22] for i in range(2 * 6)]).reshape(6, 2, 22)
    rows[3, 1, 0] = E - 1 if E - 1 not in rows[3, 1] else rows[3, 1, 0]
    branch = Branch(range(7), [0] * 7, [0.0] * 7, routing=rows.astype(given_dtype), num_experts=E)
    handle = encode(arena, branch, tag=TAG).handles[0]
    with arena.get(handle) as view:
        column = Header.unpack(view).columns["routing"]
        assert column.dtype == dtype
        assert column.row_nbytes == 2 * 22 * np.dtype(dtype).itemsize
        assert bytes(memoryview(view)[column.offset : column.offset + column.nbytes]) == rows.astype(dtype).tobytes()


def test_minus_inf_is_stored_bit_for_bit(arena):
    logprobs = np.array([[-0.5, -np.inf, -np.inf]], np.float32)
    sample = encode(arena, Branch([1, 2], [0, 1], [0, -0.5], head=([[1, 2, 3]], logprobs)), tag=TAG)
    with arena.get(sample.handles[0]) as view:
        column = Header.unpack(view).columns["head_logprobs"]
        assert bytes(memoryview(view)[column.offset : column.offset + column.nbytes]) == logprobs.tobytes()


def test_masks_cost_their_ids_and_one_offset_per_token(arena):
    rng = np.random.default_rng(0)
    T = 100_000
    sizes = np.where(rng.random(T) < 0.46, 1, np.minimum(rng.lognormal(1.6, 1.2, T).astype(int) + 1, 500))
    tokens = rng.integers(0, 1000, T)
    ids = np.repeat(tokens, sizes)
    branch = Branch(tokens, np.ones(T, bool), np.full(T, -0.5), mask=(ids, sizes))
    header = read_header(arena, encode(arena, branch, tag=TAG).handles[0])
    stored = header.columns["mask"].nbytes + header.columns["mask/offsets"].nbytes
    assert stored <= 1.15 * (4 * sizes.sum() + 4 * T)


def test_a_reference_does_not_grow_with_its_tokens(arena):
    sizes, batches = [], []
    for T in (100, 20_000):
        sample = encode(arena, make(T, 10, meta=META), tag=TAG)
        wire = msgpack.packb(sample_to_wire(sample))
        assert sample_from_wire(msgpack.unpackb(wire)) == sample
        batch = MicroBatch((sample,), padding=7, fields=sample.fields, shapes=sample.meta["shapes"])
        batch_wire = msgpack.packb(micro_batches_to_wire([batch]))
        assert micro_batches_from_wire(msgpack.unpackb(batch_wire)) == [batch]
        sizes.append(len(wire))
        batches.append(len(batch_wire))
    assert max(sizes) <= 400
    assert sizes[1] - sizes[0] <= 32
    assert batches[1] - batches[0] <= 32


def test_what_samples_have_in_common_is_sent_once(arena):
    plain = [encode(arena, make(9, 3, meta=META), tag=f"run/source/g/{i}") for i in range(8)]
    other = encode(arena, make(9, 3, fields=(), meta={**META, "temperature": 0.5}), tag="run/other/g/8")
    batches = [MicroBatch(tuple(plain[:4])), MicroBatch(tuple(plain[4:]), padding=3), MicroBatch((), padding=5)]
    for sent in (batches, [*batches, MicroBatch((other,))], []):
        assert micro_batches_from_wire(msgpack.unpackb(msgpack.packb(micro_batches_to_wire(sent)))) == sent
    alone = sum(len(msgpack.packb(sample_to_wire(sample))) for sample in plain)
    assert len(msgpack.packb(micro_batches_to_wire(batches))) < alone / 1.4


def test_unknown_meta_survives_the_wire(arena):
    sample = encode(arena, make(9, 3), tag=TAG)
    sample.meta["note"] = "x"
    assert sample_from_wire(sample_to_wire(sample)).meta["note"] == "x"


# ------------------------------------------------------------------------------------------------------ shared prefixes


def sibling(i, prompt=30, length=40):
    """The same prompt of `prompt` tokens, then tokens and routes of its own."""
    T = length
    tokens = np.arange(T)
    tokens[prompt:] += 1000 * (i + 1)
    rows = routes(T - 1)
    rows[prompt:] = routes(T - 1, salt=i + 1)[prompt:]
    loss = np.arange(T) >= prompt
    logprobs = np.where(loss, -0.25, 0)
    return Branch(
        tokens, loss, logprobs, routing=rows, num_experts=8, head=(tokens[loss][:, None], logprobs[loss][:, None])
    )


def prompt_only(n=30):
    return Branch(np.arange(n), np.zeros(n, bool), np.zeros(n), routing=routes(n), num_experts=8)


def test_a_group_of_16_stores_its_prompt_once(arena):
    shared = encode(arena, prompt_only(), tag=TAG)
    samples = [encode(arena, sibling(i), tag=TAG, prefix=(shared, 30)) for i in range(16)]
    stored = sum(read_header(arena, h).columns["routing"].shape[0] for h in {h for s in samples for h in s.handles})
    assert stored == 30 + 16 * 9  # not 16 x 39; the last token of each was never fed
    assert [(s.T, s.S, s.R) for s in samples] == [(40, 10, 39)] * 16
    assert samples[3].segments == ((shared.handles[0], 0, 30), (samples[3].handles[1], 0, 10))
    assert read_tokens(arena, samples[3]).tolist() == sibling(3).tokens.tolist()
    header = read_header(arena, samples[3].handles[1])
    assert header.sample(samples[3].handles[1]) == samples[3]
    for sample in samples[1:]:  # the prompt is freed with the last sample that refers to it
        arena.free([sample.handles[1]])
    assert read_tokens(arena, samples[0])[:3].tolist() == [0, 1, 2]


def test_a_prefix_of_a_whole_sibling_and_of_a_prefix(arena):
    first = encode(arena, sibling(0), tag=TAG)
    second = encode(arena, sibling(1), tag=TAG, prefix=(first, 30))
    longer = Branch(
        [*sibling(1).tokens, 7], [*sibling(1).loss_mask, 0], [*sibling(1).logprobs, 0],
        routing=[*sibling(1).rows["routing"].values, *routes(1)], num_experts=8,
        head=(sibling(1).rows["head_ids"].values, sibling(1).rows["head_logprobs"].values),
    )  # fmt: skip
    third = encode(arena, longer, tag=TAG, prefix=(second, 39))
    assert [stop - start for _, start, stop in third.segments] == [30, 9, 2]
    assert read_tokens(arena, third).tolist() == longer.tokens.tolist()


def test_a_prefix_must_be_the_same(arena):
    shared = encode(arena, prompt_only(), tag=TAG)
    other = sibling(0)
    other.tokens[12] = 99
    with pytest.raises(PayloadError, match="tokens differ at position 12: 12 there, 99 here"):
        encode(arena, other, tag=TAG, prefix=(shared, 30))
    with pytest.raises(PayloadError, match="loss_mask differ at position 30"):
        encode(arena, sibling(-1), tag=TAG, prefix=(encode(arena, prompt_only(35), tag=TAG), 31))
    with pytest.raises(PayloadError, match="36 positions of a sample of 30"):
        encode(arena, sibling(0), tag=TAG, prefix=(shared, 36))
    tailless = encode(arena, Branch(range(30), [0] * 30, [0] * 30, routing=routes(29), num_experts=8), tag=TAG)
    with pytest.raises(PayloadError, match="29 routing rows for 30 positions; share 29"):
        encode(arena, sibling(0), tag=TAG, prefix=(tailless, 30))
    plain = encode(arena, Branch(range(30), [0] * 30, [0] * 30), tag=TAG)
    with pytest.raises(PayloadError, match="has no routing"):
        encode(arena, sibling(0), tag=TAG, prefix=(plain, 30))
    dense = encode(arena, Branch(range(30), [0] * 30, [0] * 30, routing=routes(30), num_experts=16), tag=TAG)
    with pytest.raises(PayloadError, match="16 experts"):
        encode(arena, sibling(0), tag=TAG, prefix=(dense, 30))
    arena.free(list(shared.handles))
    with pytest.raises(LostPayload):
        encode(arena, sibling(0), tag=TAG, prefix=(shared, 30))


def test_blocks_that_are_no_payload(arena):
    with pytest.raises(PayloadError, match="no payload of format 1: b'nonsense"):
        read_header(arena, arena.put(b"nonsense" * 8, tag=TAG))
    with pytest.raises(PayloadError, match="no payload"):
        read_header(arena, arena.put(b"", tag=TAG))


def crafted(arena, change):
    """A block whose header says something else; `change` edits its map."""
    good = encode(arena, make(9, 3), tag=TAG).handles[0]
    with arena.get(good) as view:
        data = bytes(view)
    size = int.from_bytes(data[8:12], "little")
    body = msgpack.unpackb(data[16 : 16 + size])
    change(body)
    raw = msgpack.packb(body)
    head = data[:8] + len(raw).to_bytes(4, "little") + data[12:16] + raw
    return arena.put(head.ljust(align(len(head)), b"\0") + data[align(16 + size) :], tag=TAG)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda body: body.pop("columns"), "columns of the header cannot be read .KeyError: 'columns'"),
        (lambda body: body.update(columns=[["tokens", "<i4"]]), "columns of the header"),
        (lambda body: body.update(columns=3), "columns of the header"),
        (lambda body: body["columns"][0].__setitem__(1, "nonsense"), "columns of the header"),
        (lambda body: body["columns"][0].__setitem__(1, "O"), "columns of the header"),
        (lambda body: body["columns"][0].__setitem__(2, [-9]), "sizes and an offset are expected"),
        (lambda body: body["columns"][0].__setitem__(2, [1 << 40]), "ends behind the block's"),
        (lambda body: body["columns"].pop(0), "the header has no column .'tokens'"),
        (lambda body: body["columns"].pop(1), "the header has no column .'loss_mask'"),
        (lambda body: body.update(fields=["mask"], columns=body["columns"][:3]), "no column .'mask', 'mask/offsets'"),
        (lambda body: body.update(fields=["spleen"]), "no such field"),
        (lambda body: body.pop("prefix"), "prefix of the header"),
        (lambda body: body.update(prefix=[[b"short", 0, 3]]), "prefix of the header cannot be read .a handle is 32"),
        (lambda body: body.pop("T"), "missing .'T'"),
        (lambda body: body.update(more=1), "unknown .'more'"),
        (lambda body: body.update(T="9"), "T of the header cannot be read .a str"),
        (lambda body: body.update(meta=None), "meta of the header"),
    ],
)
def test_a_crafted_header_is_refused_and_says_where(arena, change, match):
    with pytest.raises(PayloadError, match=match):
        read_header(arena, crafted(arena, change))


def test_a_header_that_is_no_map_is_refused(arena):
    raw = msgpack.packb(7)
    block = arena.put(b"SHMB" + bytes([1, 0, 0, 0, len(raw), 0, 0, 0]) + bytes(4) + raw, tag=TAG)
    with pytest.raises(PayloadError, match="the map of the header"):
        read_header(arena, block)


def test_raw_and_processed_sources_are_refused_at_packing(arena):
    raw = encode(arena, make(9, 3, meta={"logprobs_mode": "raw"}), tag="run1/math/g/e")
    processed = encode(arena, make(9, 3, salt=1, meta={"logprobs_mode": "processed"}), tag="run1/code/g/e")
    with pytest.raises(PayloadError, match="logprobs mode differs: 'raw' in s0/g/e, 'processed' in s1/g/e"):
        pack([raw, processed], seq_len=64, num_ranks=1)


def answered(prompt, sampled, rows, start=0):
    """An engine's answer with the rows of prompt and sampled tokens from `start` on."""
    npy = io.BytesIO()
    np.save(npy, rows[start : len(prompt) + len(sampled) - 1])
    text = base64.b64encode(npy.getvalue()).decode()
    return SimpleNamespace(
        token_ids=sampled, logprobs=[-0.5] * len(sampled), routed_experts=text, weight_versions=[], sampling_mask=None
    )


def conversation(rows, starts=(0, 3)):
    """Two turns, 4 + 3 and 2 + 2 tokens; the second answer begins where it is told."""
    builder = BranchBuilder(num_experts=8, layers=range(rows.shape[1]), top_k=rows.shape[2])
    builder.add_turn([1, 2, 3, 4], answered([1, 2, 3, 4], [5, 6, 7], rows, starts[0]))
    second = list(range(1, 10))
    builder.add_turn(second, answered(second, [10, 11], rows, starts[1]))
    return builder


def stored_routing(arena, handle):
    with arena.get(handle, field="routing") as view:
        return np.frombuffer(view, np.uint8).reshape(-1, 3, 2).copy()


@pytest.mark.parametrize("starts", [(0, 6), (0, 3), (0, 0)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, ">u2"])
def test_what_engines_answered_is_decoded_into_the_block(arena, starts, dtype):
    """Rows that are there already are skipped, wherever an answer begins; wider types are narrowed."""
    rows = routes(11, L=3, K=2)
    sample = encode(arena, conversation(rows.astype(dtype), starts).branch({}), tag=TAG)
    assert np.array_equal(stored_routing(arena, sample.handles[0]), rows[:10])
    whole = encode(arena, conversation(rows.astype(dtype), starts).branch({}), tag=TAG, prefix=(sample, 5))
    assert np.array_equal(stored_routing(arena, whole.handles[-1]), rows[5:10])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda rows: rows.__setitem__((8, 1, 0), 9), r"id 9 at token 8, layer slot 1, column 0 is outside \[0, 8\)"),
        (lambda rows: rows.__setitem__((2, 0), 3), "id 3 at token 2, layer slot 0, column 1 repeats"),
    ],
)
def test_ids_found_wrong_in_the_block_give_it_back(arena, bad, message):
    rows = routes(11, L=3, K=2).astype(np.uint8)
    bad(rows)
    branch = conversation(rows).branch({})
    with pytest.raises(PayloadError, match=message):
        encode(arena, branch, tag=TAG)
    with pytest.raises(PayloadError, match=message):
        np.asarray(branch.rows["routing"].values)
    assert arena.stats()["blocks"] == 0


def test_stitched_rows_are_of_the_branchs_model(arena):
    routing = Routing(num_experts=8, layers=[0])
    routing.add(routes(3, L=1, K=2), start=0)
    tokens, loss, logprobs = [1, 2, 3], [0, 1, 1], [0.0, -0.1, -0.2]
    assert Branch(tokens, loss, logprobs, routing=routing.stitch(3), num_experts=8).R == 3
    with pytest.raises(PayloadError, match="rows of 8 experts for 16"):
        Branch(tokens, loss, logprobs, routing=routing.stitch(3), num_experts=16)


def test_rows_that_are_copied_with_their_checksums_fit_on_both_sides():
    rows, crcs = np.arange(300_000, dtype=np.uint8), np.empty(5, np.uint32)
    target = np.zeros_like(rows)
    _payload.copy_rows(rows, target, 65536, crcs)
    assert (target == rows).all()
    assert crcs.tobytes() == crc_blocks(rows, 65536)
    for wrong in ((rows, target[1:], 65536, crcs), (rows, target, 65536, crcs[1:]), (rows, target, 0, crcs)):
        with pytest.raises(ValueError, match=r"bytes into .* checksums of"):
            _payload.copy_rows(*wrong)
