"""`Groups`: what the episodes of a group store once, though each of them is a request of its own.

Owned by the pool, in the env-server process. An episode that ends asks what its siblings have stored; the group's first
one is told that there is nothing and stores what it begins with, and those that end meanwhile wait for that. From its
reply on, what is stored belongs to the client, which keeps it until the group's last reply is in (`shares`). What no
reply brought to the client is freed here, when nobody is left who could refer to it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shmrl.errors import ArenaError
from shmrl.payload import sample_from_wire
from shmrl.types import Handle
from shmrl.wire import pack, unpack

if TYPE_CHECKING:
    from shmrl.arena import Arena
    from shmrl.env.pool import Request

REMEMBERED = 4096
"""Groups without an open request that are still known: the next episode of one shares what the last has stored."""


def prompt_tag(tag: str) -> str:
    """Under which tag an episode stores what its siblings share. Discarded with none of them.

    Example: prompt_tag("run/source/g7/3") == "run/source/g7/prompt-3"
    """
    group, _, episode = tag.rpartition("/")
    return f"{group}/prompt-{episode}"


@dataclass(slots=True, eq=False)
class _Stored:
    """A shared block: the sample on the wire, and the tags of the episodes whose replies refer to it."""

    wire: list[Any]
    claims: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Group:
    """open: requests under way. storing: the one that the others wait for. told: what a request says that it uses."""

    open: dict[int, Request] = field(default_factory=dict)
    stored: dict[Handle, _Stored] = field(default_factory=dict)
    told: dict[int, list[Handle]] = field(default_factory=dict)
    storing: Request | None = None
    waiting: deque[Request] = field(default_factory=deque)


class Groups:
    """Of one env server. `arena` is where its workers store."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._groups: OrderedDict[str, _Group] = OrderedDict()

    def begin(self, request: Request) -> None:
        """A request that may share is under way."""
        key = _key(request.tag)
        group = self._groups.setdefault(key, _Group())
        self._groups.move_to_end(key)
        group.open[request.number] = request

    def ask(self, request: Request) -> None:
        """Its worker wants to store it: answer what is there, or when somebody else has stored something."""
        group = self._groups[_key(request.tag)]
        group.waiting.append(request)
        self._answer(group)

    def tell(self, request: Request, payload: bytes) -> None:
        """Before its reply: [what it stored for its siblings, handles of what its samples share]."""
        new, used = unpack(payload)
        group = self._groups[_key(request.tag)]
        for wire in new:
            group.stored[sample_from_wire(wire).segments[-1][0]] = _Stored(wire)
        group.told[request.number] = [Handle(handle) for handle in used]

    def end(self, request: Request, *, replied: bool) -> None:
        """Its one reply is there: a success that goes to the client, or a failure. Idempotent."""
        key = _key(request.tag)
        group = self._groups.get(key)
        if group is None or group.open.pop(request.number, None) is None:
            return
        used = group.told.pop(request.number, None)
        if used is None:  # it may have stored something that nobody was told of
            self._arena.discard(prompt_tag(request.tag))
        for handle in used or () if replied else ():
            if handle in group.stored:
                group.stored[handle].claims.add(request.tag)
        if request in group.waiting:
            group.waiting.remove(request)
        if group.storing is request:
            group.storing = None
            self._answer(group)
        self._tidy(key, group)

    def unclaim(self, tag: str) -> None:
        """The reply of this episode reached nobody."""
        key = _key(tag)
        group = self._groups.get(key)
        if group is not None:
            for stored in group.stored.values():
                stored.claims.discard(tag)
            self._tidy(key, group)

    def _answer(self, group: _Group) -> None:
        while group.waiting and (group.storing is None or group.stored):
            request = group.waiting.popleft()
            if not group.stored:
                group.storing = request
            assert request.worker is not None
            known = [stored.wire for stored in group.stored.values()]
            request.worker.link.send(request.number, "prefix", pack(known))

    def _tidy(self, key: str, group: _Group) -> None:
        """Once nobody is left who could refer to it, free what no client has."""
        if group.open:
            return
        for handle in [handle for handle, stored in group.stored.items() if not stored.claims]:
            del group.stored[handle]
            with suppress(ArenaError):  # an operator was first
                self._arena.adopt([handle])
                self._arena.free([handle])
        if not group.stored:
            del self._groups[key]
        while len(self._groups) > REMEMBERED and not next(iter(self._groups.values())).open:
            self._groups.popitem(last=False)


def _key(tag: str) -> str:
    return tag.rpartition("/")[0]
