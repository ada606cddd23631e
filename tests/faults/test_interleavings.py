"""Random histories of a run's roles - dispatch, cancel, drop, stale, ship, lost block, the death of anyone - and after
each of them the arena is empty: every block was freed, once, and no rank has read a wrong byte.

The machine is everything between the roles: the env server with its requests, the trainer's agreement, the launcher.
"""

import itertools
import logging
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Listener
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shmrl.arena import Arena
from shmrl.env.protocol import episode_to_wire
from shmrl.payload import micro_batches_from_wire, micro_batches_to_wire
from shmrl.types import EpisodeResult, ErrorInfo, Handle
from tests.faults.roles import PROMPT, RANKS, RUN, Local, Remote, nursery

PICK = st.integers(0, 1 << 20)
LENGTHS = st.lists(st.integers(8, 40), min_size=1, max_size=3)  # of an episode's branches; 24 tokens are trained
WITHIN = st.sampled_from(("turn", "arrive", "ship", "stop"))  # what the orchestrator does when it is killed
MOMENTS = st.sampled_from((0.0, 0.0002, 0.001, 0.003))  # of a death, in seconds after the order to do something
REWARDS = st.sampled_from((0.0, 0.5, 1.0))
DIED = episode_to_wire(EpisodeResult(False, "", error=ErrorInfo("WorkerDied", "killed by SIGKILL")))


@dataclass
class Episode:
    """A request at the env server, and its reply once the worker has stored it."""

    number: int
    version: int
    reply: Any = None


@dataclass
class Step:
    """One that is out: each rank's micro batches on the wire, what it read of them, and whether it is done."""

    wires: list[Any]
    read: list[Any]
    done: list[bool]


