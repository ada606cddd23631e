"""Workers that do everything to blocks of one arena at random, forked and killed by the hundred. Run as a helper.

Every payload says what it must contain (its length and one repeated byte), so foreign or torn bytes are noticed.
Handles are exchanged over plain shared memory, torn writes included: a handle is never trusted.
"""

import mmap
import os
import random
import select
import signal
import struct
import sys
import time
from contextlib import suppress

from shmrl.arena import Arena, Handle
from shmrl.errors import AlreadyFreed, ArenaFull, ForeignArena, NotOwner, NotSealed, StaleHandle
from shmrl.units import PAGE

CELLS = 64
SIZES = (0, 1, 100, 300, 4096, 20_000, 65_536, 70_000, 300_000, 1_000_000)
EXPECTED = (StaleHandle, AlreadyFreed, NotOwner, NotSealed, ForeignArena, ArenaFull)


class Worker:
    def __init__(self, address, board, said, seed, on_full):
        self.random = random.Random(seed)
        self.on_full, self.said = on_full, said
        self.arena = Arena.attach(address, reader=seed % 4)
        self.board = board
        self.views = []

    def pick(self):
        at = 32 * self.random.randrange(CELLS)
        return Handle(bytes(self.board[at : at + 32]))

    def publish(self, handle):
        at = 32 * self.random.randrange(CELLS)
        self.board[at : at + 32] = bytes(handle)

    def put(self):
        n = self.random.choice(SIZES)
        fill = struct.pack("<Q", n) + bytes([self.random.randrange(256)]) * n
        self.publish(self.arena.put(fill, tag=f"run/s{self.random.randrange(3)}", timeout_s=0, on_full=self.on_full))

    def reserve(self):
        n = self.random.choice(SIZES)
        with self.arena.reserve(n + 8, tag="run/r", timeout_s=0, on_full=self.on_full) as block:
            block.buffer[:8] = struct.pack("<Q", n)
            block.buffer[8:] = b"r" * n
            if self.random.random() < 0.8:
                self.publish(block.seal(columns=[("head", 0, 8, 1), ("body", 8, 1, n)]))

    def get(self):
        view = self.arena.get(self.pick(), verify=True)
        data = memoryview(view)
        n = struct.unpack("<Q", data[:8])[0]
        body = bytes(data[8:])
        if len(body) != n or (n and body.count(body[:1]) != n):
            print(f"WRONG BYTES in {view.handle!r}", flush=True)
            os._exit(3)
        if self.random.random() < 0.5:
            self.views.append(data)
        if len(self.views) > 4:
            self.views.pop(self.random.randrange(len(self.views)))

    def own(self):
        handle = self.pick()
        self.arena.adopt(handle)
        verb = self.random.randrange(3)
        if verb == 0:
            self.arena.free(handle)
        elif verb == 1:
            self.arena.ship(handle, readers=self.random.randrange(1, 3), step=1)
            self.arena.done(handle)

    def done(self):
        try:
            self.arena.done(self.pick(), reader=self.random.randrange(4))
        except ValueError:
            pass  # never shipped

    def recover(self):
        with self.arena._look() as look:
            (counters, _), shares = self.arena._locked_call(lambda: (look.count(), look.shares()))
        if shares and sum(used for *_, used in shares) != counters["used_bytes"]:
            print(f"WRONG SUM of {shares} for {counters}", flush=True)
            os._exit(3)
        self.arena.discard(self.random.choice(("run/s0", "run/s1", "run/s2", "run/r")))
        self.arena.sweep()

    def run(self):
        verbs = (self.put, self.put, self.reserve, self.get, self.get, self.own, self.own, self.done)
        while True:
            for _ in range(10):
                try:
                    self.random.choice(verbs)()
                except EXPECTED:
                    pass
                with suppress(BlockingIOError):
                    os.write(self.said, b".")
            self.recover()


def fork_worker(*args):
    pid = os.fork()
    if pid:
        return pid
    try:
        Worker(*args).run()
    except BaseException as error:
        print(f"WORKER {error!r}", flush=True)
    os._exit(4)


def wait_for_verbs(heard, count):
    """Until the workers have done so many more: a kill says little where nobody got anything done."""
    with suppress(BlockingIOError):
        while os.read(heard, 4096):
            pass
    for _ in range(count):
        assert select.select([heard], [], [], 60)[0], "the workers stand still"
        os.read(heard, 1)


def storm(address, kills, workers, seed, on_full="raise"):
    """Prints one line: "kills=N" or what went wrong. on_full: of every put and reserve, which wait for nothing."""
    board = mmap.mmap(-1, 32 * CELLS)
    heard, said = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    rng = random.Random(int(seed))

    def worker():
        return fork_worker(address, board, said, rng.randrange(1 << 30), on_full)

    pids = [worker() for _ in range(int(workers))]
    bad = ""
    for _ in range(int(kills)):
        wait_for_verbs(heard, rng.choice((1, 5, 20)))
        time.sleep(rng.choice((0, 0.001, 0.005)))  # the kills' own randomness: nothing is waited for
        victim = pids.pop(rng.randrange(len(pids)))
        os.kill(victim, signal.SIGKILL)
        status = os.waitpid(victim, 0)[1]
        if os.WIFEXITED(status):
            bad = f"a worker exited with {os.WEXITSTATUS(status)}"
        pids.append(worker())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(bad or f"kills={kills}", flush=True)
    sys.stdin.readline()


def settled(arena):
    """After a storm, seen by who is attached: recovers, checks, discards everything, checks -> blocks ever made."""
    arena.sweep()
    assert arena.fsck() == []
    assert all(row["held_by"] == () for row in arena.ls())
    stats = arena.stats(by="source", exact=True)
    assert stats["blocks"] == stats["orphaned"]
    assert sum(row["bytes"] for row in stats["by"].values()) == stats["used_bytes"] <= stats["capacity_bytes"]
    assert {source: used for source, _, used in arena._look().shares()} == by_share(arena, stats["by"])
    arena.discard("run")
    stats = arena.stats(exact=True)
    assert (stats["blocks"], stats["used_bytes"], stats["created"] - stats["freed"]) == (0, 0, 0)
    what_was_lent_comes_back(arena)
    assert arena.fsck() == []
    return stats["created"]


def by_share(arena, by_source):
    """Bytes of each share, from the rows by source; {} where there are no shares."""
    out = {source: 0 for source, *_ in arena._look().shares()}
    for source, row in by_source.items() if out else ():
        out[source if source in out else ""] += row["bytes"]
    return out


def what_was_lent_comes_back(arena):
    """In an arena that is empty again: who borrows leaves the reserve, whoever it is; then everybody has his share."""
    shares, capacity = arena._look().shares(), arena.stats()["capacity_bytes"]
    for source, guaranteed, used in shares:
        assert used == 0
        lent = take_pages(arena, source or "nobody", capacity // PAGE)
        assert PAGE * len(lent) == capacity - min(capacity // 8, capacity - guaranteed)
        arena.free(lent)
    taken = [take_pages(arena, source or "nobody", guaranteed // PAGE) for source, guaranteed, _ in shares]
    assert [PAGE * len(each) for each in taken] == [guaranteed for _, guaranteed, _ in shares]
    arena.free([handle for each in taken for handle in each])


def take_pages(arena, source, most):
    """Blocks of a page each until the source is refused, or has `most`."""
    out = []
    with suppress(ArenaFull):
        while len(out) < most:
            out.append(arena.put(bytes(PAGE), tag=f"run/{source}", on_full="raise", checksum=False))
    return out
