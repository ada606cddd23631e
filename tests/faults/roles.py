"""The roles of a run around the arenas of two nodes, without engines and models. What they do to blocks is the real
thing: `encode` in the env worker, the dispatcher, sink and ledger in the orchestrator, fetching, `assemble` and done()
in a rank, the server of the second node.

A role does one verb at a time, as it is told, wherever it lives (`lives`). Every token of an episode follows from its
tag, so that a rank knows what it must read.
"""

import asyncio
import contextlib
import itertools
import tempfile
import zlib
from functools import cache
from unittest.mock import AsyncMock, Mock

import numpy as np

from shmrl.arena import Arena
from shmrl.config import ArenaConfig, NodeConfig
from shmrl.env.groups import prompt_tag
from shmrl.env.protocol import episode_from_wire, episode_to_wire
from shmrl.errors import AlreadyFreed, ForeignArena, LostPayload, PayloadError, ServerDied, StaleHandle
from shmrl.node import client
from shmrl.node.blocks import StepBlocks
from shmrl.node.server import NodeServer
from shmrl.orchestrator.admission import Admission
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.dispatcher import Dispatcher
from shmrl.orchestrator.episodes import Episodes
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.sinks import TrainSink
from shmrl.payload import (
    Branch,
    Routing,
    SharedRows,
    assemble,
    encode,
    micro_batches_from_wire,
    micro_batches_to_wire,
    pack,
    sample_from_wire,
    sample_to_wire,
    sharing,
)
from shmrl.payload.sharing import Opening
from shmrl.types import EpisodeResult, ErrorInfo, Task
from tests.orchestrator import fakes

RUN = "t"
SHARED = 6  # positions that the branches of an episode have in common
PROMPT = 4  # and those that the episodes of a group have
SEQ_LEN = 24
RANKS = 2
RETAIN = 1  # steps that are kept after their use
NEVER = 1 << 30
TOKEN = "5ec2e7" * 5 + "ab"
SMALL = [(sharing, "MIN_SHARED_NBYTES", 1), (client, "LONGEST_PAUSE_S", 0.005)]  # what tests set in every process
READ_S = 0.05  # a rank waits so long for a server: where it is not lost, it is there


def branch_of(tag, index, T, version=0):
    """Branch `index` of the episode `tag`; the first SHARED positions are those of branch 0, the first PROMPT those of
    the group."""
    names = (f"{tag}#{index}", f"{tag}#0", tag.rpartition("/")[0])
    own, first, group = (zlib.crc32(name.encode()) % 1_000_000 * 1000 for name in names)
    tokens = own + np.arange(T)
    tokens[:SHARED] = first + np.arange(T)[:SHARED]
    tokens[:PROMPT] = group + np.arange(T)[:PROMPT]
    loss = np.arange(T) >= PROMPT
    rows = (tokens[: T - 1, None, None] + np.arange(2)) % 8
    return Branch(
        tokens, loss, np.where(loss, -(tokens % 97) / 100, 0.0), routing=rows, num_experts=8,
        meta={"branch": index, "version_start": version, "version_end": version, "logprobs_mode": "processed"},
    )  # fmt: skip


def opening_of(branch):
    routing = Routing(8, branch.layers)
    routing.add(branch.rows["routing"].values, 0)
    return Opening(branch.tokens[:PROMPT].astype(np.int32), routing.stitch(branch.T).first(PROMPT), branch.layers)


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
    """Stores episodes, as the env worker's `Keeper` does: all branches or none, and the prompt once for the group."""

    def __init__(self, address):
        self.arena = Watched.attach(address)
        self.unsealed = []

    def store(self, tag, lengths, version, broken, earlier):
        """(the episode's reply on the wire, without its reward; what it tells the server of the prompt). `broken`: the
        last branch does not validate. `earlier`: what its siblings have stored."""
        opening = opening_of(branch_of(tag, 0, SHARED, version))
        earlier = [sample_from_wire(wire) for wire in earlier]
        shared = SharedRows(self.arena, prompt_tag(tag), {0: opening}, earlier, lasting=True)
        samples = []
        try:
            for index, T in enumerate(lengths):
                branch = branch_of(tag, index, T, version)
                if broken and index == len(lengths) - 1:
                    raise PayloadError.of("routing", "id 9 is outside [0, 8)")
                prefix = (samples[0], SHARED) if index else shared.prefix(0)
                samples.append(encode(self.arena, branch, tag, prefix))
        except (PayloadError, LostPayload) as error:
            self.arena.free([sample.segments[-1][0] for sample in samples])
            shared.close([])
            return episode_to_wire(EpisodeResult(False, tag, error=ErrorInfo.of(error))), [[], []]
        shared.close(samples)
        used = {bytes(handle) for sample in samples for handle, _, _ in sample.segments[:-1]}
        told = [[sample_to_wire(sample) for sample in shared.stored], sorted(used)]
        versions = {"version_start": version, "version_end": version}
        return episode_to_wire(EpisodeResult(True, tag, samples=tuple(samples), **versions)), told

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

    def __init__(self, numbers):
        self.numbers = numbers
        self.open, self.travelling, self.given_up, self.late = {}, {}, [], 0

    async def tasks(self, split, start, n):
        return [Task(f"{split}{i}", {}, i) for i in range(start, start + n)]

    async def run_rollout(self, task, *, model, group_id, seed, keep, tag, shares=False):
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

    def die(self):
        """Whoever waits for it hears of it."""
        for _, _, reply in self.open.values():
            if not reply.done():
                reply.set_exception(ServerDied("an env server died"))
        self.travelling.clear()


