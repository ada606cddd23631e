"""What an orchestrator elsewhere does with the blocks of this node's arena: `Holdings`, behind the node server.

The orchestrator is the owner, this process holds the blocks in its name. Everything it asks for may be asked again,
because the answer was lost: a batch has a number, and one that was done already is answered from memory; what is gone
is gone; and whatever frees or ships adopts first, so that a server that was started again goes on where its
predecessor stood. Called in the node server's threads.

    apply  ["adopt", handles] | ["free", handles] | ["ship", handles, readers, step] | ["done", handles, reader] |
           ["discard", tag prefix], in order -> per operation, of adopt and ship: {index: why it is gone}
    look   how full the arena is, its counters, and this process's memory
    find   the blocks under a tag prefix, with what an orchestrator needs to adopt or to report them
    read   of one sample: how many of its tokens were sampled, or what people are shown of it
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from shmrl.arena import Arena
from shmrl.errors import ArenaError, LostPayload, PayloadError
from shmrl.payload import read_header
from shmrl.payload.header import read_loss_mask
from shmrl.payload.shown import shown
from shmrl.payload.wireform import sample_from_wire, sample_to_wire
from shmrl.types import Handle, Sample

PAGE = 4096  # blocks in an answer


@dataclass(frozen=True, slots=True)
class Found:
    """A block under a tag.

    Attributes:
        row: what `Arena.ls` says of it. meta: of its header; None where it has none.
        sample: the branch that ends in this block; None where it is no branch's.
    """

    row: dict[str, Any]
    meta: dict[str, Any] | None = None
    sample: Sample | None = None

    @property
    def handle(self) -> Handle:
        return Handle.parse(self.row["handle"])


def found_under(arena: Arena, prefix: str, after: int = -1, most: int | None = None) -> list[Found]:
    """The arena's blocks under a tag prefix, by slot, behind slot `after`."""
    out: list[Found] = []
    for row in arena.ls():
        if row["slot"] > after and f"{row['tag']}/".startswith(f"{prefix}/"):
            out.append(_found(arena, row))
            if len(out) == most:
                break
    return out


def _found(arena: Arena, row: dict[str, Any]) -> Found:
    if row["state"] != "ready":
        return Found(row)
    try:
        header = read_header(arena, handle := Handle.parse(row["handle"]))
    except (LostPayload, PayloadError):
        return Found(row)
    return Found(row, header.meta, header.sample(handle) if "branch" in header.meta else None)


def looked(arena: Arena) -> dict[str, Any]:
    """pressure: `Arena.pressure`. stats: `Arena.stats`. steps: blocks by the step that they were shipped in."""
    stats = arena.stats(by="step")
    steps = {key: row["blocks"] for key, row in stats.pop("by").items()}
    return {"pressure": arena.pressure(), "stats": stats, "steps": steps}


class Holdings:
    """The blocks of `arena` that others own. Threads may share it. instance: this process's life, as they see it."""

    def __init__(self, arena: Arena) -> None:
        self.instance = secrets.token_hex(8)
        self._arena = arena
        self._applying = threading.Lock()
        self._last: dict[str, tuple[int, list[dict[int, str]]]] = {}
        self._verbs: dict[str, Callable[..., dict[int, str]]] = {
            "adopt": self._adopt,
            "free": self._free,
            "ship": self._ship,
            "done": self._done,
            "discard": self._discard,
        }

    def apply(self, owner: str, number: int, operations: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """A batch of operations, once. owner: whose batches are numbered, from 1. ValueError for one that is late."""
        with self._applying:
            last, gone = self._last.get(owner, (0, []))
            if number < last:
                raise ValueError(f"batch {number} of {owner} came after batch {last}")
            if number > last:
                gone = [self._verbs[verb](*arguments) for verb, *arguments in operations]
                self._last[owner] = number, gone
        return {"instance": self.instance, "gone": gone}

    def look(self) -> dict[str, Any]:
        return looked(self._arena) | {"instance": self.instance, "rss_bytes": psutil.Process().memory_info().rss}

    def find(self, prefix: str, after: int) -> list[Any]:
        found = found_under(self._arena, prefix, after, PAGE)
        return [[one.row, one.meta, one.sample and sample_to_wire(one.sample)] for one in found]

    def read(self, what: str, sample: Any) -> Any:
        """what: "sampled" or "shown". None where a block of it is lost."""
        read: Callable[..., Any] = {"sampled": sampled, "shown": shown}[what]
        try:
            return read(self._arena, sample_from_wire(sample))
        except LostPayload:
            return None

    def _adopt(self, handles: Sequence[Handle]) -> dict[int, str]:
        return self._each(handles, self._arena.adopt)

    def _free(self, handles: Sequence[Handle]) -> dict[int, str]:
        """What is gone already was freed by this before, or discarded by somebody."""
        self._each(handles, self._arena.adopt, self._arena.free)
        return {}

    def _ship(self, handles: Sequence[Handle], readers: int, step: int) -> dict[int, str]:
        return self._each(handles, self._arena.adopt, partial(self._arena.ship, readers=readers, step=step))

    def _done(self, handles: Sequence[Handle], reader: int) -> dict[int, str]:
        self._each(handles, partial(self._arena.done, reader=reader))
        return {}

    def _discard(self, prefix: str) -> dict[int, str]:
        self._arena.discard(prefix)
        return {}

    @staticmethod
    def _each(handles: Sequence[Handle], *verbs: Callable[[list[Handle]], Any]) -> dict[int, str]:
        """One by one: what is gone keeps nothing from the others."""
        gone = {}
        for index, handle in enumerate(handles):
            try:
                for verb in verbs:
                    verb([handle])
            except (ArenaError, ValueError) as error:
                gone[index] = str(error)
        return gone


def sampled(arena: Arena, sample: Sample) -> int:
    """How many tokens of a sample were sampled. LostPayload."""
    return int(read_loss_mask(arena, sample).sum())
