"""`Arena`: files, growth, statistics and messages, around the hot half in the binding (`_arena.Core`).

The launcher, or the node server of a node, creates; everybody attaches. Each process of a run has one, for life.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import operator
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shmrl.arena import columns as tails
from shmrl.arena import files as names
from shmrl.arena import memory, placement, spill, table
from shmrl.arena import shares as words
from shmrl.arena._arena import Block, Core, View
from shmrl.arena._ctl import Ctl, ctl_nbytes, format_ctl, spill_dir_of
from shmrl.arena.files import Files
from shmrl.arena.placement import Pages
from shmrl.arena.waiting import Waiting
from shmrl.errors import ArenaCorrupt, ArenaError, ArenaFull, ForeignArena, StaleHandle
from shmrl.types import Handle
from shmrl.units import parse_bytes, parse_shares

log = logging.getLogger(__name__)

PAGE = 65536
FIRST_STEP = 256 << 20
STEP = 64 << 20
REFUSAL_HOLDS_S = 1.0  # after a refused step the limits are read again this much later
TABLE_STEP = 16384  # descriptors: 4 MiB
MAX_CAPACITY = 1 << 47
_TITLE = b"shmrl:"  # what setproctitle puts before a role's name


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
        self._attach(*fds, os.fstat(fds[1]).st_size, os.fstat(fds[2]).st_size, _process_name(), reader)

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
        asked = parse_bytes(capacity)
        nbytes = -(-asked // PAGE) * PAGE
        if not PAGE <= nbytes <= MAX_CAPACITY or not 1 <= max_processes <= 256:
            raise ValueError(f"capacity={asked} (1 to 2^47 bytes), max_processes={max_processes} (1 to 256)")
        ttl_ns = _ttl_ns(orphan_ttl_s)
        guaranteed = parse_shares(shares or {}, nbytes)
        for dead in names.listed(base):
            names.remove_if_dead(dead)
        mount = names.new(backing, base).mount
        _require(mount, nbytes)
        pages = Pages.chosen(huge_pages, numa, mount)
        where, live = names.claimed(backing, base)
        run_id = run_id or where.key[-32:-24]
        arena = _made(cls, where, live, nbytes, run_id, max_processes, ttl_ns, pages, spill_dir, guaranteed)
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
        arena = _attached(cls, where, reader)
        arena.sweep()
        return arena

    @property
    def address(self) -> str:
        """What attach() takes: "shm:<id>", "memfd:<id>" or "file:<path>"."""
        return self._files.address

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

    def _make_tail(self, block: Block, columns: Iterable[tuple[str, int, int, int]], checksum: bool) -> bytes:
        with memoryview(block) as payload:
            return tails.make(payload, columns, checksum)

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
                full = self._full(head["capacity"] - head["committed_pages"] * PAGE, 0.0)
                self.close()
                self.unlink()
                raise full
            head = self._header()

    # -------------------------------------------------------------------------------------------------------- messages

    def _full(self, nbytes: int, waited_s: float, tag: str = "") -> ArenaFull:
        with self._look() as look:
            stats, groups = look.count("holder")
            processes, shares = table.processes(look.processes()), look.shares()
        top = sorted(groups["holder"].items(), key=lambda item: -item[1][1])[:5]
        held = ", ".join(self._held(key, *row, processes) for key, row in top)
        refused = f"; it cannot grow: {self._refused[1]}" if self._refused else ""
        refused += "; no wait helps: the block is larger than the arena" if nbytes > stats["capacity_bytes"] else ""
        refused += self._spill_room(stats)
        if (mine := self._share(tag)) is not None:
            refused += f"; {words.refusal(shares, *mine)}"
        return ArenaFull(
            f"no room for {memory.human(nbytes)} after {waited_s:.1f} s: {memory.human(stats['used_bytes'])} "
            f"of {memory.human(stats['committed_bytes'])} committed ({memory.human(stats['capacity_bytes'])} capacity) "
            f"are used by {stats['blocks']} blocks, {stats['orphaned']} of them orphans{refused}. "
            f"Top holders: {held or 'none'}"
        )

    def _held(self, index: int | None, blocks: int, nbytes: int, processes: dict[int, table.Process]) -> str:
        """One holder: who, whether it lives and since when it is here, and how much it has."""
        much = f"{memory.human(nbytes)} in {blocks} blocks"
        if index is None:
            return f"{table.ORPHANS}: {much}"
        if (one := processes.get(index)) is None:
            return f"process {index} (has left): {much}"
        here_s = (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - one.since_ns) / 1e9
        life = "DEAD, not swept yet" if self._is_dead(index) else "alive"
        return f"{one.name} ({one.pid}), {life}, attached {here_s:.0f} s ago: {much}"

    def _spill_room(self, stats: dict[str, Any]) -> str:
        """The other limit, in numbers; "" without a spill directory."""
        if not (path := self._spill_dir()):
            return ""
        spilled = f"{memory.human(stats['spilled_bytes'])} in {stats['spilled']} spilled blocks"
        try:
            return f"; the spill directory {memory.mount_of(Path(path))}, {spilled}"
        except OSError as error:
            return f"; the spill directory {path} cannot be read ({error.strerror}), {spilled}"

    def _spill_failed(self, nbytes: int, code: int, waited_s: float) -> ArenaError:
        """What a block that could not become a file is refused with."""
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return self._full(nbytes, waited_s)
        return ArenaError(f"{memory.human(nbytes)} cannot be spilled to {self._spill_dir()}: {os.strerror(code)}")

    def _waiting(self, nbytes: int, total: int, tag: str, on_full: str, timeout_s: float | None, most: int) -> Waiting:
        return Waiting(self, nbytes, total, tag, on_full, timeout_s, most)

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
        counters: dict[str, Any] = self._stats(exact)
        if by is None:
            return counters
        if by not in table.BY:
            raise ValueError(f"by={by!r}: {', '.join(table.BY)}")
        with self._look(fields=by == "field") as look:
            counters, groups = self._locked_call(lambda: look.count(by)) if exact else look.count(by)
            rows = self._names(look).groups(by, groups[by])
            return {**counters, "by": words.annotated(rows, look.shares()) if by == "source" else rows}

    def fsck(self) -> list[str]:
        """Checks every invariant under the allocator's lock, then the spilled blocks' files -> a line per fault."""
        faults = self._fsck()
        if path := self._spill_dir():
            with self._look() as look:
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


# --------------------------------------------------------------------------------------------------- create, attach


def _ttl_ns(orphan_ttl_s: float | None) -> int:
    """What the header holds; 0 for never. ValueError."""
    if orphan_ttl_s is None:
        return 0
    if not 0 <= orphan_ttl_s <= 2**31:
        raise ValueError(f"orphan_ttl_s={orphan_ttl_s}: 0 to 2^31 seconds, or None for never")
    return max(1, int(orphan_ttl_s * 1e9))


def _require(mount: Path | None, nbytes: int) -> None:
    if short := memory.refusals(mount, nbytes):
        raise ArenaFull(f"an arena of {nbytes} bytes ({memory.human(nbytes)}) does not fit: " + "; ".join(short))


def _require_address_space(where: Files, ctl: int, data: int) -> None:
    if short := memory.address_space_refusals(memory.mapped(ctl, data)):
        raise ArenaError(f"{where.address} cannot be attached: " + "; ".join(short))


def _made(
    cls: type[Arena],
    where: Files,
    live: int,
    nbytes: int,
    run_id: str,
    max_processes: int,
    ttl_ns: int,
    pages: Pages,
    spill_dir: str | None,
    guaranteed: dict[str, int],
) -> Arena:
    """Files, header, first commitments; on any failure nothing is left."""
    fds = [live]
    try:
        fds.append(where.create("ctl"))
        spilled = None if spill_dir is None else spill.path_of(spill_dir, where.key[-32:])
        _format(where, fds[1], nbytes, run_id, max_processes, ttl_ns, pages.huge, spilled, guaranteed)
        fds.append(where.create("data"))
        where.size(fds[2], nbytes)
        fds.append(_spill_made(spilled))
        arena = cls(where, (fds[0], fds[1], fds[2], fds[3]), reader=None)
    except BaseException:
        where.unlink()
        for fd in fds if len(fds) < 4 else ():
            os.close(fd)
        raise
    try:
        pages.place(*arena._data_at())
        first = _first_commitments(arena, where, nbytes)
        pages.make_huge(arena._data_at()[0], first)
    except BaseException:
        arena.close()
        where.unlink()
        raise
    return arena


def _spill_made(path: Path | None) -> int:
    if path is None:
        return -1
    spill.sweep(path.parent)
    return spill.made(path)


def _format(
    where: Files,
    ctl: int,
    nbytes: int,
    run_id: str,
    max_processes: int,
    ttl_ns: int,
    huge: bool,
    spilled: Path | None,
    guaranteed: dict[str, int],
) -> None:
    size, fixed = ctl_nbytes(nbytes)
    where.size(ctl, size)
    os.posix_fallocate(ctl, 0, fixed)
    node, boot = names.node_of(where.directory)
    ident = bytes.fromhex(where.key[-32:])
    step = min(TABLE_STEP, max(1024, nbytes // 4096))
    with mmap.mmap(ctl, mmap.PAGESIZE) as header:
        directory = b"" if spilled is None else os.fsencode(spilled)
        name = run_id.encode()
        format_ctl(header, nbytes, ident, node, boot, max_processes, step, huge, ttl_ns, name, directory, guaranteed)


def _first_commitments(arena: Arena, where: Files, nbytes: int) -> int:
    """Commits part of the block table, and of the data as many bytes as it returns."""
    code = arena._commit_table(0, arena._header()["table_step"])
    first = min(FIRST_STEP, nbytes)
    if where.backing != "memfd":  # ctl and data share the mount: the last bytes may come later or never
        stat = os.statvfs(where.directory)
        first = min(first, stat.f_bavail * stat.f_frsize // PAGE * PAGE - (nbytes // 1024 + PAGE))
    if not code and first >= PAGE:
        code = arena._commit_data(0, first // PAGE)
    if code or first < PAGE:
        _require(where.mount, nbytes)
        size = memory.human(max(first, 0))
        raise ArenaFull(f"the first {size} of an arena in {where.directory} were refused: {os.strerror(code)}")
    if first < min(FIRST_STEP, nbytes):
        log.warning(
            "arena %s: %s of %s committed, %s has no more",
            arena.address,
            memory.human(first),
            memory.human(nbytes),
            where.directory,
        )
    return first


def _attached(cls: type[Arena], where: Files, reader: int | None) -> Arena:
    if short := memory.descriptor_refusals():
        raise ArenaError(f"{where.address} cannot be attached: " + "; ".join(short))
    fds: list[int] = []
    try:
        fds.append(where.open("live", write=True))
        if os.fstat(fds[0]).st_uid != os.geteuid():
            raise ForeignArena(f"{where.address} belongs to uid {os.fstat(fds[0]).st_uid}, this is uid {os.geteuid()}")
        fds.append(where.open("ctl", write=True))
        if os.fstat(fds[1]).st_size == 0:
            raise ArenaCorrupt(f"{where.address} has an empty ctl: its creator died, or is not done")
        fds.append(where.open("data", write=False))
        _require_address_space(where, os.fstat(fds[1]).st_size, os.fstat(fds[2]).st_size)
        named = spill_dir_of(os.pread(fds[1], 4096, 0))
        fds.append(spill.opened(Path(named)) if named else -1)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, FileNotFoundError | PermissionError):
            raise ForeignArena(f"{where.address} is not on this host for uid {os.geteuid()}: {error}") from error
        raise
    arena = cls(where, (fds[0], fds[1], fds[2], fds[3]), reader=reader)
    gone = where.is_unlinked(fds[0])
    if gone or arena._header()["boot"] != names.node_of(where.directory)[1]:
        arena.close()
        raise ForeignArena(
            f"{where.address} " + ("was removed while this process attached" if gone else "is of an earlier boot")
        )
    return arena


def _process_name() -> bytes:
    """What people see: the title of a role ("env-server:reverse-text"), else module or script and first argument."""
    title = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0]
    if title.startswith(_TITLE):
        return title.removeprefix(_TITLE)[:80]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    first = spec.name if spec is not None else os.path.basename(sys.argv[0])
    return " ".join([first, *sys.argv[1:2]]).encode()[:80]
