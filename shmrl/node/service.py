"""What a node server answers: the routes, over one arena. Called by `server`, in its connections' threads.

    GET, HEAD  /v1/blocks/<handle>               the payload; Range
    GET, HEAD  /v1/blocks/<handle>/tail          columns table and checksums behind it (may be empty)
    DELETE     /v1/blocks/<handle>?reader=N      done, by a reader's index (repeated for several)
    POST       /v1/blocks/{adopt,ship,done,free,discard}   the arena's own verbs, their arguments as a msgpack map
    POST       /v1/fetch                         {handles, nodes, reader, wait_s} -> {here, lost}: see `Copies.want`
    POST       /v1/done                          {handles, nodes, reader}: of blocks that were fetched
    POST       /v1/owner/{apply,look,find,read}  for the run's orchestrator on another node: see `holdings`
    GET        /v1/counters                      what this server did so far

Both answers for a block carry Shmrl-Crc32c (of its descriptor) and Shmrl-Checked (0: sealed without checksums). What
is adopted belongs to this process, which frees nothing by itself. Nothing is listed but what a tag asks for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from shmrl import wire
from shmrl.arena import Arena, View, moving
from shmrl.errors import ForeignArena, ProtocolError, ShmrlError, StaleHandle, told
from shmrl.node.copies import Copies
from shmrl.node.holdings import Holdings
from shmrl.node.http import STATUS, BadMessage, byte_range
from shmrl.types import Handle


@dataclass(slots=True)
class Reply:
    """An answer. With `view` its body is bytes [start, stop) of a block, which the view holds until it is sent."""

    status: int
    body: bytes = b""
    fields: dict[str, str | int] = field(default_factory=dict)
    view: View | None = None
    start: int = 0
    stop: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start if self.view is not None else len(self.body)


class Service:
    """Answers requests from an arena, and fetches what is asked for into it."""

    def __init__(self, arena: Arena, copies: Copies) -> None:
        self._arena, self._copies = arena, copies
        self._counting = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._verbs: dict[str, Callable[..., Any]] = {
            "adopt": arena.adopt,
            "ship": arena.ship,
            "done": arena.done,
            "free": arena.free,
            "discard": arena.discard,
        }
        holdings = Holdings(arena)
        self._owner: dict[str, Callable[..., Any]] = {
            "apply": holdings.apply,
            "look": holdings.look,
            "find": holdings.find,
            "read": holdings.read,
        }

    def count(self, what: str, n: int = 1) -> None:
        with self._counting:
            self._counters[what] += n

    @property
    def counters(self) -> dict[str, int]:
        """requests, refused (no token), sent_bytes; of the copies: fetched, fetched_bytes, joined, lost."""
        with self._counting:
            own = {name: self._counters[name] for name in ("requests", "refused", "sent_bytes")}
        return own | self._copies.counters

    def answer(self, method: str, target: str, fields: dict[str, str], body: bytes) -> Reply:
        """The reply to an authorised request."""
        path, _, query = target.partition("?")
        try:
            return self._route(method, path.split("/")[1:], query, fields, body)
        except (ProtocolError, ValueError, TypeError, KeyError, OverflowError) as error:
            return Reply(400, told(error).encode())
        except ShmrlError as error:
            return self._failed(error)

    def _failed(self, error: ShmrlError) -> Reply:
        """What the asker did wrong by name; what is our own trouble as one that may pass."""
        known = next((kind for kind in STATUS if isinstance(error, kind)), None)
        if known is None:
            return Reply(503, told(error).encode())
        return Reply(STATUS[known], str(error).encode(), {"Shmrl-Error": known.__name__})

    def _route(self, method: str, path: list[str], query: str, fields: dict[str, str], body: bytes) -> Reply:
        match method, path:
            case "GET" | "HEAD", ["v1", "blocks", handle]:
                return self._block(self._handle(handle), fields.get("range"))
            case "GET" | "HEAD", ["v1", "blocks", handle, "tail"]:
                return self._tail(self._handle(handle))
            case "DELETE", ["v1", "blocks", handle]:
                for reader in parse_qs(query)["reader"]:
                    self._arena.done(self._handle(handle), reader=int(reader))
                return Reply(204)
            case "POST", ["v1", "blocks", verb] if verb in self._verbs:
                return _packed(self._verbs[verb](**wire.unpack(body)))
            case "POST", ["v1", "owner", verb] if verb in self._owner:
                return _packed(self._owner[verb](**wire.unpack(body)))
            case "POST", ["v1", "fetch"]:
                return _packed(self._copies.answer(**wire.unpack(body)))
            case "POST", ["v1", "done"]:
                self._copies.done(**wire.unpack(body))
                return _packed(None)
            case "GET", ["v1", "counters"]:
                return _packed(self.counters)
        known = method in ("GET", "HEAD", "DELETE", "POST")
        return Reply(404 if known else 501, b"nothing here")

    def _handle(self, text: str) -> Handle:
        try:
            return Handle.parse(text)
        except ValueError as error:
            raise ForeignArena(str(error)) from None

    def _opened(self, handle: Handle) -> tuple[View, bytes, dict[str, str | int]]:
        """A view of the block, what lies behind its payload, and the fields that both answers have."""
        try:
            view = self._arena.get(handle)
        except StaleHandle as error:
            if moving.was_freed(self._arena, handle):
                raise
            raise ForeignArena(str(error)) from None
        tail, crc, checked = moving.behind(view)
        return view, tail, {"Shmrl-Crc32c": crc, "Shmrl-Checked": int(checked), "Accept-Ranges": "bytes"}

    def _block(self, handle: Handle, asked: str | None) -> Reply:
        view, _, fields = self._opened(handle)
        try:
            cut = byte_range(asked, len(view))
        except BadMessage as error:
            nbytes = len(view)
            view.release()
            return Reply(error.status, str(error).encode(), {"Content-Range": f"bytes */{nbytes}"})
        if cut is None:
            return Reply(200, b"", fields, view, 0, len(view))
        fields["Content-Range"] = f"bytes {cut[0]}-{cut[1] - 1}/{len(view)}"
        return Reply(206, b"", fields, view, *cut)

    def _tail(self, handle: Handle) -> Reply:
        view, tail, fields = self._opened(handle)
        view.release()
        return Reply(200, tail, fields)


def _packed(result: Any) -> Reply:
    return Reply(200, wire.pack(result), {"Content-Type": "application/msgpack"})
