"""Words for what `_ctl.Ctl` reads of a mapped ctl: states, flags, groups and processes by name.

Used by statistics, ls and holders of attached processes and by the inspectors of dead arenas alike.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

_PROCESS = struct.Struct("<QQQQQQ80s")
STATES = ("free", "writing", "ready", "retired", "freeing")
FLAGS = ("orphan", "shipped", "discarded", "spilled", "unchecked")
BY = ("source", "step", "holder", "age", "field")  # csrc/arena_core.h: enum srl_by
AGES = ("under 10 s", "under 1 min", "under 10 min", "under 1 h", "older")
ORPHANS = "orphans"
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
