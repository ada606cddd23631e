"""Looking at arenas from outside: which there are, what is in them, and removing the dead. Needs no process slot.

Called by `commands` (the CLI) and `doctor`, in a process that is attached to nothing; stops nobody.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shmrl.arena import files as names
from shmrl.arena import table
from shmrl.arena._arena import read_ctl
from shmrl.errors import ArenaCorrupt, ForeignArena


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An arena as it was at one moment, live or dead.

    head: run_id, node, boot, created_ns, max_processes. stats: the counters of Arena.stats(). alive: indices of the
    processes whose lock byte is held; the others in `processes` are dead and not yet swept.
    """

    address: str
    head: dict[str, Any]
    stats: dict[str, int]
    blocks: list[table.BlockInfo]
    processes: dict[int, table.Process]
    alive: frozenset[int]

    def grouped(self, by: str) -> dict[str, dict[str, int]]:
        """Blocks and bytes by source, step or holder."""
        return table.grouped(self.blocks, by, table.names(self.processes))

    def rows(self) -> list[dict[str, Any]]:
        """Every block, as Arena.ls() without handles (who only looks may not read)."""
        now, who = time.clock_gettime_ns(time.CLOCK_BOOTTIME), table.names(self.processes)
        return [row.row(now, who) for row in self.blocks]


def open_readonly(address: str) -> Snapshot:
    """A snapshot of an arena. ForeignArena (not here, or another uid's), ArenaCorrupt, ValueError."""
    where = names.parse(address)
    try:
        live = where.open("live", write=True)  # probing a lock needs a description that could take it
    except (FileNotFoundError, PermissionError) as error:
        raise ForeignArena(f"{address} is not on this host for uid {os.geteuid()}: {error}") from error
    try:
        head, stats, blocks, processes = _read(where)
        used = table.processes(processes)
        alive = frozenset(index for index in used if names.byte_taken(live, index))
    finally:
        os.close(live)
    return Snapshot(address, head, stats, list(table.blocks(blocks)), used, alive)


def _read(where: names.Files) -> tuple[dict[str, Any], dict[str, int], bytes, bytes]:
    try:
        ctl = where.open("ctl", write=False)
    except FileNotFoundError:
        raise ArenaCorrupt(f"{where.address} has no ctl: its creator died, or is not done") from None
    try:
        if os.fstat(ctl).st_size == 0:
            raise ArenaCorrupt(f"{where.address} has an empty ctl: its creator died, or is not done")
        with mmap.mmap(ctl, 0, prot=mmap.PROT_READ) as mapped:
            return read_ctl(mapped)
    finally:
        os.close(ctl)


def list_arenas() -> list[dict[str, Any]]:
    """Every named arena of this uid in /dev/shm: address, state (alive, dead, unfinished), run_id, counters..."""
    out: list[dict[str, Any]] = []
    for where in names.listed():
        try:
            seen = open_readonly(where.address)
        except ForeignArena:  # unlinked meanwhile
            continue
        except ArenaCorrupt as error:
            out.append({"address": where.address, "state": "unfinished", "error": str(error)})
            continue
        state = "alive" if seen.alive else "dead"
        out.append(
            {
                "address": where.address,
                "state": state,
                "run_id": seen.head["run_id"],
                "processes": len(seen.alive),
                **seen.stats,
            }
        )
    return out


def gc() -> list[str]:
    """Removes every arena of this uid that nobody is attached to -> their addresses."""
    removed = []
    for where in names.listed():
        with suppress(FileNotFoundError):
            if names.remove_if_dead(where):
                removed.append(where.address)
    return removed
