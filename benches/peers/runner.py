"""Turns and rounds: every peer does the same steps, one peer after another, round by round.

A step is put, get, one pass over the bytes, the comparison, done and free. With `lag` the consumer takes the blob that
was put that many steps ago, as a trainer does, and neither side finds anything in the caches; without, it reads at
once. Each round has fresh processes, and each turn reaches its steady state before anything counts.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benches.peers.hosts import Host
from benches.peers.interface import Peer, Setup
from benches.peers.roles import ConsumerRole, ProducerRole

SMALL, BURST = 4096, 200
FEW = 20  # a burst of whoever would take over BURST_S for a whole one: pipes and caches are nothing to it
BURST_S, BURSTS = 1.0, 3  # small bursts go on for so long, and are at least so many
GROUP, GROUPS = 16, 7  # the bursts of large blobs: a group of samples at once
WARM = 6  # steps before any that counts, beyond twice the lag: a counted blob was put into memory that had been used


class Pair:
    """The two processes of a peer, and the blobs between them. `open` first, `close` after each size."""

    def __init__(self, host: type[Host], peer: Peer) -> None:
        self.waiting: deque[tuple[Any, int, float]] = deque()
        self.producer = host(ProducerRole, peer.name)
        try:
            self.consumer = host(ConsumerRole, peer.name)
        except BaseException:
            self.producer.end()
            raise

    def open(self, size: int, lag: int) -> None:
        """Fresh stores on both sides, for blobs of `size` bytes of which the consumer is `lag` behind."""
        self.lag, self.count = lag, 0
        setup = Setup(f"b{uuid.uuid4().hex[:10]}", size, max(lag + 2, BURST if size == SMALL else GROUP))
        self.producer.call("open", setup)
        self.consumer.call("open", setup)

    def close(self) -> None:
        """Every blob read and freed, nothing left."""
        self.drain()
        self.consumer.call("close")
        self.producer.call("close")

    def step(self) -> tuple[float, float, float] | None:
        """Seconds of put, get and read of the blob that was taken; None while the consumer falls behind."""
        refs, put_s = self.producer.call("put", self.count)
        self.waiting.append((refs, self.count, put_s))
        self.count += 1
        return self.take() if len(self.waiting) > self.lag else None

    def take(self) -> tuple[float, float, float]:
        """The oldest blob: got, read, compared and freed."""
        refs, index, put_s = self.waiting.popleft()
        times = put_s, *self.consumer.call("take", refs, index)
        self.producer.call("free", refs)
        return times

    def burst(self, count: int) -> tuple[float, float]:
        """Seconds per blob of `count` at once: of put and get, and of letting go and free."""
        refs, put_s = self.producer.call("burst", count)
        got_s, done_s = self.consumer.call("burst", refs)
        freed_s = self.producer.call("free", refs)
        return (put_s + got_s) / count, (done_s + freed_s) / count

    def drain(self) -> None:
        """Takes what is left."""
        while self.waiting:
            self.take()

    def end(self) -> None:
        self.consumer.end()
        self.producer.end()


@contextmanager
def pair(peer: Peer) -> Iterator[Pair]:
    """The peer's processes."""
    with peer.session() as host:
        made = Pair(host, peer)
        try:
            yield made
        finally:
            made.end()


@dataclass
class Times:
    """Seconds of put, get and read of each counted step."""

    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    @property
    def hand_over(self) -> float:
        """Median of put + get."""
        return statistics.median(map(sum, zip(self.put, self.get, strict=True)))

    @property
    def total(self) -> float:
        """Median of put + get + read."""
        return statistics.median(map(sum, zip(self.put, self.get, self.read, strict=True)))


@dataclass
class Turn:
    """One peer's turn. `behind`: with the consumer `lag` blobs behind; `lockstep`: reading at once.

    cpu_s: CPU seconds per step of all the peer's processes, read and comparison included (behind); resident: bytes by
    which they grew, the sources included, with `lag` blobs alive. group_s: seconds of put + get per blob of a group
    that is put at once and then taken at once.
    """

    behind: Times = field(default_factory=Times)
    lockstep: Times = field(default_factory=Times)
    cpu_s: float = 0.0
    resident: int = 0
    group_s: float = 0.0


def turn(two: Pair, size: int, lag: int, steps: int, groups: bool = False) -> Turn:
    """One peer's turn with blobs of one size: `steps` counted steps behind, as many in lockstep, then in groups."""
    out = Turn()
    resident = _resident()
    two.open(size, lag)
    _steps(two, 2 * lag + WARM)
    cpu = _cpu()
    out.behind = _steps(two, steps)
    out.cpu_s = (_cpu() - cpu) / steps
    out.resident = _resident() - resident
    two.drain()
    two.lag = 0
    _steps(two, WARM)
    out.lockstep = _steps(two, steps)
    two.drain()
    if groups:
        out.group_s = statistics.median([two.burst(GROUP)[0] for _ in range(GROUPS)][2:])
    two.close()
    return out


def _steps(two: Pair, count: int) -> Times:
    out = Times()
    for _ in range(count):
        for column, seconds in zip((out.put, out.get, out.read), two.step() or (), strict=False):
            column.append(seconds)
    return out


def rate(two: Pair) -> float:
    """4 KiB blobs per second through put, get and free: the median burst of a turn, the first left out."""
    two.open(SMALL, 0)
    count = BURST if sum(two.burst(FEW)) * BURST < BURST_S else FEW
    found: list[float] = []
    until = time.monotonic() + BURST_S
    while len(found) < BURSTS or time.monotonic() < until:
        found.append(sum(two.burst(count)))
    two.close()
    return 1 / statistics.median(found)


def _descendants() -> Iterable[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _cpu() -> float:
    """CPU seconds of every descendant's threads so far, in the scheduler's nanoseconds."""
    total = 0
    for process in _descendants():
        for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                total += int(task.read_text().split()[0])
    return total / 1e9


def _resident() -> int:
    """Bytes resident in all descendants, shared pages once (PSS)."""
    total = 0
    for process in _descendants():
        with suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total