class Machine(RuleBasedStateMachine):
    """`arena` is the env server's and the operator's."""

    where: Any = Local
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self):
        super().__init__()
        self.arena = Arena.create("8MiB", run_id=RUN)
        self.attempts, self.lost = itertools.count(), set()
        self.worker = self.where("worker", self.arena.address)
        self.ranks = [self.where("rank", self.arena.address, rank) for rank in range(RANKS)]
        self.begin()

    def begin(self):
        """An orchestrator connects; what an earlier one asked for is nobody's business any more."""
        self.episodes, self.cancels, self.answered = {}, [], set()
        self.step, self.retained = None, []
        self.orchestrator = self.where("orchestrator", self.arena.address, next(self.attempts))
        self.look(self.orchestrator("turn"))

    def look(self, answer):
        """What the orchestrator asks for, and what it has given up."""
        waiting, given_up = answer
        self.open = {number for number, _, _ in waiting}
        for number, tag, version in waiting:
            if number not in self.answered:
                self.episodes.setdefault(tag, Episode(number, version))
        self.cancels += given_up

    # --------------------------------------------------------------------------------------------------- episodes

    def chosen(self, pick, stored):
        tags = [tag for tag, episode in self.episodes.items() if (episode.reply is not None) == stored]
        return tags[pick % len(tags)] if tags else None

    @rule(pick=PICK, lengths=LENGTHS, broken=st.sampled_from((False, False, False, True)))
    def store(self, pick, lengths, broken):
        tag = self.chosen(pick, stored=False)
        if tag is None:
            return
        episode = self.episodes[tag]
        episode.reply = self.worker("store", tag, lengths, episode.version, broken)
        self.seen["does not encode"] += not episode.reply["success"]

    @rule(pick=PICK, reward=REWARDS, arrived=st.booleans())
    def answer(self, pick, reward, arrived):
        tag = self.chosen(pick, stored=True)
        if tag is not None:
            self.reply(tag, reward, arrived)

    def reply(self, tag, reward, arrived=True):
        """The server frees what a failed episode left, and hands out the one reply; whoever gave it up drops it."""
        episode = self.episodes.pop(tag)
        self.answered.add(episode.number)
        if not episode.reply["success"]:
            self.arena.discard(tag)
        if episode.number in self.open:
            self.look(self.orchestrator("answer", episode.number, reward, episode.reply, arrived))
        else:
            self.seen["replied after the cancel"] += 1

    @rule(
        newest=st.booleans(),
        lengths=LENGTHS,
        count=st.sampled_from((4, 8, 12)),
        rewards=st.integers(0, 4095),
        arrived=st.booleans(),
        ship=st.booleans(),
        train=st.booleans(),
    )
    def serve(self, newest, lengths, count, rewards, arrived, ship, train):
        """Episodes from begin to end, so that batches come together, and a step; rewards are the bits of a number."""
        for at in range(count):
            self.store(-newest, lengths, False)
            self.answer(-newest, float(rewards >> at & 1), arrived or at < count - 1)
        if ship and self.step is None:
            self.ship()
        if train and self.step is not None:
            self.train()

    @rule()
    def arrive(self):
        self.look(self.orchestrator("arrive"))

    @precondition(lambda self: self.cancels)
    @rule(pick=PICK)
    def cancel(self, pick):
        tag = self.cancels.pop(pick % len(self.cancels))
        self.episodes.pop(tag, None)
        self.arena.discard(tag)
        self.seen["cancelled"] += 1

    @rule(pick=PICK)
    def lose(self, pick):
        """A block is freed by somebody whose it is not."""
        blocks = [row["handle"] for row in self.arena.ls() if row["state"] == "ready"]
        if blocks:
            handle = Handle.parse(blocks[pick % len(blocks)])
            self.arena.adopt(handle)
            self.arena.free(handle)
            self.lost.add(handle)
            self.seen["lost"] += 1

    # ------------------------------------------------------------------------------------------------------ steps

    @precondition(lambda self: self.step is None)
    @rule()
    def ship(self):
        wires = self.orchestrator("ship")
        self.look(self.orchestrator("turn"))
        if wires is not None:
            self.step = Step(wires, [None] * RANKS, [False] * RANKS)
            self.seen["shipped"] += 1

    @precondition(lambda self: self.step is not None)
    @rule(rank=st.integers(0, RANKS - 1), hold=st.booleans())
    def read(self, rank, hold):
        wire = self.step.wires[rank]
        if hold:
            self.ranks[rank]("hold", wire)
        self.step.read[rank] = self.ranks[rank]("read", wire)
        for micro, (readable, tokens) in zip(micro_batches_from_wire(wire), self.step.read[rank], strict=True):
            gone = not self.lost.isdisjoint(micro.handles)
            assert readable != gone
            assert tokens == (0 if gone else sum(sample.T - PROMPT for sample in micro.samples))
            self.seen["dropped"] += gone

    @precondition(lambda self: self.step is not None and None not in self.step.read)
    @rule(rank=st.integers(0, RANKS - 1))
    def done(self, rank):
        """Only once all ranks have read, and know what they drop."""
        self.ranks[rank]("done", self.step.wires[rank])
        self.step.done[rank] = True

    @precondition(lambda self: self.step is not None and all(self.step.done))
    @rule()
    def durable(self):
        """Until then a trainer that starts again finds everything, and whoever asks for the step before, that too."""
        wires = [*self.step.wires, *self.retained]
        blocks = {handle for wire in wires for micro in micro_batches_from_wire(wire) for handle in micro.handles}
        assert {Handle.parse(row["handle"]) for row in self.arena.ls()} >= blocks - self.lost
        self.retained = self.step.wires
        self.orchestrator("durable")
        self.step = None
        self.look(self.orchestrator("turn"))

    @precondition(lambda self: self.step is not None)
    @rule()
    def train(self):
        """A step from where it is to its end."""
        for rank in range(RANKS):
            if self.step.read[rank] is None:
                self.read(rank, False)
        for rank in range(RANKS):
            self.done(rank)
        self.durable()

    # ------------------------------------------------------------------------------------------------------- ends

    @rule(pick=PICK, lengths=LENGTHS, how=st.sampled_from(("store", "begin")), moment=MOMENTS)
    def kill_worker(self, pick, lengths, how, moment):
        """Its server finds out, frees what the open requests left, and starts another."""
        tag = self.chosen(pick, stored=False) or f"{RUN}/a/none/0"
        given = {"store": (tag, lengths, 0, False), "begin": (tag,)}[how]
        self.worker.kill(moment, how, *given)
        self.arena.sweep()
        for one in list(self.episodes):
            self.episodes[one].reply = DIED
            self.reply(one, 0.0)
        self.arena.discard(f"{RUN}/a/none/0")
        self.worker = self.where("worker", self.arena.address)
        self.seen["a worker killed"] += 1

    @rule(how=st.sampled_from(("drain", "halt", "kill_orchestrator", "kill_server")), within=WITHIN, moment=MOMENTS)
    def end(self, how, within, moment):
        """Of an orchestrator's life, and another one begins."""
        if how == "kill_orchestrator":
            self.kill_orchestrator(within, moment)
        else:
            getattr(self, how)()
        self.seen[how] += 1

    def kill_server(self):
        """With its workers; the orchestrator ends at once."""
        self.worker.kill(0, "begin", f"{RUN}/a/none/0")
        self.worker = self.where("worker", self.arena.address)
        self.halt()

    @rule(rank=st.integers(0, RANKS - 1), how=st.sampled_from(("hold", "read", "done")), moment=MOMENTS)
    def kill_rank(self, rank, how, moment):
        """The trainer starts again, and gets its step again."""
        wire = self.step.wires[rank] if self.step else micro_batches_to_wire([])
        agreed = self.step is not None and None not in self.step.read
        self.ranks[rank].kill(moment, "read" if how == "done" and not agreed else how, wire)
        self.arena.sweep()
        self.ranks[rank] = self.where("rank", self.arena.address, rank)
        if self.step:
            self.step = Step(self.step.wires, [None] * RANKS, [False] * RANKS)
        self.seen["a rank killed"] += 1

    def kill_orchestrator(self, verb, moment):
        """Nobody awaits the replies of its episodes: the server frees each as it comes."""
        self.orchestrator.kill(moment, verb)
        self.arena.sweep()
        for tag in [*self.episodes, *self.cancels]:
            self.arena.discard(tag)
        self.begin()

    def halt(self):
        """The second signal: it stops at once, with a step out. The ledger frees that, too."""
        self.seen.update(self.orchestrator("stop")[2])
        self.check_frees(self.orchestrator)
        self.orchestrator.close()
        self.begin()

    def drain(self):
        self.finish()
        self.begin()

    def finish(self):
        """An orderly end: nothing is held, and once the server has heard of every cancel, nothing is there."""
        if self.step is not None:
            self.train()
        held, given_up, outcomes = self.orchestrator("stop")
        assert held == 0
        self.seen.update(outcomes)
        self.cancels += given_up
        while self.cancels:
            self.cancel(0)
        stats = self.arena.stats(exact=True)
        assert (stats["blocks"], stats["created"]) == (0, stats["freed"]), self.arena.ls()
        assert self.arena.fsck() == []
        self.check_frees(self.orchestrator, self.worker, *self.ranks)
        self.orchestrator.close()

    def check_frees(self, *roles):
        """Nothing was freed a second time but what an operator had discarded before."""
        for role in roles:
            assert self.lost.issuperset(map(Handle.parse, role.twice))

    @invariant()
    def every_block_is_there_or_was_freed_once(self):
        stats = self.arena.stats()
        assert stats["created"] == stats["freed"] + stats["blocks"]

    def teardown(self):
        try:
            self.finish()
            for role in (self.worker, *self.ranks):
                role.close()
        finally:
            self.arena.close()
            self.arena.unlink()


