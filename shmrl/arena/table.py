"""Words for what `_ctl.Ctl` reads of a mapped ctl: states, flags, groups and processes by name.

Used by statistics, ls and holders of attached processes and by the inspectors of dead arenas alike.
"""

from __future__ import annotations

import bisect
import struct
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

_PROCESS = struct.Struct("<QQQQQQ80s")
STATES = ("free", "writing", "ready", "retired", "freeing")
FLAGS = ("orphan", "shipped", "discarded", "spilled", "unchecked")
BY = ("source", "step", "holder", "age", "field")  # csrc/arena_core.h: enum srl_by
AGES = ("under 10 s", "under 1 min", "under 10 min", "under 1 h", "older")
_AGES_END_S = (10, 60, 600, 3600)
ORPHANS = "orphans"
ORPHAN = "nobody: an orphan"
UNNAMED = {
    "source": "(no source in the tag)",
    "step": "(no step)",
    "holder": "(nobody)",
    "field": "(no column: plain payload, tail, rounding)",
    "age": "(no age)",
}
FLAGS_OF = [tuple(name for bit, name in enumerate(FLAGS) if value >> bit & 1) for value in range(1 << len(FLAGS))]


@dataclass(frozen=True, slots=True)
class Process:
    """One attached (or dead and not yet swept) process."""

    index: int
    pid: int
    name: str
    since_ns: int  # CLOCK_BOOTTIME
    waits_since_ns: int  # for space; CLOCK_MONOTONIC, 0 = it does not


class Names(NamedTuple):
    """What turns numbers of one arena into words: "name (pid)" by process index; CLOCK_BOOTTIME, for ages."""

    processes: dict[int, str]
    now_ns: int

    def process(self, index: int) -> str:
        """ "name (pid)", or the bare index of one that has left."""
        return self.processes.get(index) or f"process {index}"

    def groups(self, by: str, counted: dict[Any, tuple[int, int]]) -> dict[str, dict[str, int]]:
        """{name: {"blocks", "bytes"}} of what Ctl.count() found for `by`; two processes may have one name."""
        out: dict[str, dict[str, int]] = {}
        for key, (blocks, nbytes) in counted.items():
            group = out.setdefault(self._name(by, key), {"blocks": 0, "bytes": 0})
            group["blocks"] += blocks
            group["bytes"] += nbytes
        return out

    def _name(self, by: str, key: Any) -> str:
        if by == "holder":
            return ORPHANS if key is None else self.process(key)
        if by == "age":
            return AGES[key]
        return "" if key is None else str(key)


def label(by: str, name: str) -> str:
    """What a group is called where people read it: one without a name says what is in it."""
    return plain(name) or UNNAMED[by]


def id_of(address: str) -> str:
    """The 32 digits that an address ends with, however it is backed."""
    return address[-32:]


def keepers(row: dict[str, Any]) -> list[str]:
    """Who keeps a block of Arena.ls() in the arena: its owner and readers; its readers alone once it is done with."""
    owner = [] if row["state"] == "retired" else [row["owner"] or ORPHAN]
    return [*owner, *row["held_by"]]


def plain(text: str) -> str:
    """What some process called itself or its block, on one line and harmless to a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def age_group(age_s: float) -> str:
    """Of AGES, the group that a block of this age is counted in."""
    return AGES[bisect.bisect_right(_AGES_END_S, age_s)]


def names(attached: dict[int, Process]) -> Names:
    """Of an arena's processes, now."""
    words = {index: f"{process.name} ({process.pid})" for index, process in attached.items()}
    return Names(words, time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def processes(raw: bytes) -> dict[int, Process]:
    """The used entries of a process table by index."""
    out = {}
    for index in range(len(raw) // _PROCESS.size):
        used, ticket, _, pid, since, queued, name = _PROCESS.unpack_from(raw, _PROCESS.size * index)
        if used:
            text = name.split(b"\0", 1)[0].decode(errors="replace")
            out[index] = Process(index, pid, text, since, queued if ticket else 0)
    return out
