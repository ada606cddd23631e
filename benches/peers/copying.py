"""shmrl alone: put beside glibc's memcpy into the same warm blocks, and two processes beside one on small blocks."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benches.peers.arena import TAG
from benches.peers.interface import Blob
from benches.peers.roles import sources
from shmrl import Arena, Handle

RING = 41  # blocks alive, so that no destination is in the caches


def copies(size: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each put, by way, interleaved step by step; all write the same blocks in turn.

    Each takes the next source: one that the way before it has read would still be in the caches.
    """
    blobs = itertools.cycle(sources(size))
    with Arena.create(2 * RING * size) as arena:
        ways: dict[str, Callable[[Blob], Handle]] = {
            "memcpy": lambda blob: _memcpy(arena, blob),
            "put": lambda blob: arena.put(blob, tag=TAG, checksum=False),
            "put, checksums": lambda blob: arena.put(blob, tag=TAG),
            "put, hot": lambda blob: arena.put(blob, tag=TAG, checksum=False, hot=True),
        }
        ring = [arena.put(next(blobs), tag=TAG) for _ in range(RING)]
        times: dict[str, list[float]] = {name: [] for name in ways}
        for step in range(-RING, steps):  # the first steps warm every block
            for name, way in ways.items():
                arena.free([ring.pop(0)])
                blob = next(blobs)
                began = time.perf_counter()
                ring.append(way(blob))
                if step >= 0:
                    times[name].append(time.perf_counter() - began)
        arena.free(ring)
        arena.unlink()
    return times


def _memcpy(arena: Arena, blob: Blob) -> Handle:
    """glibc's memcpy into a block; the rest of put's work included."""
    with arena.reserve(blob.nbytes, tag=TAG) as block:
        target = np.frombuffer(block.buffer, np.uint8)
        ctypes.memmove(target.ctypes.data, blob.ctypes.data, blob.nbytes)
        del target
        return block.seal(checksum=False)


def together(seconds: float, rounds: int) -> list[float]:
    """4 KiB put + free pairs per second of two processes at once, over those of one, per round."""
    context = multiprocessing.get_context("spawn")
    with Arena.create("64MiB") as arena:
        pipes, workers = [], []
        for _ in range(2):
            ours, theirs = context.Pipe()
            workers.append(context.Process(target=_pairs, args=(arena.address, theirs), daemon=True))
            workers[-1].start()
            pipes.append(ours)
        ratios = []
        for _ in range(rounds + 1):
            alone = _run(pipes[:1], seconds)
            ratios.append(_run(pipes, seconds) / alone)
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join()
        arena.unlink()
    return ratios[1:]


def _run(pipes: list[Any], seconds: float) -> float:
    for pipe in pipes:
        pipe.send(seconds)
    return sum(pipe.recv() for pipe in pipes)


def _pairs(address: str, pipe: Any) -> None:
    """Answers each number of seconds with the pairs per second in it, until None."""
    blob = np.zeros(4096, np.uint8)
    with Arena.attach(address) as arena:
        while (seconds := pipe.recv()) is not None:
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                for _ in range(100):
                    arena.free([arena.put(blob, tag=TAG, checksum=False)])
                count += 100
            pipe.send(count / (time.perf_counter() - began))


def median_ratio(times: dict[str, list[float]], way: str) -> float:
    """How many times faster than memcpy, at the median."""
    return statistics.median(times["memcpy"]) / statistics.median(times[way])
