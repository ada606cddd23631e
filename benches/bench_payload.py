"""Encode, assemble, and a step's hand-over: the arena beside HTTP and multiprocessing.shared_memory, in one run.

`pytest benches --benchmark-only`. A holder process keeps one step's samples three ways, as equal bytes: in arena
blocks, as bytes behind a ThreadingHTTPServer, and in one shared_memory segment each. The measured process assembles the
same micro batches from each into the same reused buffers, by the same code; only where the bytes come from differs.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import multiprocessing
from multiprocessing import shared_memory

import numpy as np
import pytest

from benches.peers.http_server import serve
from shmrl.arena import Arena
from shmrl.inference import answers
from shmrl.payload import Branch, Routing, assemble, encode, pack, sample_from_wire, sample_to_wire
from shmrl.payload.forms import engine_rows, routed_experts
from shmrl.types import Handle

LAYERS, TOP_K, EXPERTS, HEAD = 48, 8, 128, 128
SAMPLES, SEQ_LEN = 12, 8192
TAG = "bench/source/group/episode"


def branch(seed, T=None):
    """T tokens, 1,000 to 4,000 if it is not said, three quarters of them sampled; mask sizes as published: median 2,
    mean ~8, p99 ~82."""
    rng = np.random.default_rng(seed)
    T = T or int(rng.integers(1_000, 4_001))
    tokens = rng.integers(0, 150_000, T)
    loss = np.arange(T) >= T // 4
    S = int(loss.sum())
    base, stride = rng.integers(0, EXPERTS, (2, T - 1, LAYERS, 1))
    routing = ((base + (2 * stride + 1) * np.arange(TOP_K)) % EXPERTS).astype(np.uint8)
    head = rng.integers(0, 150_000, (S, HEAD), np.int32), -rng.random((S, HEAD), np.float32)
    counts = np.zeros(T, np.int32)
    counts[loss] = np.where(rng.random(S) < 0.46, 1, 1 + rng.lognormal(1.6, 1.35, S).clip(0, 511).astype(int))
    mask = np.repeat(tokens, counts), counts
    logprobs = np.where(loss, -rng.random(T), 0)
    return Branch(tokens, loss, logprobs, routing=routing, head=head, mask=mask, num_experts=EXPERTS)


class HttpBlocks:
    """Blobs by URL over one kept-alive connection."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def get(self, handle):
        self.connection.request("GET", f"/{handle}")
        return memoryview(self.connection.getresponse().read())


class SharedMemoryBlocks:
    """One named segment per block, opened once and kept, as a reader would."""

    def __init__(self, names):
        self.segments = {Handle(raw): shared_memory.SharedMemory(name) for raw, name in names.items()}

    def get(self, handle):
        return memoryview(self.segments[handle].buf)

    def close(self):
        for segment in self.segments.values():
            segment.close()


def hold(address, pipe):
    """The holder: encodes the step, keeps it three ways, and answers until it is told to end."""
    with Arena.attach(address) as arena:
        samples = [encode(arena, branch(seed), tag=TAG) for seed in range(SAMPLES)]
        blobs = {}
        for handle in (handle for sample in samples for handle in sample.handles):
            with arena.get(handle) as view:
                blobs[handle] = bytes(view)
        segments = {handle: shared_memory.SharedMemory(create=True, size=len(blob)) for handle, blob in blobs.items()}
        for handle, segment in segments.items():
            segment.buf[: len(blobs[handle])] = blobs[handle]
        server = serve({str(handle): blob for handle, blob in blobs.items()})
        names = {bytes(handle): segment.name for handle, segment in segments.items()}
        pipe.send(([sample_to_wire(sample) for sample in samples], server.server_address[1], names))
        pipe.recv()
        server.shutdown()
        server.server_close()
        for segment in segments.values():
            segment.close()
            segment.unlink()
        arena.free(list(blobs))


@pytest.fixture
def arena():
    arena = Arena.create(capacity="512MiB")
    yield arena
    arena.close()
    arena.unlink()


