"""A step's hand-over at the shape of a real run: the arena beside the HTTP design, on the same bytes.

`python -m benches.step [--samples 64] [--readers 2] [--rounds 5] [--save FILE]`. One process is the env worker: it
encodes a step's samples (48 layers x top-8, a head of 128, masks of the published sizes, 1,000 to 16,000 tokens) into
arena blocks, or with the same code into bytes on its heap behind a threaded HTTP server: the design that shmrl
replaces, at its best, with kept-alive connections and http.client. The ranks, a process each, make their share
readable (map it, or fetch it), gather it into the same packed buffers by the same code, and let go of it. In a third
kind of step the ranks are on another node: what they read comes from the arena's node server into arenas of their
own, over the loopback. Steps of all kinds alternate; the first ones are compared byte for byte and do not count. Then
a step of 1,024 rollouts on four nodes, computed from the least of what was measured.

    publish   from the references' departure until every rank can read every byte
    step      encode, publish, gather, let go
    CPU       of all processes, in the same span
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benches.bench_payload import EXPERTS, HEAD, LAYERS, TOP_K, branch
from benches.peers.http_server import serve
from benches.step_model import Costs, report
from shmrl.arena import Arena
from shmrl.node.blocks import moved
from shmrl.node.client import Client
from shmrl.node.copies import Copies
from shmrl.node.server import NodeServer
from shmrl.payload import (
    TensorBatch,
    assemble,
    encode,
    micro_batches_from_wire,
    micro_batches_to_wire,
    pack,
    sample_from_wire,
    sample_to_wire,
)
from shmrl.payload.encode import _arrays, _full_meta, _layout, _write
from shmrl.types import Handle, MicroBatch, Sample
from shmrl.wire import pack as packed
from shmrl.wire import unpack

TAG = "bench/source/group/episode"
SHORTEST, LONGEST = 1_000, 16_000
KINDS = ("arena", "http", "nodes")
TOKEN = "0" * 32
BARS = {"publish": 10.0, "publish CPU": 3.0, "step": 3.0}


# ------------------------------------------------------------------------------------------------------ env worker


def encoded_on_heap(one: Any, number: int) -> tuple[Sample, memoryview]:
    """What `encode` writes, on the heap; the handle names them for the server."""
    arrays = _arrays(one, 0)
    header, nbytes = _layout(arrays, one, 0, (), _full_meta(one.meta, TAG))
    raw, base = header.pack()
    blob = memoryview(np.empty(base + nbytes, np.uint8))  # a bytearray would be written twice
    _write(blob, raw, base, arrays, header.columns)
    size, nonce = len(blob), number.to_bytes(8, "little")
    handle = Handle.pack(node=0, arena=0, slot=number, generation=0, nbytes=size, nonce=nonce)
    return header.sample(handle), blob


def env_worker(address: str, samples: int, pipe: Any) -> None:
    """Answers a kind with (samples on the wire, server, seconds, CPU seconds); None ends it. CPU on any other word."""
    lengths = np.geomspace(SHORTEST, LONGEST, samples).astype(int)
    branches = [branch(seed, int(T)) for seed, T in enumerate(lengths)]
    blobs: dict[str, Any] = {}
    server = serve(blobs)
    with Arena.attach(address) as arena, NodeServer(arena, TOKEN) as node:
        at = {"arena": None, "http": server.server_port, "nodes": node.url}
        pipe.send("ready")
        while (kind := pipe.recv()) is not None:
            if kind not in KINDS:
                pipe.send(time.process_time())
                continue
            began, cpu, wires = time.perf_counter(), time.process_time(), []
            for number, one in enumerate(branches):
                if kind != "http":
                    sample = encode(arena, one, TAG)
                else:
                    sample, blob = encoded_on_heap(one, number)
                    blobs[str(sample.handles[0])] = blob
                wires.append(sample_to_wire(sample))
            pipe.send((wires, at[kind], time.perf_counter() - began, time.process_time() - cpu))
    server.shutdown()
    server.server_close()


# ------------------------------------------------------------------------------------------------------------ rank


class Mapped:
    """Blocks of the rank's own node."""

    def __init__(self, address: str, number: int) -> None:
        self.arena = self.source = Arena.attach(address, reader=number)
        self.views: list[Any] = []

    def here(self, micro_batches: list[MicroBatch], _: None) -> list[MicroBatch]:
        self.views = self.arena.get_many(handles_of(micro_batches))
        return micro_batches

    def done(self, micro_batches: list[MicroBatch]) -> None:
        while self.views:
            self.views.pop().release()
        self.arena.done(handles_of(micro_batches))

    def close(self) -> None:
        self.arena.close()


