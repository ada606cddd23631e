"""Histories of a run's roles on two nodes, as rules of a machine: what `test_interleavings` draws from.

The machine is everything between the roles: the env servers with their requests, the trainer's agreement, the launcher.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmrl.arena import Arena
from shmrl.env.groups import Groups
from shmrl.env.pool import Request
from shmrl.env.protocol import episode_to_wire
from shmrl.node.transfer import original_of
from shmrl.payload import micro_batches_from_wire, micro_batches_to_wire
from shmrl.types import EpisodeResult, ErrorInfo, Handle
from shmrl.wire import pack, unpack
from tests.faults.lives import Local
from tests.faults.roles import PROMPT, RANKS, RUN
from tests.support.runs import free_ports

PICK = st.integers(0, 1 << 20)
LENGTHS = st.lists(st.integers(8, 40), min_size=1, max_size=3)  # of an episode's branches; 24 tokens are trained
WITHIN = st.sampled_from(("turn", "arrive", "ship", "stop"))  # what the orchestrator does when it is killed
MOMENTS = st.sampled_from((0.0, 0.0002, 0.001, 0.003))  # of a death, in seconds after the order to do something
REWARDS = st.sampled_from((0.0, 0.5, 1.0))
DIED = episode_to_wire(EpisodeResult(False, "", error=ErrorInfo("WorkerDied", "killed by SIGKILL")))


@dataclass
class Episode:
    """A request at an env server, `at` so many, and its reply once the worker has stored it. `answers`: of the server
    to its worker, about the prompt."""

    number: int
    version: int
    request: Request
    answers: list[Any]
    at: int
    asked: bool = False
    reply: Any = None


@dataclass
class Step:
    """One that is out: each rank's micro batches on the wire, what it read of them, and whether it is done. nodes: the
    url of the other node's server by origin."""

    wires: list[Any]
    nodes: dict[str, str]
    read: list[Any]
    done: list[bool]


class Host:
    """A node, as its env server and its operator see it."""

    def __init__(self, where):
        self.arena = Arena.create("8MiB", run_id=RUN)
        self.groups, self.serving = Groups(self.arena), True
        self.worker = where("worker", self.arena.address)

    def restarted(self, where):
        """Its env server, with its worker."""
        self.groups, self.serving = Groups(self.arena), True
        self.worker = where("worker", self.arena.address)

    def remove(self):
        self.arena.close()
        self.arena.unlink()


