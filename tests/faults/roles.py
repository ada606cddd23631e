"""The roles of a run around one arena, without engines, models and sockets. What they do to blocks is the real thing:
`encode` in the env worker, the dispatcher, sink and ledger in the orchestrator, `assemble` and done() in a rank.

A role does one verb at a time, as it is told: in this process (`Local`), or in one of its own (`Remote`), which can be
killed at any moment. Every token of an episode follows from its tag, so that a rank knows what it must read.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import select
import signal
import sys
import tempfile
import time
import zlib
from functools import cache
from multiprocessing.connection import Client
from unittest.mock import Mock

import numpy as np

from shmrl.arena import Arena
from shmrl.env.protocol import episode_from_wire, episode_to_wire
from shmrl.errors import AlreadyFreed, LostPayload, PayloadError, StaleHandle
from shmrl.orchestrator.admission import Admission
from shmrl.orchestrator.dispatcher import Dispatcher
from shmrl.orchestrator.episodes import Episodes
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.sinks import TrainSink
from shmrl.orchestrator.sources import Source
from shmrl.payload import Branch, assemble, encode, micro_batches_from_wire, micro_batches_to_wire, pack
from shmrl.types import EpisodeResult, ErrorInfo, Task
from tests.orchestrator import fakes

RUN = "t"
SHARED = 6  # positions that the branches of an episode have in common
PROMPT = 4
SEQ_LEN = 24
RANKS = 2
RETAIN = 1  # steps that are kept after their use
NEVER = 1 << 30


def branch_of(tag, index, T, version=0):
    """Branch `index` of the episode `tag`; the first SHARED positions are those of branch 0."""
    own, first = (zlib.crc32(f"{tag}#{name}".encode()) % 1_000_000 * 1000 for name in (index, 0))
    tokens = own + np.arange(T)
    tokens[:SHARED] = first + np.arange(T)[:SHARED]
    loss = np.arange(T) >= PROMPT
    rows = (tokens[: T - 1, None, None] + np.arange(2)) % 8
    return Branch(
        tokens, loss, np.where(loss, -(tokens % 97) / 100, 0.0), routing=rows, num_experts=8,
        meta={"branch": index, "version_start": version, "version_end": version, "logprobs_mode": "processed"},
    )  # fmt: skip


class Watched(Arena):
    """Remembers which blocks this process freed that were gone already."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.twice = []

    def free(self, handles):
        freed, twice = 0, []
        for handle in handles:
            try:
                freed += super().free(handle)
            except AlreadyFreed:
                twice.append(str(handle))
        self.twice += twice
        if twice:
            raise AlreadyFreed(f"{len(twice)} of {len(handles)} blocks")
        return freed


# ---------------------------------------------------------------------------------------------------------- env worker


class Worker:
    """Stores episodes, as the env worker's `_store` does: all branches or none."""

    def __init__(self, address):
        self.arena = Watched.attach(address)
        self.unsealed = []

    def store(self, tag, lengths, version, broken):
        """The episode's reply on the wire, without its reward. `broken`: the last branch does not validate."""
        samples = []
        try:
            for index, T in enumerate(lengths):
                branch = branch_of(tag, index, T, version)
                if broken and index == len(lengths) - 1:
                    raise PayloadError.of("routing", "id 9 is outside [0, 8)")
                samples.append(encode(self.arena, branch, tag, (samples[0], SHARED) if index else None))
        except PayloadError as error:
            self.arena.free([sample.handles[-1] for sample in samples])
            return episode_to_wire(EpisodeResult(False, tag, error=ErrorInfo.of(error)))
        versions = {"version_start": version, "version_end": version}
        return episode_to_wire(EpisodeResult(True, tag, samples=tuple(samples), **versions))

    def begin(self, tag):
        """A block is reserved, and written no further."""
        self.unsealed.append(self.arena.reserve(1000, tag=tag))

    def close(self):
        for block in self.unsealed:
            block.free()
        self.arena.close()


# -------------------------------------------------------------------------------------------------------- orchestrator


class Desk:
    """The env server, as the dispatcher sees it: a request waits until it is answered from outside."""

    def __init__(self):
        self.numbers = itertools.count()
        self.open, self.travelling, self.given_up, self.late = {}, {}, [], 0

    async def tasks(self, split, start, n):
        return [Task(f"{split}{i}", {}, i) for i in range(start, start + n)]

    async def run_rollout(self, task, *, model, group_id, seed, keep, tag):
        number, reply = next(self.numbers), asyncio.get_running_loop().create_future()
        self.open[number] = tag, model["version"], reply
        try:
            return await reply
        except asyncio.CancelledError:
            if number in self.travelling:  # too late: it comes all the same
                self.late += 1
                return self.travelling.pop(number)
            self.given_up.append(tag)
            raise
        finally:
            del self.open[number]