@cache
def tree():
    """Batches of two groups of two episodes, one step of lag, two ranks."""
    directory = tempfile.gettempdir()  # nothing is written
    settings = {"batch_size": 4, "group_size": 2, "max_off_policy_steps": 1, "max_inflight": 8, "seq_len": SEQ_LEN}
    return fakes.tree(directory, ranks=RANKS, **settings)


class Orchestrator:
    """Dispatcher, sink and ledger, joined as in the loop; `attempt` keeps the tags of its lives apart. other: the
    second node, "origin@url"."""

    def __init__(self, address, attempt, other):
        self.arena = Watched.attach(address)
        self.loop, self.step, self.out = asyncio.new_event_loop(), 0, False
        numbers = itertools.count()
        self.desks = [Desk(numbers), Desk(numbers)]
        self.client = client.Client(TOKEN, patience_s=60)
        self.arenas = arenas = Arenas(self.arena, self.client)
        self.cut_off = False  # the second node's server cannot be reached
        origin, _, url = other.partition("@")
        self.loop.run_until_complete(self._join(origin, url))
        arenas.lost = self._lost
        self.ledger = Ledger(arenas, RANKS)
        self.episodes = Episodes(self.ledger, RUN, tree().orchestrator.inflight, NEVER)
        self.sink = TrainSink(tree(), self.ledger, self.episodes)
        self.source = fakes.source(tree(), 0, *self.desks)
        for replica, where in zip(self.source.replicas.every, (self.arena.origin, origin), strict=True):
            replica.origin = where
        self.dispatcher = Dispatcher(
            tree(), [self.source], self.episodes, self.sink, f"a{attempt}", lambda: None, arenas,
            Admission(2048, spills=False),
        )  # fmt: skip
        self.running = self.loop.create_task(self.dispatcher.run())

    async def _join(self, origin, url):
        await self.arenas.join(self.arena.origin, "node1", "")
        await self.arenas.join(origin, "node2", url)
        self.arenas.discard(RUN)  # what an earlier attempt left
        await self.arenas.flush()

    def turn(self):
        """Let everything happen that can. -> requests that wait, with their replica's number; tags of those that were
        cancelled since."""
        self.loop.run_until_complete(self._settle())
        if self.dispatcher.failure is not None:
            raise self.dispatcher.failure
        given_up = [tag for desk in self.desks for tag in desk.given_up]
        for desk in self.desks:
            desk.given_up = []
        asked = [(n, *facts[:2], at) for at, desk in enumerate(self.desks) for n, facts in desk.open.items()]
        return asked, given_up

    async def _settle(self):
        """Until nothing is under way to the other node, unless that is cut off: what a reply brought is adopted, and
        what follows from it is done."""
        await spin()
        for _ in range(3 * (not self.cut_off)):
            await self.arenas.flush()
            await spin()

    def cut(self):
        self.cut_off = True

    def mended(self):
        """The other node's server can be reached again; it may be another one."""
        self.cut_off = False
        self.loop.run_until_complete(self.arenas.look())
        return self.turn()

    def lose_node(self):
        """It was silent for too long."""
        self.loop.run_until_complete(self._lose_node())
        return self.turn()

    async def _lose_node(self):
        self.client.patience_s = 0
        (node,) = self.arenas.alive
        node.lose("it was silent")
        await asyncio.wait({node._tasks[0]}, timeout=30)
        self.desks[1].die()

    def _lost(self, node):
        """As in the loop."""
        self.ledger.write_off(node.origin)
        self.sink.drop_lost()
        assert self.source.replicas.lose(self.source.replicas.every[1], "its node is lost")
        self.dispatcher.give_up_lost()

    def lose_replica(self):
        """The second env server died."""
        self.desks[1].die()
        return self.turn()

    def answer(self, number, reward, reply, arrived):
        """A reply reaches its request, or (not `arrived`) travels until the next `arrive` or a cancel."""
        result = episode_from_wire({**reply, "episode": {**reply["episode"], "reward": reward}}, 100)
        (desk,) = (desk for desk in self.desks if number in desk.open)
        desk.travelling[number] = result
        return self.arrive() if arrived else self.turn()

    def arrive(self):
        """What travels reaches its request."""
        for desk in self.desks:
            while desk.travelling:
                number, result = desk.travelling.popitem()
                desk.open[number][2].set_result(result)
        return self.turn()

    def ship(self):
        """The next step: each rank's micro batches on the wire, and {origin: url}; None while there is no batch or one
        is out."""
        return self.loop.run_until_complete(self._ship())

    async def _ship(self):
        batch = None if self.out else self.sink.cut(self.step + 1)
        if batch is None:
            return None
        self.step, self.out = self.step + 1, True
        self.dispatcher.collecting(self.step + 1)
        self.dispatcher.steps_out += 1
        self.sink.shipped(batch)
        packed = pack(batch.samples, seq_len=SEQ_LEN, num_ranks=RANKS)
        self.ledger.ship(packed, self.step)
        await self.arenas.flush()
        nodes = self.arenas.urls({handle for micros in packed for micro in micros for handle in micro.handles})
        return [micro_batches_to_wire(micros) for micros in packed], nodes

    def durable(self):
        """The step is; the one before it was kept until now, and this one is from now on."""
        self.loop.run_until_complete(self._durable())

    async def _durable(self):
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
        held = self.loop.run_until_complete(self._release())
        return held, given_up, self.episodes.take_counts() | {"late": sum(desk.late for desk in self.desks)}

    async def _release(self):
        for step in range(self.step - RETAIN, self.step + 1 - self.out):
            self.ledger.let_go(step)
        held = len(self.ledger.close())
        if self.source.replicas.every[1].lost:
            self.arenas.discard(RUN)
        await self.arenas.flush()
        return held

    async def _stop(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.dispatcher.stop()
        self.sink.close()
        await self.episodes.close()

    def close(self):
        self.arena.close()
        if not self.running.done():  # killed: what would run from here on reaches no arena
            self.ledger._arenas = Mock(adopt=AsyncMock(return_value={}))
            self.client.close()
            self.loop.run_until_complete(self._stop())
        self.loop.run_until_complete(self.arenas.close())
        self.loop.close()


async def spin():
    for _ in range(24):
        await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------------------------- rank


class Rank:
    """Reads its share and is done with it, in two moves: between them the ranks agree."""

    def __init__(self, address, rank):
        self.arena, self.views = Watched.attach(address, reader=rank), []
        client.PATIENCE_S = READ_S
        self.blocks = StepBlocks(self.arena, rank, ArenaConfig(), NodeConfig(), TOKEN)

    def hold(self, wire, nodes):
        """Dies, if it is killed now, in the middle of an assembly."""
        for micro in self.blocks.here(micro_batches_from_wire(wire), nodes):
            for handle in micro.handles:
                with contextlib.suppress(StaleHandle, ForeignArena):
                    self.views.append(self.arena.get(handle))

    def read(self, wire, nodes):
        """(readable, loss tokens) of every micro batch; AssertionError for a wrong byte."""
        found = []
        for micro in self.blocks.here(micro_batches_from_wire(wire), nodes):
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

    def done(self, wire, nodes):
        self.blocks.done(micro_batches_from_wire(wire))
        for telling in self.blocks._telling.values():
            telling.submit(int).result()  # nobody is told any more

    def close(self):
        self.release()
        self.blocks.close()
        self.arena.close()


# ----------------------------------------------------------------------------------------------------- the second node


class Node:
    """Its server."""

    def __init__(self, address, port):
        self.arena = Watched.attach(address)
        self.server = NodeServer(self.arena, TOKEN, f"127.0.0.1:{port}")
        self.twice = self.arena.twice

    def drop(self):
        """Does what the next call of the orchestrator asks for, and breaks off before the answer."""
        service = self.server.service
        whole = service.answer

        def answer(method, target, fields, body):
            reply = whole(method, target, fields, body)
            if target == "/v1/owner/apply":
                service.answer = whole
                raise ConnectionAbortedError("the answer is lost")
            return reply

        service.answer = answer

    def close(self):
        self.server.close()
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