@pytest.fixture
def step(arena):
    """(micro batches, stores by name) of one step that another process holds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(arena.address, theirs))
    holder.start()
    wires, port, names = ours.recv()
    samples = [sample_from_wire(wire) for wire in wires]
    (micro_batches,) = pack(samples, seq_len=SEQ_LEN, num_ranks=1, pad_to_multiple_of=64)
    stores = {"arena": arena, "http": HttpBlocks(port), "shared_memory": SharedMemoryBlocks(names)}
    yield micro_batches, stores
    stores["http"].connection.close()
    stores["shared_memory"].close()
    ours.send("end")
    holder.join()
    holder.close()


def digest(batch):
    arrays = (batch.tokens, batch.logprobs, batch.loss_mask, batch.routing, batch.head_ids, batch.head_logprobs)
    return hashlib.sha256(b"".join(array.tobytes() for array in (*arrays, batch.mask_ids))).hexdigest()


@pytest.mark.parametrize("kind", ["arena", "http", "shared_memory"])
def test_a_steps_hand_over(benchmark, step, kind):
    """Every block of a step -> packed buffers."""
    micro_batches, stores = step
    staging = [assemble(stores["arena"], micro_batch) for micro_batch in micro_batches]
    wanted = [digest(batch) for batch in staging]

    def run():
        for index, micro_batch in enumerate(micro_batches):
            staging[index] = assemble(stores[kind], micro_batch, out=staging[index])

    benchmark.group = "a step's hand-over"
    benchmark.extra_info["MB"] = sum(handle.nbytes for m in micro_batches for handle in m.handles) / 1e6
    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
    assert [digest(batch) for batch in staging] == wanted


def test_encode(benchmark, arena):
    """One checked branch -> one sealed block."""
    one = branch(0)
    handles = []
    benchmark.group = "payload"
    benchmark.pedantic(
        lambda: handles.append(encode(arena, one, tag=TAG).handles[0]),
        teardown=lambda: arena.free([handles.pop()]),
        rounds=20,
        warmup_rounds=2,
    )


@pytest.mark.parametrize("way", ["into the block", "through arrays"])
def test_an_answer_becomes_a_block(benchmark, arena, way):
    """base64 of a .npy, 16,384 rows -> one sealed block; the other way decodes, then stitches, then copies it."""
    npy, T = io.BytesIO(), 16_385
    np.save(npy, np.resize(branch(0).rows["routing"].values, (T - 1, LAYERS, TOP_K)))
    text = base64.b64encode(npy.getvalue()).decode()
    tokens, loss, logprobs, handles = np.zeros(T, np.int32), np.zeros(T, np.bool_), np.zeros(T, np.float32), []

    def run():
        routing = Routing(EXPERTS, range(LAYERS))
        if way == "into the block":
            routing.add(engine_rows(text, layers=LAYERS, top_k=TOP_K)[0], start=0)
            rows = routing.stitch(T)
        else:
            routing.add(routed_experts(text, layers=LAYERS, top_k=TOP_K)[0], start=0)
            rows = routing.finish(T)
        one = Branch(tokens, loss, logprobs, routing=rows, num_experts=EXPERTS)
        handles.append(encode(arena, one, tag=TAG).handles[0])

    benchmark.group = "an answer's routing"
    benchmark.pedantic(run, teardown=lambda: arena.free([handles.pop()]), rounds=50, warmup_rounds=3)


@pytest.mark.parametrize("way", ["in C", "by a JSON library", "json.loads alone"])
def test_an_answer_is_read(benchmark, monkeypatch, way):
    """8 MB of JSON, 1,000 tokens with heads of 128 and kept sets of 200, as vLLM 0.32 sends them -> arrays."""
    random, n = np.random.default_rng(0), 1_000
    ids = random.integers(0, 150_000, (n, HEAD)).tolist()
    values = random.uniform(-20, 0, (n, HEAD)).astype(np.float32).tolist()
    tops = [[{"token_id": t, "logprob": v} for t, v in zip(*row, strict=True)] for row in zip(ids, values, strict=True)]
    choice = {"token_ids": [row[0] for row in ids], "finish_reason": "length"}
    choice |= {"sampling_mask": random.integers(0, 150_000, (n, 200)).tolist()}
    choice |= {"logprobs": {"content": [{**top[0], "top_logprobs": top} for top in tops]}}
    text = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
    if way == "by a JSON library":
        monkeypatch.setattr(answers, "_split", lambda *_, **__: None)
    read = {"json.loads alone": lambda: json.loads(text)}.get(
        way, lambda: answers.read_generation(text, "engine", {"logprobs": HEAD}, HEAD)
    )
    benchmark.group = "an answer's heads and masks"
    benchmark.extra_info["MB"] = len(text) / 1e6
    benchmark.pedantic(read, rounds=20, warmup_rounds=2)


def test_check(benchmark):
    """The arrays of one branch -> a checked `Branch`."""
    one = branch(0)
    rows = {name: row.values for name, row in one.rows.items()}
    benchmark.group = "payload"
    benchmark.pedantic(
        Branch,
        args=(one.tokens, one.loss_mask, one.logprobs),
        kwargs={
            "routing": rows["routing"],
            "head": (rows["head_ids"], rows["head_logprobs"]),
            "num_experts": EXPERTS,
        },
        rounds=20,
    )


def test_assemble(benchmark, arena):
    """One micro batch of about 8,192 tokens -> packed buffers, blocks written by this process."""
    samples = [encode(arena, branch(seed), tag=TAG) for seed in range(4)]
    (micro_batches,) = pack(samples, seq_len=SEQ_LEN, num_ranks=1, pad_to_multiple_of=64)
    batch = assemble(arena, micro_batches[0])
    benchmark.group = "payload"
    benchmark.pedantic(lambda: assemble(arena, micro_batches[0], out=batch), rounds=20, warmup_rounds=2)
    arena.free([handle for sample in samples for handle in sample.handles])


def test_pack(benchmark):
    """1,024 references on 8 ranks."""
    rng = np.random.default_rng(0)
    wire = [[[b"\1" * 32, 0, 0]], 0, 0, 0, ["routing"], [[48, 8, 128]], [None] * 15, {}, 0.0, 1.0]
    samples = []
    for T in rng.integers(200, 4_000, 1_024).tolist():
        wire[0], wire[1:4] = [[b"\1" * 32, 0, T]], [T, T // 2, T - 1]
        samples.append(sample_from_wire(wire))
    benchmark.group = "payload"
    benchmark.pedantic(pack, args=(samples,), kwargs={"seq_len": SEQ_LEN, "num_ranks": 8}, rounds=5)