@cache
def tree():
    """Batches of two groups of two episodes, one step of lag, two ranks."""
    directory = tempfile.gettempdir()  # nothing is written
    settings = {"batch_size": 4, "group_size": 2, "max_off_policy_steps": 1, "max_inflight": 8, "seq_len": SEQ_LEN}
    return fakes.tree(directory, ranks=RANKS, **settings)


class Orchestrator:
    """Dispatcher, sink and ledger, joined as in the loop; `attempt` keeps the tags of its lives apart."""

    def __init__(self, address, attempt):
        self.arena = Watched.attach(address)
        self.arena.discard(RUN)  # what an earlier attempt left
        self.loop, self.desk, self.step, self.out = asyncio.new_event_loop(), Desk(), 0, False
        self.ledger = Ledger(self.arena, RANKS)
        self.episodes = Episodes(self.ledger, RUN, tree().orchestrator.inflight, NEVER)
        self.sink = TrainSink(tree(), self.ledger, self.episodes)
        self.dispatcher = Dispatcher(
            tree(), [Source(tree(), 0, self.desk)], self.episodes, self.sink, f"a{attempt}", lambda: None, self.arena,
            Admission(2048, spills=False),
        )  # fmt: skip
        self.running = self.loop.create_task(self.dispatcher.run())

    def turn(self):
        """Let everything happen that can. -> requests that wait, tags of those that were cancelled since."""
        self.loop.run_until_complete(spin())
        if self.dispatcher.failure is not None:
            raise self.dispatcher.failure
        given_up, self.desk.given_up = self.desk.given_up, []
        return [(number, *facts[:2]) for number, facts in self.desk.open.items()], given_up

    def answer(self, number, reward, reply, arrived):
        """A reply reaches its request, or (not `arrived`) travels until the next `arrive` or a cancel."""
        result = episode_from_wire({**reply, "episode": {**reply["episode"], "reward": reward}}, 100)
        self.desk.travelling[number] = result
        return self.arrive() if arrived else self.turn()

    def arrive(self):
        """What travels reaches its request."""
        while self.desk.travelling:
            number, result = self.desk.travelling.popitem()
            self.desk.open[number][2].set_result(result)
        return self.turn()

    def ship(self):
        """The next step's micro batches on the wire, by rank; None while there is no batch or one is out."""
        batch = None if self.out else self.sink.cut(self.step + 1)
        if batch is None:
            return None
        self.step, self.out = self.step + 1, True
        self.dispatcher.collecting(self.step + 1)
        self.dispatcher.steps_out += 1
        self.sink.shipped(batch)
        packed = pack(batch.samples, seq_len=SEQ_LEN, num_ranks=RANKS)
        self.ledger.ship(packed, self.step)
        return [micro_batches_to_wire(micros) for micros in packed]

    def durable(self):
        """The step is; the one before it was kept until now, and this one is from now on."""
        self.out = False
        self.ledger.let_go(self.step - RETAIN)
        self.dispatcher.serving(self.step)
        self.dispatcher.steps_out -= 1
        self.dispatcher.wake()

    def stop(self):
        """The end, orderly or (a step is out) at once. -> blocks the ledger still had, tags that were cancelled, how
        many episodes had which outcome, or returned late."""
        self.loop.run_until_complete(self._stop())
        _, given_up = self.turn()
        for step in range(self.step - RETAIN, self.step + 1 - self.out):
            self.ledger.let_go(step)
        return len(self.ledger.close()), given_up, self.episodes.take_counts() | {"late": self.desk.late}

    async def _stop(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.dispatcher.stop()
        self.sink.close()
        await self.episodes.close()

    def close(self):
        self.arena.close()
        if not self.running.done():  # killed: what would run from here on reaches no arena
            self.ledger._arena = Mock()
            self.loop.run_until_complete(self._stop())
        self.loop.close()


async def spin():
    for _ in range(24):
        await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------------------------- rank


class Rank:
    """Reads its share and is done with it, in two moves: between them the ranks agree."""

    def __init__(self, address, rank):
        self.arena, self.views = Watched.attach(address, reader=rank), []

    def hold(self, wire):
        """Dies, if it is killed now, in the middle of an assembly."""
        for micro in micro_batches_from_wire(wire):
            for handle in micro.handles:
                with contextlib.suppress(StaleHandle):
                    self.views.append(self.arena.get(handle))

    def read(self, wire):
        """(readable, loss tokens) of every micro batch; AssertionError for a wrong byte."""
        found = []
        for micro in micro_batches_from_wire(wire):
            try:
                batch = assemble(self.arena, micro, verify=True)
            except LostPayload:
                found.append((False, 0))
                continue
            check(micro, batch)
            found.append((True, int(batch.loss_mask.sum())))
        self.release()
        return found

    def release(self):
        while self.views:
            self.views.pop().release()

    def done(self, wire):
        self.arena.done([handle for micro in micro_batches_from_wire(wire) for handle in micro.handles])

    def close(self):
        self.release()
        self.arena.close()


def check(micro, batch):
    at = 0
    for sample in micro.samples:
        meta, here = sample.meta, slice(at, at + sample.T)
        tag = "/".join((RUN, meta["source"], meta["group"], meta["episode"]))
        branch = branch_of(tag, meta["branch"], sample.T + 1)  # a cut sample has a row for its last token
        assert np.array_equal(batch.tokens[here], branch.tokens[: sample.T]), tag
        assert np.array_equal(batch.loss_mask[here], branch.loss_mask[: sample.T]), tag
        assert np.array_equal(batch.logprobs[here], branch.logprobs[: sample.T]), tag
        assert np.array_equal(batch.routing[here][: sample.R], branch.rows["routing"].values[: sample.R]), tag
        assert batch.routing_covered[here].tolist() == [True] * sample.R + [False] * (sample.T - sample.R), tag
        at += sample.T


# ------------------------------------------------------------------------------------------------ where roles live

ROLES = {"worker": Worker, "orchestrator": Orchestrator, "rank": Rank}


class Local:
    """A role in this process. Killed, it leaves its blocks as a dead process does: what is sealed has no owner."""

    def __init__(self, role, *args):
        self.role = ROLES[role](*args)
        self.twice = self.role.arena.twice

    def __call__(self, verb, *args):
        return getattr(self.role, verb)(*args)

    def kill(self, moment, verb, *args):
        """Dies before or after what a verb does to the arena."""
        if moment:
            self(verb, *args)
        self.role.close()

    def close(self):
        self.role.close()


class Remote:
    """A role in a process of its own, forked by the nursery. A call returns its answer or raises its error."""

    nursery = listener = None  # of the test that runs it

    def __init__(self, role, *args):
        self.twice = []
        self.nursery.say(" ".join(map(str, (self.listener.address, role, *args))))
        self.pipe = self.listener.accept()
        self.pidfd = os.pidfd_open(self.pipe.recv())

    def __call__(self, verb, *args):
        self.pipe.send((verb, args))
        assert self.pipe.poll(60), f"{verb} hangs"
        kind, value, self.twice[:] = self.pipe.recv()
        if kind == "error":
            raise AssertionError(f"{verb} raised {value}")
        return value

    def kill(self, moment, verb, *args):
        """SIGKILL so many seconds after it was told to do something: before, while or after it does it."""
        self.pipe.send((verb, args))
        time.sleep(moment)
        with contextlib.suppress(ProcessLookupError):  # it closed, and left
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self._gone()

    def close(self):
        self("close")
        self._gone()

    def _gone(self):
        """Its end; the kernel has let go of its locks by then."""
        assert select.select([self.pidfd], [], [], 60)[0], "it does not end"
        os.close(self.pidfd)
        self.pipe.close()


def live(path, role, *args):
    """Until told to close: (verb, arguments) -> ("ok", value, freed twice) or ("error", text, freed twice)."""
    with Client(path) as pipe:
        one = ROLES[role](args[0], *map(int, args[1:]))
        pipe.send(os.getpid())
        verb = None
        while verb != "close":
            verb, given = pipe.recv()
            try:
                answer = "ok", getattr(one, verb)(*given)
            except Exception as error:
                answer = "error", f"{type(error).__name__}: {error}"
            pipe.send((*answer, one.arena.twice))


def nursery():
    """Forks a role for every line "path role address ...": a fork is fifty times cheaper than an interpreter."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.disable(logging.WARNING)
    tree()
    for line in sys.stdin:
        if os.fork() == 0:
            live(*line.split())
            os._exit(0)
