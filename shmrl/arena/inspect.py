"""Looking at arenas from outside: which there are, what is in them, and removing the dead. Needs no process slot.

Called by `commands` (the CLI) and `doctor`, in a process that is attached to nothing; stops nobody.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from shmrl.arena import files as names
from shmrl.arena import table
from shmrl.arena._ctl import Ctl
from shmrl.errors import ArenaCorrupt, ConfigError, ForeignArena, StaleHandle
from shmrl.types import Handle

LOOKS = 3  # a fault of a live arena is one that as many looks in a row see
TRIES = 20  # copies of a live ctl until one is of one moment
EVENTS = (
    "",
    "reserve",
    "seal",
    "adopt",
    "ship",
    "done",
    "retire",
    "free",
    "orphan",
    "sweep",
    "take over",
    "full",
    "spill",
)


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
    """A snapshot of an arena. ForeignArena (not here, or another uid's), ArenaCorrupt, ConfigError (no address)."""
    with _opened(address) as (live, ctl, _):
        head, stats, blocks, processes = ctl.read()
        used = table.processes(processes)
        alive = frozenset(index for index in used if names.byte_taken(live, index))
    return Snapshot(address, head, stats, list(table.blocks(blocks)), used, alive)


@contextmanager
def _opened(address: str) -> Iterator[tuple[int, Ctl, int]]:
    """(live descriptor, ctl mapped read-only, its bytes) of an arena; the errors of open_readonly."""
    try:
        where = names.parse(address)
        live = where.open("live", write=True)  # probing a lock needs a description that could take it
    except (FileNotFoundError, PermissionError) as error:
        raise ForeignArena(f"{address} is not on this host for uid {os.geteuid()}: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        with _mapped(where) as mapped, Ctl(mapped) as ctl:
            yield live, ctl, len(mapped)
    finally:
        os.close(live)


@contextmanager
def _mapped(where: names.Files) -> Iterator[mmap.mmap]:
    try:
        fd = where.open("ctl", write=False)
    except FileNotFoundError:
        raise ArenaCorrupt(f"{where.address} has no ctl: its creator died, or is not done") from None
    try:
        if os.fstat(fd).st_size == 0:
            raise ArenaCorrupt(f"{where.address} has an empty ctl: its creator died, or is not done")
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            yield mapped
    finally:
        os.close(fd)


def fsck(address: str) -> tuple[list[str], bool]:
    """Checks every invariant on copies -> (faults, whether the allocator's totals were checked too).

    They are not when somebody had the allocator's lock during every copy. In a live arena a block may be on its way
    (retired a moment ago): only what LOOKS copies in a row show is a fault.
    """
    with _opened(address) as (live, ctl, nbytes):
        looks: list[tuple[list[str], bool]] = []
        for _ in range(LOOKS if names.byte_taken(live, 0, 256) else 1):
            looks.append(_look(live, ctl, nbytes))
            time.sleep(0.002)
    faults = [fault for fault in looks[0][0] if all(fault in others for others, _ in looks)]
    return faults, any(whole for _, whole in looks)


def _look(live: int, ctl: Ctl, nbytes: int) -> tuple[list[str], bool]:
    for left in reversed(range(TRIES)):
        with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
            whole = ctl.copy(room)
            with Ctl(room) as copy:
                owner = copy.lock_owner()
                if owner is not None and not names.byte_taken(live, owner):
                    if not copy.rebuild():
                        return ["the allocator's lock has a dead owner, and its maps cannot be made anew"], True
                    whole = True
                if whole or not left:
                    return [fault for fault in copy.fsck() if whole or fault.startswith("block ")], whole
    raise AssertionError("unreachable")


def events(address: str, first: int = 0) -> list[dict[str, Any]]:
    """What happened last, oldest first: number, event, process, age_s, slot, generation, detail, tag (while known).

    At most 4,096 are kept. first: number of the first one wanted. detail: bytes; of ship the readers, of done the
    reader, of adopt the owner before; slot of sweep and take over: the dead process.
    """
    with _opened(address) as (_, ctl, _):
        _, _, blocks, processes = ctl.read()
        found = ctl.events(first)
    here = (table.block_at(blocks, slot) for slot in {slot for *_, slot, _, _ in found})
    tags = {(row.slot, row.generation): row.tag for row in here if row is not None}
    who, now = table.names(table.processes(processes)), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return [
        {
            "number": number,
            "event": EVENTS[kind] if kind < len(EVENTS) else str(kind),
            "process": who.get(process, f"process {process}"),
            "age_s": round(max(0, now - at_ns) / 1e9, 3),
            "slot": slot,
            "generation": generation,
            "detail": detail,
            "tag": tags.get((slot, generation), ""),
        }
        for number, kind, process, at_ns, slot, generation, detail in found
    ]


def find(handle: Handle) -> str:
    """Address of the named arena that a handle belongs to. ForeignArena."""
    number = bytes(handle)[6:10].hex()
    for where in names.listed():
        if where.key.startswith(number):
            return where.address
    raise ForeignArena(f"no arena of uid {os.geteuid()} in {names.SHM} begins with {number}; give its address")


def holders(handle: Handle, address: str | None = None) -> dict[str, Any]:
    """Who has a block: its row of Arena.ls(), `alive` (which of those names live), and its last events.

    StaleHandle if it is gone; the message says what its slot holds now. ForeignArena.
    """
    seen = open_readonly(address or find(handle))
    slot, generation = handle.slot, handle.generation
    here = next((row for row in seen.blocks if row.slot == slot), None)
    if here is None or here.generation != generation or here.nonce.to_bytes(8, "little") != handle.nonce:
        now = "is free" if here is None else f"holds generation {here.generation}, tag {here.tag!r}"
        raise StaleHandle(f"block {slot} generation {generation} of {seen.address} is gone: its slot {now}")
    who = table.names(seen.processes)
    row = here.row(time.clock_gettime_ns(time.CLOCK_BOOTTIME), who)
    told = [one for one in events(seen.address) if (one["slot"], one["generation"]) == (slot, generation)]
    alive = [who[index] for index in sorted(seen.alive)]
    return {"address": seen.address, **row, "alive": alive, "events": told[-20:]}


def list_arenas() -> list[dict[str, Any]]:
    """Every named arena of this uid in /dev/shm: address, state (alive, dead, unfinished, foreign), run_id..."""
    out: list[dict[str, Any]] = []
    for where in names.listed():
        try:
            seen = open_readonly(where.address)
        except ForeignArena as error:  # another version's, or unlinked meanwhile
            if (names.SHM / where.name("live")[1:]).exists():
                out.append({"address": where.address, "state": "foreign", "error": str(error)})
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
