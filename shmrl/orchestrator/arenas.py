"""The arenas that a run's blocks are in: the orchestrator's own, which it maps, and those of other nodes.

Owned by the orchestrator's loop; the ledger, the dispatcher and the reports stand on it, and ask nobody where a block
is. What concerns the own arena happens at once. What concerns another node waits in that node's queue, in order, and a
thread carries what has gathered there to its server in one call: the event loop never waits for a network. A node whose
server is silent for the client's patience (60 s) is lost, and stays so: its blocks are nobody's any more, and whatever
waits for it, queued or on its way, ends in the same moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from shmrl.arena import Arena
from shmrl.errors import AlreadyFreed, ArenaError, LostPayload, ShmrlError, StaleHandle
from shmrl.node.client import Client
from shmrl.node.holdings import Found, found_under, looked, sampled
from shmrl.node.remote import Operation, RemoteArena
from shmrl.payload.shown import NOTHING, shown
from shmrl.types import Handle, Sample

log = logging.getLogger(__name__)

LOOK_S = 0.5  # how often each node is asked how full it is
DOUBT_S = 3.0  # without an answer: nothing is built on this node until it has said something
MOST = 1024  # operations in a call


class NodeLost(ArenaError):
    """The node that has a block is lost."""


class Node:
    """The arena of another node: what is asked of it, in order, and what was last seen of it.

    lost: why nothing is asked any more. held: the blocks that a server which was started again has to adopt.
    """

    def __init__(
        self,
        name: str,
        origin: str,
        remote: RemoteArena,
        held: Callable[[str], Sequence[Handle]],
        gone: Callable[[Node], None],
    ) -> None:
        self.name, self.origin, self.remote = name, origin, remote
        self.lost: str | None = None
        self.seen: dict[str, Any] = {}
        self._held, self._gone = held, gone
        self._answered = time.monotonic()
        self._queue: deque[tuple[Operation, asyncio.Future[dict[int, str]]]] = deque()
        self._asked = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # with its loss
        self._threads = ThreadPoolExecutor(3, f"shmrl-{name}")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return self.remote.url

    @property
    def host(self) -> str:
        """What it is reached by."""
        return urlsplit(self.url).hostname or ""

    @property
    def in_doubt(self) -> bool:
        """Whether it has not answered for a while, and is not lost."""
        return self.lost is None and time.monotonic() - self._answered > DOUBT_S

    async def open(self) -> None:
        """The first look. ShmrlError if its server cannot be reached."""
        await self.look()
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._watch())]

    def ask(self, *operation: Any) -> asyncio.Future[dict[int, str]]:
        """Queue an operation of `RemoteArena.apply` -> what is gone, by index; of a lost node, everything."""
        answer: asyncio.Future[dict[int, str]] = asyncio.get_running_loop().create_future()
        if self.lost is not None:
            answer.set_result(self._all_gone(operation))
        else:
            self._queue.append((operation, answer))
            self._asked.set()
        return answer

    def _all_gone(self, operation: Operation) -> dict[int, str]:
        handles = operation[1] if operation[0] != "discard" else ()
        return dict.fromkeys(range(len(handles)), f"node {self.name} is lost: {self.lost}")

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """A method of `remote`, in a thread. ShmrlError; NodeLost as soon as the node is."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, method, *arguments)
        work.add_done_callback(_heard)
        await asyncio.wait({work, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise NodeLost(f"node {self.name} is lost: {self.lost}")
        return work.result()

    async def look(self) -> None:
        """See how full it is, now; if its server is another one than before, let that hold what we own."""
        seen = await self.call(self.remote.look)
        known, self.seen = self.seen.get("instance", seen["instance"]), seen
        self._answered = time.monotonic()
        self._met(known)

    def _met(self, known: str) -> None:
        if known == self.seen["instance"]:
            return
        held = self._held(self.origin)
        log.warning("the server of node %s was started again: it takes over %d blocks", self.name, len(held))
        self.ask("adopt", held)

    async def _work(self) -> None:
        while self.lost is None:
            await self._asked.wait()
            self._asked.clear()
            while self._queue and self.lost is None:
                batch = [self._queue.popleft() for _ in range(min(MOST, len(self._queue)))]
                try:
                    _, gone = await self.call(self.remote.apply, [operation for operation, _ in batch])
                except ShmrlError as error:
                    self.lose(str(error))
                    self._answer_gone(batch)
                    return
                for (_, answer), missing in zip(batch, gone, strict=True):
                    if not answer.done():  # nobody waits for it any more
                        answer.set_result(missing)

    async def _watch(self) -> None:
        while self.lost is None:
            await asyncio.sleep(LOOK_S)
            looking = asyncio.ensure_future(self.look())
            try:
                answered, _ = await asyncio.wait({looking}, timeout=DOUBT_S)
                if not answered:
                    log.warning("node %s has not answered for %.0f s: no step begins until it does", self.name, DOUBT_S)
                await looking
                if not answered:
                    log.info("node %s answers again", self.name)
            except ShmrlError as error:
                self.lose(str(error))
            finally:
                looking.cancel()

    def lose(self, why: str) -> None:
        """It is given up. Whatever waits for it is told that everything is gone."""
        if self.lost is not None:
            return
        self.lost = why
        self._ended.set_result(None)
        self._answer_gone(self._queue)
        self._queue.clear()
        self._asked.set()  # its worker is done
        self._gone(self)

    def _answer_gone(self, asked: Iterable[tuple[Operation, asyncio.Future[dict[int, str]]]]) -> None:
        for operation, answer in asked:
            if not answer.done():
                answer.set_result(self._all_gone(operation))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)


def _heard(work: asyncio.Future[Any]) -> None:
    """Nobody else may be there to hear what a call raised."""
    if not work.cancelled():
        work.exception()


class Arenas:
    """`local` and, by `Handle.origin`, those of other `nodes`.

    client: for the calls to their servers; None where there can be none. `lost` is called when a node is, `held` with
    an origin for the blocks of it that are owned here.

    Example: arenas = Arenas(Arena.attach(address), client); await arenas.join("1f2e...", "node2", "http://10.0.0.7:7070")
    """

    def __init__(self, local: Arena, client: Client | None = None) -> None:
        self.local, self.nodes = local, dict[str, Node]()
        self.held: Callable[[str], Sequence[Handle]] = lambda origin: ()
        self.lost: Callable[[Node], None] = lambda node: None
        self._client = client
        self._writes_here = False

    async def join(self, origin: str, name: str, url: str) -> None:
        """A source writes into this arena. ShmrlError if its node's server cannot be reached."""
        if origin == self.local.origin:
            self._writes_here = True
        elif origin not in self.nodes:
            assert self._client is not None
            node = Node(name, origin, RemoteArena(self._client, url), lambda of: self.held(of), lambda n: self.lost(n))
            self.nodes[origin] = node
            await node.open()
            log.info("node %s: blocks of %s over %s", name, origin, url)

    @property
    def alive(self) -> list[Node]:
        """The nodes that are not lost."""
        return [node for node in self.nodes.values() if node.lost is None]

    @property
    def in_doubt(self) -> bool:
        """Whether a node is silent, and it is not known yet if it is lost."""
        return any(node.in_doubt for node in self.nodes.values())

    async def certain(self) -> None:
        """Until no node is in doubt."""
        while self.in_doubt:  # noqa: ASYNC110 - time alone makes and ends a doubt
            await asyncio.sleep(LOOK_S)

    def urls(self, handles: Iterable[Handle]) -> dict[str, str]:
        """Whose server has those of these blocks that are on other nodes: {origin: url}, "" of a node that is lost."""
        origins = sorted({handle.origin for handle in handles}) if self.nodes else ()
        known = [self.nodes[origin] for origin in origins if origin in self.nodes]
        return {node.origin: "" if node.lost is not None else node.url for node in known}

    # --- blocks --------------------------------------------------------------------------------------------------

    def _apart(self, handles: Iterable[Handle]) -> tuple[list[Handle], dict[str, list[Handle]]]:
        """(those of the own arena, and of none that is known; those of each other node)."""
        if not self.nodes:
            return list(handles), {}
        here: list[Handle] = []
        elsewhere: dict[str, list[Handle]] = defaultdict(list)
        for handle in handles:
            origin = handle.origin
            (elsewhere[origin] if origin in self.nodes else here).append(handle)
        return here, elsewhere

    async def adopt(self, handles: Iterable[Handle]) -> dict[Handle, ArenaError]:
        """Own these blocks -> those that are gone. Waits for nothing where all are in the own arena."""
        here, elsewhere = self._apart(handles)
        gone: dict[Handle, ArenaError] = {}
        for handle in here:
            try:
                self.local.adopt([handle])
            except ArenaError as error:
                gone[handle] = error
        answers = {origin: self.nodes[origin].ask("adopt", theirs) for origin, theirs in elsewhere.items()}
        for origin, answer in answers.items():
            missing = await answer
            if self.nodes[origin].lost is not None:
                missing = dict.fromkeys(range(len(elsewhere[origin])), str(self.nodes[origin].lost))
            gone |= {elsewhere[origin][index]: NodeLost(why) for index, why in missing.items()}
        return gone

    def free(self, handles: Iterable[Handle]) -> None:
        """Free as the owner. A block that is gone already (discarded by an operator, its ttl over) is no error here."""
        here, elsewhere = self._apart(handles)
        if here:
            with suppress(AlreadyFreed, StaleHandle):
                self.local.free(here)
        for origin, theirs in elsewhere.items():
            self.nodes[origin].ask("free", theirs)

    def ship(self, handles: Iterable[Handle], readers: int, step: int) -> None:
        """Arm the done sets of what is still there; `flush` before anybody is told to read."""
        here, elsewhere = self._apart(handles)
        try:
            if here:
                self.local.ship(here, readers=readers, step=step)
        except StaleHandle:
            for handle in here:
                with suppress(StaleHandle):
                    self.local.ship([handle], readers=readers, step=step)
        for origin, theirs in elsewhere.items():
            self.nodes[origin].ask("ship", theirs, readers, step)

    def done(self, handles: Iterable[Handle], reader: int) -> None:
        """Reader `reader` needs them no more."""
        here, elsewhere = self._apart(handles)
        if here:
            self.local.done(here, reader=reader)
        for origin, theirs in elsewhere.items():
            self.nodes[origin].ask("done", theirs, reader)

    def discard(self, prefix: str) -> None:
        """Free what is under a tag prefix, whoever owns it."""
        self.local.discard(prefix)
        for node in self.alive:
            node.ask("discard", prefix)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Everything that was asked for is done, or its node is lost, or timeout_s are over."""
        if self.alive:
            await asyncio.wait([node.ask("adopt", []) for node in self.alive], timeout=timeout_s)

    # --- what is in them -----------------------------------------------------------------------------------------

    async def sampled(self, sample: Sample) -> int | None:
        """How many tokens of a sample on another node were sampled; None where that cannot be known."""
        return await self._read(sample, RemoteArena.sampled, sampled)  # type: ignore[no-any-return]

    async def shown(self, sample: Sample) -> dict[str, Any]:
        """What people are shown of a sample, read where it is."""
        return await self._read(sample, RemoteArena.shown, shown) or NOTHING

    async def _read(self, sample: Sample, there: Callable[..., Any], here: Callable[..., Any]) -> Any:
        node = self.nodes.get(sample.segments[-1][0].origin)
        with suppress(LostPayload):
            if node is None:
                return here(self.local, sample)
            if node.lost is None:
                with suppress(ShmrlError):  # its watch tells what becomes of it
                    return await node.call(there, node.remote, sample)
        return None

    def is_elsewhere(self, sample: Sample) -> bool:
        """Whether any block of it is on another node."""
        return bool(self.nodes) and any(handle.origin in self.nodes for handle in sample.handles)

    async def find(self, prefix: str) -> list[Found]:
        """Every block under a tag prefix, in every arena; a node that does not answer is lost."""

        async def theirs(node: Node) -> list[Found]:
            try:
                return await node.call(node.remote.find, prefix)  # type: ignore[no-any-return]
            except ShmrlError as error:
                node.lose(str(error))
                return []

        found = found_under(self.local, prefix)
        for there in await asyncio.gather(*map(theirs, self.alive)):
            found += there
        return found

    # --- how full they are ---------------------------------------------------------------------------------------

    def _looks(self) -> list[dict[str, Any]]:
        """What was last seen of the arenas that sources write to."""
        others = [node.seen for node in self.alive]
        return others if others and not self._writes_here else [looked(self.local), *others]

    def pressure(self) -> dict[str, Any]:
        """`Arena.pressure` of the fullest arena that a source writes to; `waiting` and `arenas` of them all."""
        if not self.nodes:
            return self.local.pressure() | {"arenas": 1}
        every = [look["pressure"] for look in self._looks()]
        fullest = max(every, key=lambda one: one["used_bytes"] / max(1, one["capacity_bytes"]))
        return {**fullest, "waiting": sum(one["waiting"] for one in every), "arenas": len(every)}

    def moved(self) -> Hashable:
        """Differs whenever a block was made or freed."""
        stats = self.stats()
        return stats["created"], stats["freed"]

    def steps(self) -> set[str]:
        """Steps that have blocks; "" of those that were never shipped."""
        found = set(self.local.stats(by="step")["by"])
        return found.union(*(node.seen["steps"] for node in self.alive))

    def stats(self) -> dict[str, int]:
        """`Arena.stats`, summed over every arena, as last seen."""
        total = Counter(self.local.stats())
        for node in self.alive:
            total.update(node.seen["stats"])
        return dict(total)

    async def look(self) -> None:
        """See every node as it is now, if it answers soon."""

        async def look(node: Node) -> None:
            with suppress(ShmrlError, TimeoutError):  # its watch tells what becomes of it
                async with asyncio.timeout(DOUBT_S):
                    await node.look()

        await asyncio.gather(*map(look, self.alive))

    def rss_bytes(self) -> dict[str, int]:
        """Of each node's server."""
        return {node.name: node.seen["rss_bytes"] for node in self.alive}

    async def close(self) -> None:
        """Let go of everything: what was not flushed is broken off."""
        if self._client is not None:
            self._client.close()
        await asyncio.gather(*[node.close() for node in self.nodes.values()])
        self.local.close()
