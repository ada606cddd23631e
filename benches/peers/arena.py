"""shmrl: one arena that the producer makes. With and without checksums, for a reader at once, in place, and encoded."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benches.peers.interface import Blob, Consumer, Peer, Producer, Setup
from shmrl import Arena, Branch, encode
from shmrl.payload import Routing
from shmrl.payload.forms import engine_rows

TAG = "bench/source/group/episode"
LAYERS, TOP_K, EXPERTS = 48, 8, 256


class ArenaProducer(Producer):
    """A copy into the arena."""

    def __init__(self, setup: Setup, checksum: bool = False, hot: bool = False) -> None:
        super().__init__(setup)
        self.checksum, self.hot = checksum, hot
        self.arena = Arena.create(max(256 << 20, 2 * setup.depth * setup.size))
        self.address = self.arena.address

    def put(self, data: Blob) -> Any:
        # By position: the dict of keywords is a quarter of what a small put costs.
        return self.address, self.arena.put(data, TAG, "block", 30.0, self.hot, self.checksum)

    def free(self, refs: Any) -> None:
        self.arena.free([handle for _, handle in refs])

    def close(self) -> None:
        self.arena.close()
        self.arena.unlink()


class InPlaceProducer(ArenaProducer):
    """Whoever makes the bytes writes them where the reader finds them: the hand-over is reserve and seal."""

    def put(self, data: Blob) -> Any:
        with self.arena.reserve(data.nbytes, tag=TAG) as block:
            began = time.perf_counter()
            np.copyto(np.frombuffer(block.buffer, np.uint8), data)
            self.own_work_s += time.perf_counter() - began
            return self.address, block.seal(checksum=False)

    def put_many(self, blobs: Sequence[Blob]) -> list[Any]:
        """Reserves every block, fills them all, seals them all."""
        blocks = [self.arena.reserve(data.nbytes, tag=TAG) for data in blobs]
        began = time.perf_counter()
        for block, data in zip(blocks, blobs, strict=True):
            np.copyto(np.frombuffer(block.buffer, np.uint8), data)
        self.own_work_s += time.perf_counter() - began
        return [(self.address, block.seal(checksum=False)) for block in blocks]


class EncodeProducer(ArenaProducer):
    """From the engine's answer: base64 of a .npy -> rows [n, 48, 8], checked -> encoded with checksums."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.answers: dict[int, str] = {}

    def put(self, data: Blob) -> Any:
        began = time.perf_counter()
        answer = self._answer(data)
        self.own_work_s += time.perf_counter() - began
        rows, _ = engine_rows(answer, layers=LAYERS, top_k=TOP_K)
        routing = Routing(EXPERTS, range(LAYERS))
        routing.add(rows, start=0)
        tokens = np.zeros(len(rows) + 1, np.int32)
        loss = np.zeros(len(tokens), np.bool_)
        loss[1:] = True
        stitched = routing.stitch(len(tokens))
        branch = Branch(tokens, loss, np.zeros(len(tokens), np.float32), routing=stitched, num_experts=EXPERTS)
        return self.address, encode(self.arena, branch, tag=TAG).handles[0]

    def _answer(self, data: Blob) -> str:
        """What vLLM answers for these rows; made once."""
        if id(data) not in self.answers:
            npy = io.BytesIO()
            np.save(npy, data.reshape(-1, LAYERS, TOP_K))
            self.answers[id(data)] = base64.b64encode(npy.getvalue()).decode()
        return self.answers[id(data)]


class ArenaConsumer(Consumer):
    """A view of the mapping."""

    arena: Arena | None = None

    def get(self, ref: Any) -> Blob:
        if self.arena is None:
            self.arena = Arena.attach(ref[0])
        return np.asarray(self.arena.get(ref[1]))

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()


class RoutingConsumer(ArenaConsumer):
    """A view of one column."""

    def get(self, ref: Any) -> Blob:
        if self.arena is None:
            self.arena = Arena.attach(ref[0])
        return np.frombuffer(self.arena.get(ref[1], field="routing"), np.uint8)


PEERS = [
    Peer("shmrl", ArenaProducer, ArenaConsumer),
    Peer("shmrl, checksums", partial(ArenaProducer, checksum=True), ArenaConsumer),
    Peer("shmrl, hot", partial(ArenaProducer, hot=True), ArenaConsumer),
    Peer("shmrl, in place", InPlaceProducer, ArenaConsumer),
    Peer("shmrl, encode", EncodeProducer, RoutingConsumer),
]
