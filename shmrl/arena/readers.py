"""Which readers of a shipped block are missing, and which processes those are.

Called by the inspectors and for the messages of a full arena, over a mapped ctl. The process table has no reader
indices: a process is known by its title (a rank's ends with its number), else by a done() that it called, if the ring
of events has it. A reader without either is a bare number.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Container
from typing import TYPE_CHECKING, Any, NamedTuple

from shmrl.arena import table

if TYPE_CHECKING:
    from shmrl.arena._ctl import Ctl

MOST = 256  # bits of a done set, whatever a damaged arena or a title says
DONE = 5  # csrc/arena_layout.h: SRL_DID_DONE
TICK_NS = 20_000_000  # events have a coarse clock
_RANK = re.compile(r"trainer:(\d+)")  # of a run: its orchestrator ships to the ranks and, behind them, to itself
_NAMED = re.compile(r"(?:trainer:|rank[ :_-]?)(\d+)$")


def ranks_of(processes: dict[int, table.Process]) -> int:
    """How many ranks of a run are known by their titles."""
    found = [match for one in processes.values() if (match := _RANK.fullmatch(one.name))]
    return max((1 + rank for match in found if (rank := int(match[1])) < MOST), default=0)


class Missing(NamedTuple):
    """`left` readers are to come, and all of them are among `readers`: (index, "name (pid)" or None).

    Example: Missing(1, ((1, "trainer:1 (812)"),))
    """

    left: int
    readers: tuple[tuple[int, str | None], ...]


class Readers:
    """The readers of one arena, as far as they are known now."""

    def __init__(self, ctl: Ctl, processes: dict[int, table.Process]) -> None:
        self.ranks = ranks_of(processes)
        self._names = table.names(processes).processes
        self._known = _who_was_done(ctl, processes) | _by_title(processes)

    def missing(self, row: dict[str, Any]) -> Missing:
        """Of a row of Arena.ls(). Where no ranks of a run are known, readers are taken to count from 0."""
        left = row["readers"] - len(row["done"])
        among = range(self.ranks + 1 if self.ranks else row["readers"])
        if left <= 0:
            return Missing(0, ())
        if row["readers"] > min(len(among), MOST) or not set(row["done"]) <= set(among):
            return Missing(left, ())
        return Missing(left, tuple((i, self._name(i, row)) for i in among if i not in row["done"]))

    def _name(self, index: int, row: dict[str, Any]) -> str | None:
        if (known := self._known.get(index)) is not None:
            return self._names[known]
        return row["owner"] if index == self.ranks > 0 else None


def _by_title(processes: dict[int, table.Process]) -> dict[int, int]:
    """Process by reader; without those whose number two have."""
    found = defaultdict(list)
    for index, process in processes.items():
        if match := _NAMED.search(process.name):
            found[int(match[1])].append(index)
    return {reader: those[0] for reader, those in found.items() if len(those) == 1}


def _who_was_done(ctl: Ctl, processes: dict[int, table.Process]) -> dict[int, int]:
    """Process by reader. A process that came into another one's place has not done what that did."""
    ahead = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return {
        detail: process
        for _, kind, process, at_ns, _, _, detail in ctl.events(0)
        if kind == DONE and process in processes and at_ns + ahead + TICK_NS >= processes[process].since_ns
    }


def told(missing: dict[str, Any], alive: Container[str] | None = None) -> str:
    """Of Look.missing(). Example: "reader 1 = trainer:1 (812)"; "1 of these: reader 0 = trainer:0 (811), reader 1".

    alive: names of the living, if the dead are to be told.
    """
    if not missing["readers"]:
        return f"{missing['count']}, it is not known which"
    those = [(one["reader"], one["process"]) for one in missing["readers"]]
    named = ", ".join(
        name(index, process) + (", DEAD" if process and alive is not None and process not in alive else "")
        for index, process in those
    )
    return named if missing["count"] == len(those) else f"{missing['count']} of these: {named}"


def name(index: int, process: str | None) -> str:
    """Example: "reader 1 = trainer:1 (812)" """
    return f"reader {index}" + (f" = {table.plain(process)}" if process else "")


def awaited(ctl: Ctl, processes: dict[int, table.Process], most: int = 10_000) -> list[tuple[str, int]]:
    """(reader as `name` has it, bytes that wait for it), most bytes first, of at most so many shipped blocks."""
    readers = Readers(ctl, processes)
    waiting: defaultdict[str, int] = defaultdict(int)
    _, slots = ctl.select(flags=1 << table.FLAGS.index("shipped"), states=1 << table.STATES.index("ready"))
    for row in ctl.rows(table.names(processes), slots[:most]):
        missing = readers.missing(row)
        for reader in missing.readers if missing.left == len(missing.readers) else ():
            waiting[name(*reader)] += row["span_bytes"]
    return sorted(waiting.items(), key=lambda item: -item[1])