PATHS = {
    "does not encode", "replied after the cancel", "cancelled", "lost", "shipped", "dropped", "drain", "halt",
    "kill_orchestrator", "kill_server", "a worker killed", "a rank killed", "filtered", "stale", "failed", "late",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    """Failures are data, and logged: here by the thousand."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def run(where, examples, steps):
    """What was seen. A short run is the same every time, and does not spend minutes on a shorter failure."""
    Machine.where, Machine.seen = where, Counter()
    short = examples <= 200
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=short,
            phases=(Phase.generate,) if short else tuple(Phase),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    return Machine.seen


def test_whatever_happens_every_block_is_freed_once():
    seen = run(Local, 200, 16)
    assert all(seen[path] for path in PATHS - {"stale"}), seen  # which takes several steps


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_whatever_happens_every_block_is_freed_once_for_long():
    seen = run(Local, 2000, 25)
    assert all(seen[path] for path in PATHS), seen


@pytest.fixture
def processes(helper, tmp_path):
    """Roles in processes of their own."""
    with Listener(str(tmp_path / "roles"), backlog=8) as listener:
        Remote.nursery, Remote.listener = helper(nursery), listener
        yield Remote


def test_whoever_is_killed_every_block_is_freed_once(processes):
    run(processes, 10, 25)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_whoever_is_killed_every_block_is_freed_once_for_long(processes):
    seen = run(processes, 220, 40)
    assert all(seen[path] for path in PATHS), seen