class Fetched:
    """Blocks of another node, in an arena of this one."""

    def __init__(self, nbytes: int, number: int) -> None:
        self.source, self.number = Arena.create(nbytes), number
        self.copies, self.nodes = Copies(self.source, Client(TOKEN)), {}

    def here(self, micro_batches: list[MicroBatch], url: str) -> list[MicroBatch]:
        handles = handles_of(micro_batches)
        self.nodes = {handle.origin: url for handle in handles}
        found = self.copies.want(handles, self.nodes, self.number, 60.0)
        return [moved(micro, found) for micro in micro_batches]

    def done(self, micro_batches: list[MicroBatch]) -> None:
        self.copies.done(handles_of(micro_batches), self.nodes, self.number)

    def close(self) -> None:
        self.copies.close()
        self.source.close()
        self.source.unlink()


class Bodies:
    """Blobs of one worker by http.client, each fetched once and kept until it is let go."""

    def __init__(self) -> None:
        self.source = self
        self.connection: http.client.HTTPConnection | None = None
        self.bodies: dict[Handle, bytes] = {}

    def here(self, micro_batches: list[MicroBatch], port: int) -> list[MicroBatch]:
        self.connection = self.connection or http.client.HTTPConnection("127.0.0.1", port)
        self.bodies = {handle: self.call("GET", handle) for handle in handles_of(micro_batches)}
        return micro_batches

    def call(self, method: str, handle: Handle) -> bytes:
        self.connection.request(method, f"/{handle}")
        return self.connection.getresponse().read()

    def get(self, handle: Handle, *_: Any, **__: Any) -> memoryview:
        return memoryview(self.bodies[handle])

    def done(self, micro_batches: list[MicroBatch]) -> None:
        for handle in handles_of(micro_batches):
            self.call("DELETE", handle)
        self.bodies.clear()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def handles_of(micro_batches: list[MicroBatch]) -> list[Handle]:
    return [handle for micro in micro_batches for handle in micro.handles]


def rank(address: str, number: int, nbytes: int, pipe: Any) -> None:
    """(kind, wire, server, whether to say a digest): says when all of it is readable, then when it is gathered and let
    go. nbytes: room for what comes from another node."""
    staging: list[Any] = []
    ways: dict[str, Any] = {"arena": Mapped(address, number), "http": Bodies(), "nodes": Fetched(nbytes, number)}
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        kind, wire, server, wanted = order
        way, cpu = ways[kind], time.process_time()
        micro_batches = micro_batches_from_wire(unpack(wire))
        here = way.here(micro_batches, server)
        pipe.send(time.process_time() - cpu)
        began = time.perf_counter()
        staging += [None] * (len(here) - len(staging))
        for index, micro in enumerate(here):
            staging[index] = assemble(way.source, micro, out=staging[index])
        gathered = time.perf_counter() - began
        way.done(micro_batches)
        pipe.send((time.process_time() - cpu, gathered, digest(staging[: len(here)]) if wanted else ""))
    for way in ways.values():
        way.close()


def digest(batches: list[TensorBatch]) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for name in ("tokens", "logprobs", "routing", "head_ids", "head_logprobs", "mask_ids"):
            found.update(getattr(batch, name).tobytes())
    return found.hexdigest()


# ------------------------------------------------------------------------------------------------------- orchestrator


@dataclass
class Step:
    """Seconds and bytes of one step; `sent`: what the orchestrator received and sent."""

    encode: float
    publish: float
    step: float
    publish_cpu: float
    step_cpu: float
    gather: float
    sent: int
    digests: list[str]