class Machine(RuleBasedStateMachine):
    """`arena` is that of the first node, where the orchestrator and the ranks are. `other`: the second one, None once
    it is lost; `server`: its server, None while that cannot be reached."""

    where: Any = Local
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self):
        super().__init__()
        self.attempts, self.lost, self.lost_nodes = itertools.count(), set(), set()
        self.origins = set()  # of all other nodes there have been
        self.numbers = itertools.count()
        self.home, self.other, self.server = Host(self.where), None, None
        self.arena = self.home.arena
        self.ranks = [self.where("rank", self.arena.address, rank) for rank in range(RANKS)]
        self.begin()

    def begin(self):
        """An orchestrator connects; what an earlier one asked for is nobody's business any more."""
        for tag in list(getattr(self, "episodes", ())):
            self.ended(tag, replied=False)
        if self.other is None:
            self.other, self.port = Host(self.where), free_ports(1)
        elif not self.other.serving:
            self.other.restarted(self.where)
        if self.server is None:
            self.server = self.where("node", self.other.arena.address, self.port)
        self.origins.add(self.other.arena.origin)
        for origin in self.origins:
            self.arena.discard(f"@{origin}")  # what ranks had of a step that is not trained
        self.episodes, self.cancels, self.answered = {}, [], set()
        self.step, self.retained = None, []
        other = f"{self.other.arena.origin}@http://127.0.0.1:{self.port}"
        self.orchestrator = self.where("orchestrator", self.arena.address, next(self.attempts), other)
        self.look(self.orchestrator("turn"))

    @property
    def hosts(self):
        """Those that are there."""
        return [self.home] if self.other is None else [self.home, self.other]

    def look(self, answer):
        """What the orchestrator asks for, and what it has given up."""
        waiting, given_up = answer
        self.open = {number for number, *_ in waiting}
        for number, tag, version, at in waiting:
            if number not in self.answered and self.hosts[at].serving:  # else it is about to hear that it failed
                self.asked(tag, number, version, at)
        self.cancels += given_up

    def asked(self, tag, number, version, at):
        """The server has the request, which may share its prompt with its siblings."""
        if tag not in self.episodes:
            answers = []
            link = SimpleNamespace(send=lambda _, kind, payload: answers.append(unpack(payload)))
            worker = SimpleNamespace(link=link)
            request = Request(next(self.numbers), "run_rollout", b"", tag, True, worker=worker, reply=None)
            self.episodes[tag] = Episode(number, version, request, answers, at)
            self.hosts[at].groups.begin(request)

    def ended(self, tag, replied):
        """The server's last word on a request that it has."""
        episode = self.episodes.pop(tag, None)
        if not replied:
            for host in self.hosts:
                host.arena.discard(tag)
        if episode is not None:
            self.hosts[episode.at].groups.end(episode.request, replied=replied)
        elif not replied:
            for host in self.hosts:
                host.groups.unclaim(tag)

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
        if self.ask(episode):
            host = self.hosts[episode.at]
            episode.reply, told = host.worker("store", tag, lengths, episode.version, broken, *episode.answers)
            host.groups.tell(episode.request, pack(told))
            self.seen["a prompt shared"] += len(told[1]) > len(told[0])
            self.seen["on the other node"] += episode.at
            self.seen["does not encode"] += not episode.reply["success"]

    def ask(self, episode):
        """Whether its worker may store it: it knows of the prompt, or is to store that, too; else it waits."""
        if not episode.asked:
            episode.asked = True
            self.hosts[episode.at].groups.ask(episode.request)
        return bool(episode.answers)

    @rule(pick=PICK, reward=REWARDS, arrived=st.booleans())
    def answer(self, pick, reward, arrived):
        tag = self.chosen(pick, stored=True)
        if tag is not None:
            self.reply(tag, reward, arrived)

    def reply(self, tag, reward, arrived=True):
        """The server frees what a failed episode left, and hands out the one reply; whoever gave it up drops it."""
        episode = self.episodes[tag]
        self.answered.add(episode.number)
        self.ended(tag, episode.reply["success"])
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
        self.ended(self.cancels.pop(pick % len(self.cancels)), replied=False)
        self.seen["cancelled"] += 1

    @rule(pick=PICK)
    def lose(self, pick):
        """A block is freed by somebody whose it is not."""
        blocks = [
            (host.arena, row["handle"]) for host in self.hosts for row in host.arena.ls() if row["state"] == "ready"
        ]
        if blocks:
            arena, text = blocks[pick % len(blocks)]
            handle = Handle.parse(text)
            arena.adopt(handle)
            arena.free(handle)
            self.lost.add(handle)
            self.seen["lost"] += 1

    # ------------------------------------------------------------------------------------------------------ steps

    @precondition(lambda self: self.step is None)
    @rule()
    def ship(self):
        self.mend()
        shipped = self.orchestrator("ship")
        self.look(self.orchestrator("turn"))
        if shipped is not None:
            self.step = Step(*shipped, [None] * RANKS, [False] * RANKS)
            self.seen["shipped"] += 1

    @precondition(lambda self: self.step is not None)
    @rule(rank=st.integers(0, RANKS - 1), hold=st.booleans())
    def read(self, rank, hold):
        self.mend()
        wire, nodes = self.step.wires[rank], self.step.nodes
        if hold:
            self.ranks[rank]("hold", wire, nodes)
        copied = self.copied(rank)
        self.step.read[rank] = self.ranks[rank]("read", wire, nodes)
        for micro, (readable, tokens) in zip(micro_batches_from_wire(wire), self.step.read[rank], strict=True):
            lost = {one for one in micro.handles if one in self.lost or one.origin in self.lost_nodes}
            gone = not lost <= copied
            assert readable != gone
            assert tokens == (0 if gone else sum(sample.T - PROMPT for sample in micro.samples))
            self.seen["dropped"] += gone

    def copied(self, rank):
        """Blocks of the other node of which the rank, or its last life, has copies: it needs no other node for them."""
        rows = [row for row in self.arena.ls() if row["state"] == "ready"]
        return {original for row in rows if (original := original_of(row["tag"], str(rank))) is not None}

    @precondition(lambda self: self.step is not None and None not in self.step.read)
    @rule(rank=st.integers(0, RANKS - 1))
    def done(self, rank):
        """Only once all ranks have read, and know what they drop."""
        self.mend()
        self.ranks[rank]("done", self.step.wires[rank], self.step.nodes)
        self.step.done[rank] = True

    @precondition(lambda self: self.step is not None and all(self.step.done))
    @rule()
    def durable(self):
        """Until then a trainer that starts again finds everything, and whoever asks for the step before, that too."""
        wires = [*self.step.wires, *self.retained]
        blocks = {handle for wire in wires for micro in micro_batches_from_wire(wire) for handle in micro.handles}
        blocks = {handle for handle in blocks if handle.origin not in self.lost_nodes}
        assert {Handle.parse(row["handle"]) for host in self.hosts for row in host.arena.ls()} >= blocks - self.lost
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

    # ---------------------------------------------------------------------------------------------- the other node

    def mend(self):
        """Its server is started again, and whoever waited for it goes on."""
        if self.other is not None and self.server is None:
            self.server = self.where("node", self.other.arena.address, self.port)
            self.look(self.orchestrator("mended"))

    @precondition(lambda self: self.server is not None)
    @rule(killed=st.booleans())
    def cut(self, killed):
        """Its server is killed, or it does one more thing and its answer is lost."""
        if killed:
            self.server.kill(0, "close")
            self.server = None
            self.orchestrator("cut")
            self.other.arena.sweep()
            self.seen["a node server killed"] += 1
        else:
            self.server("drop")
            self.seen["a lost answer"] += 1

    @precondition(lambda self: self.other is not None and self.other.serving)
    @rule()
    def lose_replica(self):
        """Its env server dies, with the worker: nobody asks there until another orchestrator comes."""
        self.mend()
        self.other.worker.kill(0, "begin", f"{RUN}/a/none/0")
        self.other.arena.sweep()
        self.other.serving = False
        self.forget()
        self.look(self.orchestrator("lose_replica"))
        self.seen["a lost replica"] += 1

    def forget(self):
        """What the other env server knew."""
        self.episodes = {tag: episode for tag, episode in self.episodes.items() if not episode.at}

    @precondition(lambda self: self.other is not None)
    @rule(pick=st.integers(0, 3))
    def lose_node(self, pick):
        """Everything there is gone, for ever."""
        if pick:
            return
        if self.server is not None:
            self.server.kill(0, "close")
            self.orchestrator("cut")
        if self.other.serving:
            self.other.worker.kill(0, "begin", f"{RUN}/a/none/0")
        self.lost_nodes.add(self.other.arena.origin)
        self.other.remove()
        self.other = self.server = None
        self.forget()
        self.look(self.orchestrator("lose_node"))
        self.seen["a lost node"] += 1

    # ------------------------------------------------------------------------------------------------------- ends

    @rule(pick=PICK, lengths=LENGTHS, how=st.sampled_from(("store", "begin")), moment=MOMENTS)
    def kill_worker(self, pick, lengths, how, moment):
        """Its server finds out, frees what the open requests left, and starts another."""
        tag = self.chosen(pick, stored=False) or f"{RUN}/a/none/0"
        episode = self.episodes.get(tag)
        known = episode.answers if episode is not None and self.ask(episode) else [[]]
        given = {"store": (tag, lengths, 0, False, *known), "begin": (tag,)}[how]
        at = episode.at if episode is not None else 0
        host = self.hosts[at]
        host.worker.kill(moment, how, *given)
        host.arena.sweep()
        for one in [tag for tag, episode in self.episodes.items() if episode.at == at]:
            self.episodes[one].reply = DIED
            self.reply(one, 0.0)
        host.arena.discard(f"{RUN}/a/none")
        host.worker = self.where("worker", host.arena.address)
        self.seen["a worker killed"] += 1

    @rule(how=st.sampled_from(("drain", "halt", "kill_orchestrator", "kill_server")), within=WITHIN, moment=MOMENTS)
    def end(self, how, within, moment):
        """Of an orchestrator's life, and another one begins."""
        self.mend()
        if how == "kill_orchestrator":
            self.kill_orchestrator(within, moment)
        else:
            getattr(self, how)()
        self.seen[how] += 1

    def kill_server(self):
        """With its workers; the orchestrator ends at once."""
        self.home.worker.kill(0, "begin", f"{RUN}/a/none/0")
        self.home.worker = self.where("worker", self.arena.address)
        self.halt()

    @rule(rank=st.integers(0, RANKS - 1), how=st.sampled_from(("hold", "read", "done")), moment=MOMENTS)
    def kill_rank(self, rank, how, moment):
        """The trainer starts again, and gets its step again."""
        self.mend()
        wire = self.step.wires[rank] if self.step else micro_batches_to_wire([])
        nodes = self.step.nodes if self.step else {}
        agreed = self.step is not None and None not in self.step.read
        self.ranks[rank].kill(moment, "read" if how == "done" and not agreed else how, wire, nodes)
        self.arena.sweep()
        self.ranks[rank] = self.where("rank", self.arena.address, rank)
        if self.step:
            self.step = Step(self.step.wires, nodes, [None] * RANKS, [False] * RANKS)
        self.seen["a rank killed"] += 1

    def kill_orchestrator(self, verb, moment):
        """Nobody awaits the replies of its episodes: the servers free each as it comes."""
        self.orchestrator.kill(moment, verb)
        self.arena.sweep()
        for tag in [*self.episodes, *self.cancels]:
            self.ended(tag, replied=False)
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
        """An orderly end: nothing is held, and once the servers have heard of every cancel, nothing is there."""
        self.mend()
        if self.step is not None:
            self.train()
        held, given_up, outcomes = self.orchestrator("stop")
        assert held == 0
        self.seen.update(outcomes)
        self.cancels += given_up
        while self.cancels:
            self.cancel(0)
        for host in self.hosts:
            stats = host.arena.stats(exact=True)
            assert (stats["blocks"], stats["created"]) == (0, stats["freed"]), host.arena.ls()
            assert host.arena.fsck() == []
        self.check_frees(self.orchestrator, *self.working, *self.ranks)
        self.orchestrator.close()

    @property
    def working(self):
        """Workers and the other node's server, as far as they live."""
        return [host.worker for host in self.hosts if host.serving] + ([self.server] if self.server else [])

    def check_frees(self, *roles):
        """Nothing was freed a second time but what an operator had discarded before."""
        for role in roles:
            assert self.lost.issuperset(map(Handle.parse, role.twice))

    @invariant()
    def every_block_is_there_or_was_freed_once(self):
        for host in self.hosts:
            stats = host.arena.stats()
            assert stats["created"] == stats["freed"] + stats["blocks"]

    def teardown(self):
        try:
            self.finish()
            for role in (*self.ranks, *self.working):
                role.close()
        finally:
            for host in self.hosts:
                host.remove()
