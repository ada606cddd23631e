"""What the two processes of a peer do, the same for every peer. Runs in them; the runner calls these methods.

Times are taken here, around the peer's own calls. Every byte that arrives is compared with what was sent, outside the
timed region.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benches.peers import peers
from benches.peers.interface import Blob, Setup

SOURCES = 8  # different blobs, taken in turn, so that sources are not in the caches


def sources(size: int) -> list[Blob]:
    """Rows of eight different expert ids below 256, as a router leaves them: random, and valid routing for encode."""
    rng = np.random.default_rng(1)
    rows = size // 8  # sizes are multiples of 8
    first, stride = rng.integers(0, 256, (2, SOURCES, rows, 1), np.uint8)
    ids = first + (2 * stride + 1) * np.arange(8, dtype=np.uint8)
    return list(ids.reshape(SOURCES, rows * 8))


class ProducerRole:
    """Puts blob i, frees blobs."""

    def __init__(self, name: str) -> None:
        self.peer = peers.find(name)

    def open(self, setup: Setup) -> None:
        """A fresh store for blobs of another size."""
        self.store = self.peer.producer(setup)
        self.blobs = sources(setup.size)

    def put(self, index: int) -> tuple[list[Any], float]:
        """-> ([reference], seconds). In a list, because Ray replaces a bare reference by its object."""
        data, own_s = self.blobs[index % SOURCES], self.store.own_work_s
        began = time.perf_counter()
        ref = self.store.put(data)
        return [ref], time.perf_counter() - began - (self.store.own_work_s - own_s)

    def burst(self, count: int) -> tuple[list[Any], float]:
        """Puts `count` blobs -> (references, seconds)."""
        blobs, own_s = [self.blobs[i % SOURCES] for i in range(count)], self.store.own_work_s
        began = time.perf_counter()
        refs = self.store.put_many(blobs)
        return refs, time.perf_counter() - began - (self.store.own_work_s - own_s)

    def free(self, refs: Sequence[Any]) -> float:
        began = time.perf_counter()
        self.store.free(refs)
        return time.perf_counter() - began

    def close(self) -> None:
        self.store.close()


class ConsumerRole:
    """Gets blobs and checks them."""

    def __init__(self, name: str) -> None:
        self.peer = peers.find(name)

    def open(self, setup: Setup) -> None:
        """The other side of the producer's."""
        self.store = self.peer.consumer(setup)
        self.blobs = sources(setup.size)

    def take(self, refs: Sequence[Any], index: int) -> tuple[float, float]:
        """Blob `index` -> (seconds of get, seconds of one pass over its bytes)."""
        began = time.perf_counter()
        blob = self.store.get(refs[0])
        got = time.perf_counter()
        np.add.reduce(blob[: blob.size // 8 * 8].view(np.uint64), dtype=np.uint64)
        read = time.perf_counter()
        self._check(blob, index)
        del blob
        self.store.done(refs)
        return got - began, read - got

    def burst(self, refs: Sequence[Any]) -> tuple[float, float]:
        """Every blob of a burst -> (seconds of the gets, seconds of letting go)."""
        get = self.store.get
        began = time.perf_counter()
        blobs = [get(ref) for ref in refs]
        got = time.perf_counter() - began
        for index, blob in enumerate(blobs):
            self._check(blob, index)
        del blob
        began = time.perf_counter()
        del blobs
        self.store.done(refs)
        return got, time.perf_counter() - began

    def _check(self, blob: Blob, index: int) -> None:
        if not np.array_equal(blob, self.blobs[index % SOURCES]):
            raise ValueError(f"blob {index}: {blob.size} bytes that differ from what was put")

    def close(self) -> None:
        gc.collect()
        self.store.close()