class Run:
    """The processes of one comparison."""

    def __init__(self, samples: int, readers: int) -> None:
        self.readers = readers
        nbytes = samples * (LONGEST - SHORTEST) // 2 * (LAYERS * TOP_K + 1_100)
        self.arena = Arena.create(max(256 << 20, nbytes))
        share = max(64 << 20, 2 * nbytes // readers)
        context, self.ends, self.processes = multiprocessing.get_context("spawn"), [], []
        ranks = [(rank, (self.arena.address, number, share)) for number in range(readers)]
        for role, given in [(env_worker, (self.arena.address, samples)), *ranks]:
            ours, theirs = context.Pipe()
            process = context.Process(target=role, args=(*given, theirs))
            process.start()
            self.ends.append(ours)
            self.processes.append(process)
        for end in self.ends:
            assert end.recv() == "ready"
        self.nbytes = 0

    def close(self) -> None:
        for end in self.ends:
            end.send(None)
        for process in self.processes:
            process.join(30)
        self.arena.close()
        self.arena.unlink()

    def step(self, kind: str, compared: bool = False) -> Step:
        """One step, from the branches to the packed buffers."""
        worker, *ranks = self.ends
        began = time.perf_counter()
        worker.send(kind)
        wires, server, encode_s, encode_cpu = worker.recv()
        own_cpu, samples = time.process_time(), [sample_from_wire(wire) for wire in wires]
        handles = [handle for sample in samples for handle in sample.handles]
        self.nbytes = sum(handle.nbytes for handle in handles)
        packs = pack(samples, seq_len=LONGEST, num_ranks=self.readers, pad_to_multiple_of=64)
        messages = [packed(micro_batches_to_wire(micros)) for micros in packs]
        worker_cpu = self._cpu(worker)
        departed = time.perf_counter()
        if kind != "http":
            self.arena.adopt(handles)
            self.arena.ship(handles, readers=1)
        for end, message in zip(ranks, messages, strict=True):
            end.send((kind, message, server, compared))
        readable = [end.recv() for end in ranks]
        publish = time.perf_counter() - departed
        served = self._cpu(worker) - worker_cpu
        told = [end.recv() for end in ranks]
        step = time.perf_counter() - began
        used = encode_cpu + sum(cpu for cpu, _, _ in told) + self._cpu(worker) - worker_cpu
        own = time.process_time() - own_cpu
        sent = sum(len(packed(wire)) for wire in wires) + sum(map(len, messages))
        return Step(
            encode_s, publish, step, sum(readable) + served, used + own, max(g for _, g, _ in told), sent,
            [digest for *_, digest in told],
        )  # fmt: skip

    def _cpu(self, worker: Any) -> float:
        worker.send("cpu")
        return float(worker.recv())


@contextmanager
def running(samples: int, readers: int) -> Iterator[Run]:
    run = Run(samples, readers)
    try:
        yield run
    finally:
        run.close()


def compared(run: Run) -> None:
    """One step of each kind: the same bytes in every packed buffer."""
    found = {kind: run.step(kind, compared=True).digests for kind in KINDS}
    assert found["arena"] == found["http"] == found["nodes"], "the ranks' buffers differ"


def main() -> None:
    """Prints a line per round, the medians and their bars, and the table of the large step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", help="a file for the tables, in Markdown")
    given = parser.parse_args()
    with running(given.samples, given.readers) as run:
        compared(run)
        rounds = []
        for number in range(given.rounds):
            rounds.append({kind: run.step(kind) for kind in KINDS})
            print(f"round {number + 1}: " + ", ".join(f"{name} {r:.1f}x" for name, r in ratios(rounds[-1]).items()))
        told = tables(run, given.samples, rounds)
    print("\n" + told)
    if given.save:
        Path(given.save).write_text(told + "\n")


def tables(run: Run, samples: int, rounds: list[dict[str, Step]]) -> str:
    """Medians with their bars, and the large step from the least times and CPU times."""
    keys = ("encode", "publish", "gather", "step", "publish_cpu", "step_cpu")
    title = f"{samples} samples, {run.nbytes / 1e6:.0f} MB, {run.readers} ranks; p50 of {len(rounds)} rounds"
    lines = [f"| {title} | shmrl | shmrl, another node | HTTP design | ratio, p50 | bar |", "|---|---|---|---|---|---|"]
    found = [ratios(one) for one in rounds]
    for key in keys:
        ours, afar, theirs = (
            1e3 * statistics.median(getattr(one[kind], key) for one in rounds) for kind in ("arena", "nodes", "http")
        )
        name = key.replace("_cpu", " CPU")
        ratio = f"{statistics.median(one[name] for one in found):.1f}x" if name in BARS else ""
        lines.append(f"| {name} | {ours:.1f} ms | {afar:.1f} ms | {theirs:.1f} ms | {ratio} | {BARS.get(name, '')} |")
    least = {kind: {key: min(getattr(one[kind], key) for one in rounds) for key in keys} for kind in KINDS}
    costs = Costs.of(run.nbytes, samples, run.readers, least)
    return "\n".join([*lines, "", report(costs, layers=LAYERS, top_k=TOP_K, experts=EXPERTS, head=HEAD)])


def ratios(one: dict[str, Step]) -> dict[str, float]:
    ours, theirs = one["arena"], one["http"]
    return {
        "publish": theirs.publish / ours.publish,
        "publish CPU": theirs.publish_cpu / ours.publish_cpu,
        "step": theirs.step / ours.step,
    }


if __name__ == "__main__":
    main()
