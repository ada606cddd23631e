"""`Arena`: files, growth and statistics, around the hot half in the binding (`_arena.Core`).

The launcher, or the node server of a node, creates; everybody attaches. Each process of a run has one, for life.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shmrl.arena import columns as tails
from shmrl.arena import files as names
from shmrl.arena import memory, messages, opening, placement, spill, table
from shmrl.arena import shares as words
from shmrl.arena._arena import Block, Core, View
from shmrl.arena._ctl import Ctl
from shmrl.arena.files import Files
from shmrl.arena.placement import Pages
from shmrl.arena.waiting import Waiting
from shmrl.errors import ArenaError, StaleHandle
from shmrl.types import Handle
from shmrl.units import PAGE, parse_shares

log = logging.getLogger(__name__)

STEP = 64 << 20
REFUSAL_HOLDS_S = 1.0  # after a refused step the limits are read again this much later


class Arena(Core):
    """A process's attachment to an arena. `with arena:` closes it; a forked child must attach anew."""

    def __init__(self, where: Files, fds: tuple[int, int, int, int], *, reader: int | None) -> None:
        """For create() and attach(): owns the descriptors of live, ctl, data and spill directory (-1: none)."""
        self._files, self._data_fd = where, fds[2]
        self._opening = threading.Lock()
        self._in_queue = False  # one of our threads has our place in the queue for space
        self._refused: tuple[float, memory.Limit] | None = None
        self._room = (0.0, 0)  # until when, what growth may still take
        self._ahead: threading.Thread | None = None
        self._made_by: int | None = None  # the process that created it
        self._attach(*fds, os.fstat(fds[1]).st_size, os.fstat(fds[2]).st_size, opening.process_name(), reader)

    # ------------------------------------------------------------------------------------------- create, attach, unlink

    @classmethod
    def create(
        cls,
        capacity: int | str,
        run_id: str | None = None,
        backing: str = "shm",
        base: str | None = None,
        max_processes: int = 256,
        orphan_ttl_s: float | None = None,
        spill_dir: str | None = None,
        preallocate: bool = False,
        huge_pages: str = "auto",
        numa: str = "none",
        shares: Mapping[str, float | int | str] | None = None,
    ) -> Arena:
        """A new arena of `capacity` bytes (rounded up to 64 KiB), attached; removes dead arenas of this uid first.

        backing: "shm", "memfd", or "file" in the directory `base`. orphan_ttl_s: blocks whose owner died are freed this
        long after it was noticed (None: never). huge_pages: "auto" (where mount or shmem_enabled give them), "always"
        (or ArenaError), "never". numa: "none", "interleave", "bind:<nodes>" (ArenaError where mbind is forbidden).
        spill_dir: an existing directory for what does not fit, with on_full="spill".
        shares: what sources (second part of a tag) can count on, {"math": 0.5, "code": "2GiB"}, as fractions of the
        capacity or bytes, at most 15; all other sources have the rest together. Beyond its share a source borrows what
        is idle, but for a reserve of at most an eighth, and waits behind those within theirs; what is lent comes back
        when it is freed.
        ArenaFull when mount, memory, a cgroup or an rlimit has less now; ValueError.
        """
        nbytes = opening.capacity_nbytes(capacity, max_processes)
        ttl_ns = opening.ttl_ns(orphan_ttl_s)
        guaranteed = parse_shares(shares or {}, nbytes)
        for dead in names.listed(base):
            names.remove_if_dead(dead)
        mount = names.new(backing, base).mount
        opening.require(mount, nbytes)
        pages = Pages.chosen(huge_pages, numa, mount)
        wanted = opening.Wanted(nbytes, run_id, max_processes, ttl_ns, pages, spill_dir, guaranteed)
        arena = opening.made(cls, *names.claimed(backing, base), wanted)
        arena._made_by = os.getpid()
        if preallocate:
            arena._preallocate()
        return arena

    @classmethod
    def attach(cls, address: str, reader: int | None = None) -> Arena:
        """Attaches this process; recovers what dead ones left. reader: stable index (the rank) for done(), 0 to 255;
        None: this process's slot, which is another one after a restart.

        Errors: ForeignArena (no such arena here, another uid or boot), TooManyProcesses, ArenaCorrupt, ValueError.
        """
        if reader is not None and not 0 <= operator.index(reader) <= 255:
            raise ValueError(f"reader={reader}: 0 to 255")
        where = names.parse(address)
        arena = opening.attached(cls, where, reader)
        arena.sweep()
        return arena

    @property
    def address(self) -> str:
        """What attach() takes: "shm:<id>", "memfd:<id>" or "file:<path>"."""
        return self._files.address

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes. An exception that ends the creator's `with` takes the names, too: nobody else might know of them."""
        if kind is not None and self._made_by == os.getpid():
            self.unlink()
        self.close()

    def unlink(self) -> None:
        """Removes the names: nobody can attach any more, the attached go on. Idempotent.

        The spill directory goes too: views of spilled blocks stay valid, new ones cannot be had.
        """
        self._files.unlink()

    def close(self) -> None:
        """Detaches this process: its unsealed blocks are freed, its sealed ones become orphans. Idempotent.

        With live views the memory stays mapped, and held, until the last of them is gone.
        """
        if self._ahead is not None and self._ahead is not threading.current_thread():
            self._ahead.join()
        super().close()

    # --------------------------------------------------------------------------------------------------------- columns

    def columns(self, handle: Handle) -> tuple[tails.Column, ...]:
        """The block's columns table, by offset; () if it was sealed without. StaleHandle, NotSealed, ChecksumError."""
        with self.get(handle) as view:
            return tails.of(view).columns

    def _make_tail(
        self,
        block: Block,
        columns: Iterable[tuple[str, int, int, int]],
        checksum: bool,
        taken: Mapping[str, bytes] | None,
    ) -> bytes:
        with memoryview(block) as payload:
            return tails.make(payload, columns, checksum, taken)

    def _narrow(self, view: View, verify: bool, field: str | None, rows: tuple[int, int] | None) -> None:
        tails.narrow(view, verify, field, rows)

    # ---------------------------------------------------------------------------------------------------------- growth

    def _open_for_writing(self) -> None:
        """At the first write: a description of its own that may write, through /proc: the names may be gone.

        Several threads may come to their first write at once; the descriptor is replaced by one of them.
        """
        with self._opening:
            if self._data_fd < 0:
                return
            fd = os.open(f"/proc/self/fd/{self._data_fd}", os.O_RDWR | os.O_CLOEXEC)
            self._make_writable(fd)
            self._data_fd = -1

    def _grow_table(self) -> bool:
        head = self._header()
        first = head["table_committed"]
        end = min(first + head["table_step"], head["max_blocks"])
        if first == end or not self._allowed((end - first) * 256):
            return False
        return self._commit_table(first, end) == 0

    def _grow_data(self, nbytes: int) -> bool:
        """Commits at least one step, and what a request of `nbytes` needs, if the limits allow -> whether it did."""
        head = self._header()
        first = head["committed_pages"]
        end = min(first + max(STEP, nbytes + PAGE) // PAGE, head["max_pages"])
        if first == end or not self._allowed((end - first) * PAGE):
            return False
        code = self._commit_data(first, end)
        if code:
            log.warning("arena %s stays at %s: %s", self.address, memory.human(first * PAGE), os.strerror(code))
            return False
        if head["huge"] and not placement.make_huge(self._data_at()[0] + first * PAGE, (end - first) * PAGE):
            log.info(
                "arena %s: not all of its last %s are huge pages", self.address, memory.human((end - first) * PAGE)
            )
        return True

    def _allowed(self, nbytes: int) -> bool:
        if self._refused is not None and time.monotonic() < self._refused[0]:
            return False
        limit = memory.refusing(self._files.mount, nbytes, headroom=True)
        if limit is not None and self._refused is None:
            log.warning(
                "arena %s does not grow: %s, of which %s is left alone",
                self.address,
                limit,
                memory.human(limit.headroom),
            )
        self._refused = None if limit is None else (time.monotonic() + REFUSAL_HOLDS_S, limit)
        return limit is None

    def _look_ahead(self) -> None:
        """After a reserve that left less than a step of committed space: the next one comes in the background."""
        if self._ahead is not None and self._ahead.is_alive():
            return
        if self._refused is None or time.monotonic() >= self._refused[0]:
            self._ahead = threading.Thread(target=self._grow_quietly, name="shmrl-arena-commit", daemon=True)
            self._ahead.start()

    def _grow_quietly(self) -> None:
        with contextlib.suppress(Exception):  # closed meanwhile; whoever needs the space meets the error itself
            self._grow_data(0)

    def _preallocate(self) -> None:
        head = self._header()
        while head["committed_pages"] < head["max_pages"]:
            if not self._grow_data(0):
                full = messages.full(self, head["capacity"] - head["committed_pages"] * PAGE, 0.0)
                self.close()
                self.unlink()
                raise full
            head = self._header()

    # ------------------------------------------------------------------------------------ what the binding asks for

    def _waiting(self, nbytes: int, total: int, tag: str, on_full: str, timeout_s: float, most: int) -> Waiting:
        return Waiting(self, nbytes, total, tag, on_full, timeout_s, most)

    def _spill_failed(self, nbytes: int, code: int, waited_s: float) -> ArenaError:
        return messages.spill_failed(self, nbytes, code, waited_s)

    def _is_stopped(self, pid: int) -> bool:
        return self._files.is_stopped(pid)

    # ------------------------------------------------------------------------------------------------------- inspection

    def placement(self) -> dict[str, Any]:
        """Where the data's pages are, as far as this process has touched them: huge_bytes, node_bytes {node: bytes}."""
        address, nbytes = self._data_at()
        name = self._files.name("data").lstrip("/")
        return {
            "huge_bytes": placement.huge_bytes(address, nbytes),
            "node_bytes": placement.bytes_by_node(name),
        }

    def pressure(self) -> dict[str, Any]:
        """How full it is, for whoever decides what starts next; microseconds, no lock. Bytes:

        used_bytes: what blocks take. capacity_bytes: what they ever can: what is committed and, as far as mount, memory
        and cgroups allowed within the last second, the rest; less what is kept for sources within their shares, so that
        any source can have it. waiting: how many other processes wait for space. oldest_wait_s: since the first of them
        began, 0.0 if none does.
        """
        used = self._header()["used_bytes"]  # the allocator's own count: no walk over a million blocks
        waiting, oldest_s = self._others_wait()
        capacity = max(0, self._reachable() - self._kept())
        return {"used_bytes": used, "capacity_bytes": capacity, "waiting": waiting, "oldest_wait_s": oldest_s}

    def _reachable(self) -> int:
        """The capacity, or less where the limits do not let the arena grow to it."""
        head, now = self._header(), time.monotonic()
        capacity, committed = head["capacity"], head["committed_pages"] * PAGE
        if committed < capacity and now >= self._room[0]:
            self._room = now + REFUSAL_HOLDS_S, memory.growable(self._files.mount)
        return min(capacity, committed + self._room[1])

    def stats(self, by: str | None = None, exact: bool = False) -> dict[str, Any]:
        """Counters of the whole arena; `by` adds {"by": {key: {"blocks", "bytes"}}} whose bytes sum to used_bytes.

        by: "source" | "step" | "field" | "holder" | "age". exact=True reads under the allocator's lock. used_bytes are
        what blocks take from the arena (payload, tail and rounding); created == freed + blocks. In an arena with shares
        rows by source have "share" and "borrowed" too, in bytes; those of unnamed sources all show the one they have.
        """
        if by not in (None, *table.BY):
            raise ValueError(f"by={by!r}: {', '.join(table.BY)}")
        self._drain()
        with self._look(fields=by == "field") as look:
            wanted = () if by is None else (by,)
            counters, groups = self._locked_call(lambda: look.count(*wanted)) if exact else look.count(*wanted)
            if by is None:
                return dict(counters)
            rows = self._names(look).groups(by, groups[by])
            return {**counters, "by": words.annotated(rows, look.shares()) if by == "source" else rows}

    def fsck(self) -> list[str]:
        """Checks every invariant under the allocator's lock, then the spilled blocks' files -> a line per fault."""
        with self._look() as look:
            faults = self._locked_call(look.fsck)
            if path := self._spill_dir():
                faults += spill.faults(Path(path), lambda: look.rows(self._names(look)))
            return faults

    def ls(self) -> list[dict[str, Any]]:
        """Every block that is not free: handle, state, flags, owner, held_by, nbytes, span_bytes, tag, age_s..."""
        with self._look() as look:
            return list(look.rows(self._names(look)))

    def holders(self, handle: Handle) -> dict[str, Any]:
        """Who has this block: the row of ls() for it. StaleHandle if it is gone, ForeignArena, TypeError."""
        handle = self._mine(handle)
        with self._look() as look:
            for row in look.rows(self._names(look), (handle.slot,)):
                if row["handle"] == str(handle):
                    return row
        raise StaleHandle(f"{handle!r} is not in {self.address}")

    def _look(self, fields: bool = False) -> Ctl:
        """An inspector of this arena, over the mappings it has. ArenaClosed."""
        return Ctl(self._window(False), self._window(True) if fields else None)

    def _names(self, look: Ctl) -> table.Names:
        return table.names(table.processes(look.processes()))


def unlink(address: str) -> None:
    """Removes an arena's names, whoever is attached."""
    names.parse(address).unlink()
