"""What attaching and looking cost with 65,536 blocks, and what a writer feels of somebody who looks all the time.

`python -m benches.bench_operator`. The arena to attach to has a capacity of 64 GiB, of which 256 MiB are committed: the
check that the machine has as much is left out here, attach makes none.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from benches.figures import HEAD, row, timed
from shmrl.arena import Arena, inspect, memory

BLOCKS = 65_536
MS = 1e-3
PAIRS = 4000  # put + free of a writer between two looks at who disturbs it


def attach_once(address: str) -> tuple[float, float]:
    """(wall, CPU) seconds of attach, slot claim and sweep included; leaving is not timed."""
    began, used = time.perf_counter(), time.thread_time()
    arena = Arena.attach(address)
    times = time.perf_counter() - began, time.thread_time() - used
    arena.close()
    return times


def attaching() -> None:
    """To 64 GiB."""
    with mock.patch.object(memory, "refusals", return_value=[]):
        arena = Arena.create("64GiB")
    with arena:
        wall, cpu = zip(*(attach_once(arena.address) for _ in range(100)), strict=True)
        print(row("attach to 64 GiB", wall, 1, MS, cpu))
        arena.unlink()


def looking(arena: Arena) -> None:
    """From a process that is attached, and from one that is not, as the tools do."""
    print(row("stats", *_first(timed(arena.stats, 50), 20)))
    print(row("stats by source", *_first(timed(lambda: arena.stats(by="source"), 20), 20)))
    print(row("ls", *_first(timed(arena.ls, 5), 500)))
    print(row("fsck, under the allocator's lock", *_first(timed(arena.fsck, 20), 50)))
    with inspect.look(arena.address) as look:
        print(row("tools: stats by source", *_first(timed(lambda: look.counts("source"), 20), 20)))
        print(row("tools: ls", *_first(timed(lambda: list(look.rows(inspect.Filter())), 5), 500)))
        print(row("tools: fsck, without the lock", *_first(timed(look.fsck, 20), 50)))


def _first(times: tuple[list[float], list[float]], bar: float) -> tuple[list[float], float, float, list[float]]:
    return times[0], bar, MS, times[1]


# ------------------------------------------------------------------------------------------------------- a writer


def pairs(arena: Arena) -> list[float]:
    """Seconds of each 4 KiB put + free, sorted."""
    blob, times = np.zeros(4096, np.uint8), []
    for _ in range(PAIRS):
        began = time.perf_counter()
        arena.free(arena.put(blob, tag="bench/writer"))
        times.append(time.perf_counter() - began)
    return sorted(times)


@contextmanager
def somebody(task: Any, *args: Any) -> Iterator[Any]:
    """Another process that does `task` from "go" to "wait", over and over; answers each word."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_over_and_over, args=(theirs, task, args), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send("end")
        process.join()


def _over_and_over(pipe: Any, task: Any, args: tuple[Any, ...]) -> None:
    while (word := pipe.recv()) != "end":
        pipe.send(word)
        while word == "go" and not pipe.poll():
            task(*args)


def look_at(address: str) -> None:
    """stats, ls and fsck, as the tools do them."""
    with inspect.look(address) as look:
        look.counts("source")
        list(look.rows(inspect.Filter()))
        look.fsck()


def compute(address: str) -> None:
    """As much work that has nothing to do with the arena: what a second busy process costs anyway."""
    sum(range(1_000_000))


def disturbed(arena: Arena, rounds: int = 9) -> None:
    """A writer's p99 beside somebody who looks, over its p99 beside somebody who computes, in turns."""
    ratios, p99 = [], []
    with somebody(look_at, arena.address) as looker, somebody(compute, arena.address) as other:
        for _ in range(rounds):
            found = []
            for pipe in (looker, other):
                _say(pipe, "go")
                found.append(pairs(arena)[PAIRS * 99 // 100])
                _say(pipe, "wait")
            ratios.append(found[0] / found[1])
            p99.append(found)
    beside = [statistics.median(one) * 1e6 for one in zip(*p99, strict=True)]
    told = f"{beside[0]:.1f} and {beside[1]:.1f} us, ratio {statistics.median(ratios):.2f}"
    print(f"put + free of a writer, p99 beside one who looks / one who computes: {told}")


def _say(pipe: Any, word: str) -> None:
    pipe.send(word)
    if pipe.recv() != word:
        raise AssertionError("the other process speaks out of turn")


def main() -> None:
    print(HEAD)
    attaching()
    with Arena.create("512MiB") as arena:
        handles = [arena.put(b"payload", tag=f"run/source{i % 7}/group{i}/episode") for i in range(BLOCKS)]
        looking(arena)
        disturbed(arena)
        arena.free(handles)
        arena.unlink()


if __name__ == "__main__":
    main()
