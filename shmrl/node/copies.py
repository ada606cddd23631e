"""Blocks of other nodes in this node's arena: each fetched once for all ranks, and freed when all of them are done.

Lives in the node server, which several ranks ask; a rank of a node without one has its own. The fetching is done here
and not in the rank that came first, so a rank that is killed breaks off nothing. Which copies there are, and whose, is
also written into the arena, as their tags: whoever is started again takes over those of its own that it is asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shmrl.arena import Arena
from shmrl.errors import ArenaError, ArenaFull, ChecksumError, LostPayload, NodeError, ShmrlError
from shmrl.node.client import Client
from shmrl.node.transfer import fetch_one, original_of, url_of
from shmrl.types import Handle

log = logging.getLogger(__name__)

PARALLEL = 8
LONGEST_WAIT_S = 15.0  # of a question from elsewhere: its connection is silent meanwhile
STOPPING = "this node's server is stopping"
_LOST: dict[str, type[ShmrlError]] = {
    kind.__name__: kind for kind in (ArenaFull, ChecksumError, LostPayload, NodeError)
}


@dataclass(slots=True)
class _Copy:
    """One block's copy, or its way here. readers: who asked; done: who needs it no more."""

    here: Future[Handle]
    readers: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class Copies:
    """Fetches into `arena` over `client`, for all ranks of the node or for `whose` alone. Threads may share it."""

    def __init__(self, arena: Arena, client: Client, parallel: int = PARALLEL, whose: str = "") -> None:
        self._arena, self._client, self._whose = arena, client, whose
        self._pool = ThreadPoolExecutor(parallel, "shmrl-fetch")
        self._changing = threading.Lock()
        self._closing = False
        self._counters: Counter[str] = Counter(fetched=0, fetched_bytes=0, joined=0, lost=0)
        self._copies: dict[Handle, _Copy] = {}
        self._left = self._found()

    def _found(self) -> dict[Handle, Handle]:
        """Copies that a process which is gone made here for the same readers. One that nobody asks for stays an orphan,
        and expires: nobody would ever be done with it."""
        found: dict[Handle, Handle] = {}
        for row in self._arena.ls():
            original = original_of(row["tag"], self._whose)
            if original is not None and row["state"] == "ready" and "orphan" in row["flags"]:
                found[original] = Handle.parse(row["handle"])
        return found

    def _known(self, handle: Handle) -> _Copy | None:
        """The block's copy; one that was left here is taken over."""
        if (here := self._left.pop(handle, None)) is not None:
            with suppress(ArenaError):  # freed meanwhile
                self._arena.adopt([here])
                self._copies[handle] = _Copy(Future())
                self._copies[handle].here.set_result(here)
        return self._copies.get(handle)

    @property
    def counters(self) -> dict[str, int]:
        """fetched (blocks), fetched_bytes, joined (asked for again while there or on its way), lost."""
        with self._changing:
            return dict(self._counters)

    def want(
        self, handles: Sequence[Handle], nodes: Mapping[str, str], reader: int, wait_s: float
    ) -> dict[Handle, Handle | Exception]:
        """What is here of these blocks within wait_s: the copy's handle, or why there is none. Ask again for the rest.

        nodes: url by `Handle.origin`. reader: who has to be done with them before they are freed.
        """
        flights = {handle: self._flight(Handle(handle), nodes, reader) for handle in handles}
        wait(flights.values(), wait_s)
        return {handle: _outcome(flight) for handle, flight in flights.items() if flight.done()}

    def _flight(self, handle: Handle, nodes: Mapping[str, str], reader: int) -> Future[Handle]:
        with self._changing:
            if self._closing:
                raise NodeError(STOPPING)
            copy = self._known(handle)
            if copy is None or not self._usable(copy):
                url = url_of(handle, nodes)
                copy = self._copies[handle] = _Copy(self._pool.submit(self._fetch, handle, url))
            elif reader not in copy.readers:
                self._counters["joined"] += 1
            copy.readers.add(reader)
            copy.done.discard(reader)
            return copy.here

    def _usable(self, copy: _Copy) -> bool:
        """Whether it is on its way, or here: a failure is tried anew, and so is what somebody has discarded."""
        if not copy.here.done():
            return True
        if copy.here.exception() is not None:
            return False
        try:
            self._arena.get(copy.here.result()).release()
        except ArenaError:
            return False
        return True

    def _fetch(self, handle: Handle, url: str) -> Handle:
        if self._closing:
            raise NodeError(STOPPING)
        try:
            here = fetch_one(self._arena, self._client, handle, url, self._whose)
        except ShmrlError as error:
            log.warning("%s", error)
            self._count(lost=1)
            raise
        self._count(fetched=1, fetched_bytes=handle.nbytes)
        return here

    def _count(self, **more: int) -> None:
        with self._changing:
            self._counters.update(more)

    def done(self, handles: Sequence[Handle], nodes: Mapping[str, str], reader: int) -> None:
        """This reader needs them no more: what nobody here needs is freed, then their own nodes are told, all at once.
        Idempotent."""
        self._free([copy.here.result() for handle in map(Handle, handles) if (copy := self._over(handle, reader))])
        by_url = defaultdict(list)
        for handle in map(Handle, handles):
            by_url[url_of(handle, nodes)].append(handle)
        with ThreadPoolExecutor(max(1, len(by_url)), "shmrl-done") as telling:
            told = [telling.submit(self._tell, url, theirs, reader) for url, theirs in by_url.items()]
        for one in told:
            one.result()

    def _tell(self, url: str, handles: list[Handle], reader: int) -> None:
        try:
            self._client.call(url, "blocks/done", handles=handles, reader=reader)
        except ShmrlError as error:
            log.warning("%s was not told that %d blocks are done: %s", url, len(handles), error)

    def _over(self, handle: Handle, reader: int) -> _Copy | None:
        """The copy, if this was its last reader; it is forgotten then."""
        with self._changing:
            if (copy := self._known(handle)) is None:
                return None
            copy.done.add(reader)
            if not copy.here.done() or not copy.readers <= copy.done:
                return None
            del self._copies[handle]
        return copy if copy.here.exception() is None else None

    def _free(self, here: list[Handle]) -> None:
        with suppress(ArenaError):  # discarded by somebody, which is as good
            self._arena.free(here)

    def answer(self, handles: Sequence[Handle], nodes: Mapping[str, str], reader: int, wait_s: float) -> dict[str, Any]:
        """`want` in values that travel: {here: {index: handle}, lost: {index: [error's name, message]}}."""
        found = self.want(handles, nodes, reader, min(wait_s, LONGEST_WAIT_S))
        if self._closing:  # what was broken off is not lost: the next server has it
            raise NodeError(STOPPING)
        here, lost = {}, {}
        for index, handle in enumerate(handles):
            if isinstance(outcome := found.get(handle), Handle):
                here[index] = outcome
            elif outcome is not None:
                lost[index] = [type(outcome).__name__, str(outcome)]
        return {"here": here, "lost": lost}

    def close(self) -> None:
        """Breaks off what is under way; copies stay, and are orphans when this process leaves."""
        with self._changing:
            self._closing = True
        self._client.close()
        self._pool.shutdown()  # what was queued is refused: a cancelled future wakes nobody in wait()


def _outcome(flight: Future[Handle]) -> Handle | Exception:
    try:
        return flight.result()
    except Exception as error:
        return error


class RemoteCopies:
    """The copies of this node's server, at `url`, as its ranks see them."""

    def __init__(self, client: Client, url: str) -> None:
        self._client, self._url = client, url

    def want(
        self, handles: Sequence[Handle], nodes: Mapping[str, str], reader: int, wait_s: float
    ) -> dict[Handle, Handle | Exception]:
        """As `Copies.want`. NodeError when the own node's server stays away."""
        given = list(handles)
        said = self._client.call(self._url, "fetch", handles=given, nodes=dict(nodes), reader=reader, wait_s=wait_s)
        out: dict[Handle, Handle | Exception] = {given[index]: here for index, here in said["here"].items()}
        for index, (name, text) in said["lost"].items():
            out[given[index]] = _LOST.get(name, NodeError)(text)
        return out

    def done(self, handles: Sequence[Handle], nodes: Mapping[str, str], reader: int) -> None:
        """As `Copies.done`."""
        self._client.call(self._url, "done", handles=list(handles), nodes=dict(nodes), reader=reader)

    def close(self) -> None:
        self._client.close()
