"""Looking at arenas from outside: which there are, what is in them, and removing the dead. Needs no process slot.

Called by `commands` (the CLI) and `doctor`, in a process that is attached to nothing. It maps ctl read-only and takes
no lock, so it stops nobody: what it says of a block is true of one moment, and so is a sum with the counters beside it.
"""

from __future__ import annotations

import heapq
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shmrl.arena import files, shares, spill, table, waiters
from shmrl.arena._ctl import Ctl, spill_dir_of
from shmrl.arena.readers import Missing, Readers, ranks_of
from shmrl.errors import ArenaCorrupt, ConfigError, ForeignArena, StaleHandle
from shmrl.types import Handle

LOOKS = 3  # a fault of a live arena is one that as many looks in a row see
TRIES = 10  # looks at a live arena until nobody had the allocator's lock meanwhile
OLD_STEPS = 3  # a block that was shipped more steps ago than this should have been freed
EVENTS = (
    *("", "reserve", "seal", "adopt", "ship", "done", "retire", "free"),
    *("orphan", "sweep", "take over", "full", "spill", "discard", "expire"),
)
NO_BLOCK = ("sweep", "take over", "full")  # events whose slot is no block's
ID = re.compile(r"[0-9a-f]{8,32}")  # as a terminal that is narrow shows it
ORDERS = ("size", "age", "tag")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which blocks: all that are given must hold. state: a state or a flag. holder: part of "name (pid)", or a pid.

    Example: Filter(source="math", state="orphan")
    """

    source: str | None = None
    step: int | None = None
    holder: str | None = None
    state: str | None = None

    def arguments(self, processes: dict[int, table.Process]) -> dict[str, Any]:
        """As Ctl.select() takes it. ConfigError for a state that does not exist."""
        states, flags = 14, 0
        if self.state in table.STATES[1:4]:
            states = 1 << table.STATES.index(self.state)
        elif self.state in table.FLAGS:
            flags = 1 << table.FLAGS.index(self.state)
        elif self.state is not None:
            raise ConfigError(f"state {self.state!r}: {', '.join((*table.STATES[1:4], *table.FLAGS))}")
        return {
            "states": states,
            "flags": flags,
            "source": None if self.source is None else self.source.encode(),
            "step": self.step,
            "processes": None if self.holder is None else self._holders(self.holder, processes),
        }

    @staticmethod
    def _holders(wanted: str, processes: dict[int, table.Process]) -> int:
        found = (p.index for p in processes.values() if wanted == str(p.pid) or wanted in f"{p.name} ({p.pid})")
        return sum(1 << index for index in found)


class _Unfinished(ArenaCorrupt):
    """There is no arena yet: the magic of its ctl comes last."""


class Suspects(NamedTuple):
    """blocks, nbytes: what may leak, in all; rows of the oldest, with "why". kept, kept_bytes: of old steps, held on
    purpose (arena.retain_steps)."""

    blocks: int
    nbytes: int
    rows: list[dict[str, Any]]
    kept: int
    kept_bytes: int


class Look:
    """One arena, live or dead, while `look()` has it open.

    head: run_id, node, boot, created_ns, max_processes. processes: the used entries by index; alive: those of
    them whose lock byte is held; dead: the others, which nobody swept yet.
    """

    def __init__(self, address: str, live: int, ctl_fd: int, ctl: Ctl) -> None:
        self.address, self.ctl = address, ctl
        self._live, self._ctl_fd = live, ctl_fd
        self.head = ctl.head()
        self.processes = table.processes(ctl.processes())
        self.alive = frozenset(index for index in self.processes if files.byte_taken(live, index))
        self.dead = [index for index in self.processes if index not in self.alive]

    @property
    def names(self) -> table.Names:
        """For rows and groups, with the ages of now."""
        return table.names(self.processes)

    @property
    def gone(self) -> set[str]:
        """Names of the dead."""
        names = self.names
        return {names.process(index) for index in self.dead}

    def counts(self, *by: str) -> tuple[dict[str, int], dict[str, dict[str, dict[str, int]]]]:
        """(counters of Arena.stats(), {by: {name: {"blocks", "bytes"}}}); each table's bytes sum to used_bytes."""
        counters, groups = self.ctl.count(*by)
        names = self.names
        rows = {key: names.groups(key, groups[key]) for key in by}
        if "source" in rows:
            rows["source"] = shares.annotated(rows["source"], self.ctl.shares())
        return counters, rows

    @property
    def age_s(self) -> float | None:
        """Of the arena; None if it is of an earlier boot."""
        if self.head["boot"] != files.node_of(files.parse(self.address).directory)[1]:
            return None
        created_ns: int = self.head["created_ns"]
        return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - created_ns) / 1e9

    @property
    def directory(self) -> str | None:
        """Of the run, or where the longest attached process runs; None if nobody is seen from here."""
        where = files.parse(self.address)
        living = sorted((self.processes[index] for index in self.alive), key=lambda process: process.since_ns)
        return next((found for one in living if (found := where.directory_of(one.pid))), None)

    def unswept(self) -> dict[str, int]:
        """What dead processes hold that nobody swept yet, and that is no orphan so far: unswept, unswept_bytes."""
        held = self.ctl.count("holder")[1]["holder"] if self.dead else {}
        found = [held[index] for index in self.dead if index in held]
        return {"unswept": sum(blocks for blocks, _ in found), "unswept_bytes": sum(nbytes for _, nbytes in found)}

    def waiting(self) -> list[waiters.Waiter]:
        """Who waits for space, the first of them first."""
        return waiters.waiting(self.ctl, {index: self.processes[index] for index in self.alive}, self.names)

    def keeper(self) -> waiters.Keeper | None:
        """Who keeps most of the arena."""
        return waiters.keeper(self.ctl, self.names)

    def rows(self, wanted: Filter, order: str | None = None, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Blocks as Arena.ls() has them, one at a time: largest, oldest or by tag first, else in slot order.

        A block that is freed before its turn comes is left out. Of state "orphan" is also what is not swept yet.
        """
        arguments = wanted.arguments(self.processes)
        if wanted.state != "orphan" or not self.dead:
            keys, slots = self.ctl.select(order, **arguments)
        else:
            left = self._left_by_the_dead()
            keys, slots = self.ctl.select(order, **{**arguments, "flags": 0})
            here = [n for n, slot in enumerate(slots) if slot in left]
            keys, slots = [keys[n] for n in here] if keys else [], [slots[n] for n in here]
        return self.ctl.rows(self.names, _ordered(keys, slots, limit, largest=order == "size"))

    def _left_by_the_dead(self) -> set[int]:
        """Slots of the orphans, and of what unswept() counts."""
        _, slots = self.ctl.suspects(0, sum(1 << index for index in self.dead))
        rows, gone = self.ctl.rows(self.names, slots), self.gone
        return {row["slot"] for row in rows if row["owner"] is None or gone.intersection(table.keepers(row)[:1])}

    def suspects(self, newest: int | None, limit: int, retained: int = 0) -> Suspects:
        """What may leak: shipped over OLD_STEPS steps ago, an orphan, or with a dead owner or reader that nobody swept
        yet. newest: the step that trains now; retained: how many steps the run is known to keep after their use."""
        before = 0 if newest is None else newest - OLD_STEPS - retained
        births, slots = self.ctl.suspects(before, sum(1 << index for index in self.dead))
        names, gone = self.names, self.gone
        ranks = ranks_of(self.processes)
        found, nbytes, kept, kept_bytes = [], 0, 0, 0
        for row in self.ctl.rows(names, _ordered(births, slots, None, largest=False)):
            if _is_kept(row, ranks) and row["owner"] not in gone and not gone.intersection(row["held_by"]):
                kept, kept_bytes = kept + 1, kept_bytes + (row["span_bytes"] or row["nbytes"])
            else:
                found.append(row)
                nbytes += row["span_bytes"] or row["nbytes"]
        rows = [{**row, "why": _why(row, gone, newest, before)} for row in found[:limit]]
        return Suspects(len(found), nbytes, rows, kept, kept_bytes)

    def missing(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of each block what readers it waits for: {"count", "readers": [{"reader", "process"}]}, those of whom they
        are."""
        readers = Readers(self.ctl, self.processes) if any(row["readers"] for row in rows) else None
        found = [readers.missing(row) if readers else Missing(0, ()) for row in rows]
        return [{"count": left, "readers": [{"reader": i, "process": p} for i, p in those]} for left, those in found]

    def is_stopped(self, index: int) -> bool:
        """Whether a process lives and runs no instruction (SIGSTOP); False where it is not to be seen from here."""
        return index in self.alive and files.parse(self.address).is_stopped(self.processes[index].pid)

    def is_live(self) -> bool:
        """Whether any process is attached now."""
        return files.byte_taken(self._live, 0, 256)

    # ---------------------------------------------------------------------------------------------------------- fsck

    def fsck(self) -> tuple[list[str], bool]:
        """Checks every invariant -> (faults, whether the allocator's totals were checked too).

        They are not when somebody had the allocator's lock during every look. In a live arena a block may be on its
        way (retired a moment ago): only what LOOKS in a row show is a fault.
        """
        faults, whole = self._check()
        for _ in range(LOOKS - 1 if faults and self.is_live() else 0):
            time.sleep(0.002)
            again, too = self._check()
            faults, whole = [fault for fault in faults if fault in again], whole or too
        if path := spill_dir_of(os.pread(self._ctl_fd, 4096, 0)):
            faults = faults + spill.faults(Path(path), lambda: self.ctl.rows(self.names))
        return faults, whole

    def _check(self) -> tuple[list[str], bool]:
        for left in reversed(range(TRIES)):
            before, owner = self.ctl.lock_word(), self.ctl.lock_owner()
            if owner is not None and not files.byte_taken(self._live, owner):
                return self._check_rebuilt()
            faults = self.ctl.fsck()
            whole = owner is None and self.ctl.lock_word() == before
            if whole or not left:
                return [fault for fault in faults if whole or fault.startswith("block ")], whole
        raise AssertionError("unreachable")

    def _check_rebuilt(self) -> tuple[list[str], bool]:
        """As a takeover from the lock's dead owner would leave it: its maps may be half-way, the table is the truth."""
        with mmap.mmap(self._ctl_fd, 0, mmap.MAP_PRIVATE) as private, Ctl(private) as ctl:
            if not ctl.rebuild():
                return ["the allocator's lock has a dead owner, and its maps cannot be made anew"], True
            return ctl.fsck(), True

    # -------------------------------------------------------------------------------------------------------- events

    def events(self, first: int = 0, most: int = 4096) -> list[dict[str, Any]]:
        """What happened last, oldest first: number, event, process, age_s, slot, generation, detail, tag (while known).

        At most 4,096 are kept. first: number of the first one wanted; most: of how many, the newest. detail: bytes; of
        ship the readers, of done the reader, of adopt the owner before; slot of sweep and take over: the dead process.
        Those two and full are about no block and have no tag.
        """
        found, names = self.ctl.events(first)[-most:], self.names
        here = self.ctl.rows(names, {slot for *_, slot, _, _ in found})
        tags = {(row["slot"], row["generation"]): row["tag"] for row in here}
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        kinds = [EVENTS[kind] if kind < len(EVENTS) else str(kind) for _, kind, *_ in found]
        return [
            {
                "number": number,
                "event": event,
                "process": names.process(process),
                "age_s": round(max(0, now - at_ns) / 1e9, 3),
                "slot": slot,
                "generation": generation,
                "detail": detail,
                "tag": "" if event in NO_BLOCK else tags.get((slot, generation), ""),
            }
            for event, (number, _, process, at_ns, slot, generation, detail) in zip(kinds, found, strict=True)
        ]


def _is_kept(row: dict[str, Any], ranks: int) -> bool:
    """Whether every rank is done with a block, and who shipped it, whose number is behind theirs, is not: the run keeps
    its step for a trainer that has to read it again. ranks: how many are known by their names."""
    return (
        row["owner"] is not None
        and row["readers"] == len(row["done"]) + 1
        and 0 <= max(row["done"], default=-1) < ranks
    )


def _why(row: dict[str, Any], dead: set[str], newest: int | None, before: int) -> list[str]:
    reasons = []
    if row["owner"] is None:
        reasons.append("its owner died")
    if row["owner"] in dead:
        reasons.append("its owner is dead, not swept yet")
    if dead.intersection(row["held_by"]):
        reasons.append("a reader is dead, not swept yet")
    if row["state"] == "retired":
        reasons.append("done with, but a view keeps it")
    if newest is not None and row["step"] is not None and row["step"] < before:
        reasons.append(f"shipped {newest - row['step']} steps ago")
    return reasons


def _ordered(keys: list[Any], slots: list[int], limit: int | None, *, largest: bool) -> list[int]:
    if not keys:
        return slots[:limit]
    pairs = zip(keys, slots, strict=True)
    if limit is not None:
        return [slot for _, slot in (heapq.nlargest if largest else heapq.nsmallest)(limit, pairs)]
    return [slot for _, slot in sorted(pairs, reverse=largest)]


@contextmanager
def look(address: str, *, fields: bool = False) -> Iterator[Look]:
    """An arena, live or dead; `fields` maps its data too, to count by field.

    ForeignArena (not here, another uid's, another version's), ArenaCorrupt (no arena yet, or one that contradicts
    itself), ConfigError (no address).
    """
    where = _parsed(address)
    opened: list[int] = []
    try:
        live, ctl = _open(where, "live", opened), _open(where, "ctl", opened)
        data = _mapped(where, _open(where, "data", opened), "data") if fields else None
        with Ctl(_mapped(where, ctl, "ctl"), data) as mapped:
            yield Look(where.address, live, ctl, mapped)
    finally:
        for fd in opened:
            os.close(fd)


def check(address: str) -> None:
    """Raises what look() does, if it does."""
    with look(address):
        pass


def _parsed(address: str) -> files.Files:
    """The files of an address, or of the only arena whose id begins so. ConfigError."""
    try:
        return files.parse(address)
    except ValueError as error:
        found = _beginning(address) if ID.fullmatch(address) else []
        if len(found) == 1:
            return found[0]
        there = f": {', '.join(one.address for one in found)}" if found else ""
        why = (
            f"{len(found)} arenas here have an id that begins with {address}{there}" if ID.fullmatch(address) else error
        )
        raise ConfigError(str(why)) from None


def _beginning(digits: str) -> list[files.Files]:
    return [one for one in (*files.listed(), *files.listed_open()) if table.id_of(one.address).startswith(digits)]


def _open(where: files.Files, part: str, opened: list[int]) -> int:
    try:
        fd = where.open(part, write=part == "live")  # probing a lock needs a description that could take it
    except PermissionError as error:
        raise ForeignArena(f"{where.address} is not uid {os.geteuid()}'s to read: {error}; ask its owner") from error
    except FileNotFoundError as error:
        if not opened or where.is_unlinked(opened[0]):
            raise ForeignArena(f"{where.address} is not on this host, or was removed (shmrl arena ls)") from error
        raise _Unfinished(
            f"{where.address} has no {part}: its creator died, or is not done; if it stays so: shmrl arena gc"
        ) from None
    opened.append(fd)
    return fd


def _mapped(where: files.Files, fd: int, part: str) -> mmap.mmap:
    if not any(os.pread(fd, 8, 0)) if part == "ctl" else os.fstat(fd).st_size == 0:
        raise _Unfinished(
            f"{where.address} has an empty {part}: its creator died, or is not done; if it stays so: shmrl arena gc"
        )
    return mmap.mmap(fd, 0, prot=mmap.PROT_READ)


# ---------------------------------------------------------------------------------------------------------- which


def find(handle: Handle) -> str:
    """Address of the arena that a handle belongs to. ForeignArena."""
    number = bytes(handle)[6:10].hex()
    for where in [*files.listed(), *files.listed_open()]:
        if table.id_of(where.key).startswith(number):
            return where.address
    raise ForeignArena(
        f"no arena of uid {os.geteuid()} in {files.SHM} or open in a process begins with {number}; give its address"
    )


def holders(handle: Handle, address: str | None = None) -> dict[str, Any]:
    """Who has a block: its row of Arena.ls(), `alive` (which of those names live), its last events, and what readers it
    waits for: missing {"count", "readers": [{"reader", "process"}]}, those that are among `readers`.

    StaleHandle if it is gone; the message says what its slot holds now. ForeignArena.
    """
    with look(address or find(handle)) as seen:
        names = seen.names
        row = next(seen.ctl.rows(names, (handle.slot,)), None)
        if row is None or row["handle"] != str(handle):
            now = "is free" if row is None else f"holds generation {row['generation']}, tag {row['tag']!r}"
            raise StaleHandle(
                f"block {handle.slot} generation {handle.generation} of {seen.address} (run "
                f"{table.plain(seen.head['run_id'])}) is gone: its slot {now}"
            )
        told = [
            one
            for one in seen.events()
            if (one["slot"], one["generation"]) == (row["slot"], row["generation"]) and one["event"] not in NO_BLOCK
        ]
        return {
            "address": seen.address,
            "run_id": seen.head["run_id"],
            **row,
            "missing": seen.missing([row])[0],
            "alive": [names.process(index) for index in sorted(seen.alive)],
            "events": told[-20:],
        }


def where(given: str | None = None) -> list[files.Files]:
    """Arenas of this uid: in a directory, at an address, or without one those in /dev/shm and open in a process."""
    if given is None:
        return [*files.listed(), *files.listed_open()]
    return files.listed_in(given.removeprefix("file:")) if is_directory(given) else [_parsed(given)]


def is_directory(given: str) -> bool:
    """Whether it names a directory of arenas, and not one of them: with spill_dir=base the two have one path."""
    path = given.removeprefix("file:")
    return os.path.isdir(path) and not os.path.exists(f"{path}.live")


def list_arenas(given: str | None = None) -> list[dict[str, Any]]:
    """Each of `where(given)`: address, state (alive, dead, unfinished, corrupt, foreign), run_id, age_s, directory (of
    the run, if somebody is attached), processes, counters, unswept, unswept_bytes.

    "error" instead of what could not be read.
    """
    out: list[dict[str, Any]] = []
    for one in where(given):
        try:
            with look(one.address) as seen:
                out.append(
                    {
                        "address": one.address,
                        "state": "alive" if seen.is_live() else "dead",
                        "run_id": seen.head["run_id"],
                        "age_s": seen.age_s,
                        "directory": seen.directory,
                        "processes": len(seen.alive),
                        **seen.counts()[0],
                        **seen.unswept(),
                    }
                )
        except ForeignArena as error:  # another version's or uid's, or removed meanwhile
            if one in where(given):
                out.append({"address": one.address, "state": "foreign", "error": str(error)})
        except ArenaCorrupt as error:
            state = "unfinished" if isinstance(error, _Unfinished) else "corrupt"
            out.append({"address": one.address, "state": state, "error": str(error)})
    return out


def gc(given: str | None = None) -> list[str]:
    """Removes every arena of this uid that nobody is attached to, in /dev/shm or a directory -> their addresses.

    ForeignArena if the address of one was given and nothing is there.
    """
    removed = []
    for one in files.listed() if given is None else where(given):
        if given is not None and not one.exists():
            raise ForeignArena(f"{one.address} is not on this host, or was removed (shmrl arena ls)")
        with suppress(FileNotFoundError):
            if files.remove_if_dead(one):
                removed.append(one.address)
    return removed
