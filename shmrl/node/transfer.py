"""`fetch`: blocks of other nodes into this node's arena, received in place and verified.

What arrives goes from the socket straight into a reserved block; a connection that breaks is resumed behind the last
byte that came. The checksums travel behind the payload and are compared before the block is sealed, with the same
columns and checksums, so that `get(field=, rows=, verify=)` works on the copy as on the original. Called in node
servers (`Copies`), in ranks without one, and by embedders.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from shmrl.arena import Arena, Block, columns, moving, span_bytes
from shmrl.config.host import FETCHED, SPILL_AFTER_S
from shmrl.errors import (
    ArenaError,
    ArenaFull,
    ChecksumError,
    ForeignArena,
    LostPayload,
    NodeError,
    NotSealed,
    ShmrlError,
    StaleHandle,
)
from shmrl.node.client import Client, Connection, Passing
from shmrl.node.http import BadMessage, number
from shmrl.types import Handle

log = logging.getLogger(__name__)

CHUNK = 1 << 20  # bytes received at once, and compared while they are in the caches
SLICE_S = 0.5  # of a wait for room, until it looks whether it is still wanted
CORRUPT = 2  # attempts whose bytes do not match their checksums, until that is the block's state and not the network's


def fetch(
    arena: Arena,
    handles: Sequence[Handle],
    nodes: Mapping[str, str],
    parallel: int = 8,
    timeout_s: float = 60.0,
    *,
    token: str,
    ca: Path | None = None,
) -> list[Handle]:
    """Copies of blocks of other nodes, in this arena and owned by this process -> their handles, in order.

    Args:
        nodes: url of each node's server by `Handle.origin`.
        parallel: how many blocks are under way at once, each on a connection of its own.
        timeout_s: how long a block may go without progress. token: the run's. ca: for https.

    All or none: LostPayload (freed there), ChecksumError, NodeError (not reached, refused), ArenaFull.

    Example: fetch(arena, [sample.handles[0]], {"1f2e3d4c5b6a7988": "http://10.0.0.7:7070"}, token=token)
    """
    urls = [url_of(handle, nodes) for handle in handles]
    with Client(token, ca=ca, patience_s=timeout_s) as client, ThreadPoolExecutor(max(1, parallel)) as pool:
        flights = [pool.submit(fetch_one, arena, client, *one) for one in zip(handles, urls, strict=True)]
        failed = [error for flight in flights if (error := flight.exception()) is not None]
        if not failed:
            return [flight.result() for flight in flights]
        with suppress(ArenaError):
            arena.free([flight.result() for flight in flights if flight.exception() is None])
        raise failed[0]


def url_of(handle: Handle, nodes: Mapping[str, str]) -> str:
    """The server of a handle's node. ForeignArena names the origin of one that nobody serves."""
    if handle.origin not in nodes:
        raise ForeignArena(f"{handle!r} is of {handle.origin}, which no node server is known for")
    return nodes[handle.origin]


def tag_of(handle: Handle, whose: str = "") -> str:
    """The tag of a block's copy: whoever finds one can tell of what, and whose it is, if not the whole node's."""
    return f"@{handle.origin}/{FETCHED}/{handle}" + (f"/{whose}" if whose else "")


def original_of(tag: str, whose: str = "") -> Handle | None:
    """The block that a tag's block is a copy of, if it is one of theirs."""
    parts = tag.split("/")
    if not parts[0].startswith("@") or parts[1:2] != [FETCHED] or parts[3:] != ([whose] if whose else []):
        return None
    return Handle.parse(parts[2])


def fetch_one(arena: Arena, client: Client, handle: Handle, url: str, whose: str = "") -> Handle:
    """A copy of one block, with the errors of `fetch`."""
    with _room(arena, client, handle, tag_of(handle, whose)) as block:
        with memoryview(block) as payload:
            transfer = _Transfer(handle, payload)
            try:
                client.run(url, transfer.attempt, lambda: transfer.got)
            except (StaleHandle, ForeignArena, NotSealed) as error:
                raise LostPayload(f"block {handle!r} of {url} is gone: {error}") from error
            except (ChecksumError, NodeError):
                raise
            except ShmrlError as error:
                raise NodeError(f"{url}: {error}") from error
        try:
            return moving.seal_as(block, transfer.behind)
        except ValueError as error:
            raise NodeError(f"{url}: {error}") from error


def _room(arena: Arena, client: Client, handle: Handle, tag: str) -> Block:
    """The block that a copy goes into. ArenaFull; NodeError when the client is closed meanwhile."""
    if moving.spills(arena):
        return arena.reserve(handle.nbytes, tag=tag, timeout_s=SPILL_AFTER_S, on_full="spill")
    until = time.monotonic() + client.patience_s
    while True:
        began = time.monotonic()
        try:
            return arena.reserve(handle.nbytes, tag=tag, timeout_s=SLICE_S)
        except ArenaFull:
            now = time.monotonic()
            if client.closing:
                raise NodeError(f"{handle!r} was not fetched: its client was closed") from None
            if now >= until or now - began < SLICE_S:  # refused at once: there will never be room
                raise


class _Transfer:
    """One block under way: `got` bytes of its payload are there, compared with their checksums as they came."""

    def __init__(self, handle: Handle, payload: memoryview) -> None:
        self._handle, self._payload = handle, payload
        self.got = 0
        self._corrupt = 0
        self._behind: moving.Behind | None = None
        self._arrival: columns.Arrival | None = None

    @property
    def behind(self) -> moving.Behind:
        """Tail, crc and whether there are checksums: what the copy is sealed with."""
        assert self._behind is not None
        return self._behind

    def attempt(self, connection: Connection) -> None:
        """What is missing, over one connection: both requests go out before the first answer is read.

        Passing for bytes that do not match, once: a block that is freed while it is sent is found by this.
        """
        path = f"/v1/blocks/{self._handle}"
        first, missing = self._behind is None, self.got < len(self._payload)
        if first:
            connection.ask("GET", f"{path}/tail")
        if missing:
            connection.ask("GET", path, asked=f"bytes={self.got}-" if self.got else "")
        try:
            if first:
                self._begin(connection)
            if missing:
                self._receive(connection)
            if self._arrival is not None:
                self._arrival.finish()
        except ChecksumError as error:
            self._corrupt += 1
            if self._corrupt == CORRUPT:
                raise
            self.got, self._behind, self._arrival = 0, None, None
            raise Passing(str(error)) from None

    def _begin(self, connection: Connection) -> None:
        """What lies behind the payload, and whether it is checked."""
        head = connection.answer()
        crc, checked = (number(head.fields.get(name, "")) for name in ("shmrl-crc32c", "shmrl-checked"))
        if crc is None or crc >> 32 or checked not in (0, 1):
            raise BadMessage(502, "an answer without checksum fields")
        nbytes = len(self._payload)
        tail = connection.body(head, span_bytes(nbytes) - nbytes)
        self._behind = tail, crc, checked == 1
        self._arrival = columns.Arrival(self._handle, self._payload, tail, crc) if checked else None

    def _receive(self, connection: Connection) -> None:
        nbytes = len(self._payload)
        if (length := connection.answer().length) != nbytes - self.got:
            raise BadMessage(502, f"{length} bytes where {nbytes - self.got} of {nbytes} were asked for")
        while self.got < nbytes:
            with self._payload[self.got : self.got + CHUNK] as part:
                moved = connection.stream.some(part)
            if not moved:
                raise ConnectionResetError(f"closed after {self.got} of {nbytes} bytes")
            self.got += moved
            if self._arrival is not None:
                self._arrival.upto(self.got)
