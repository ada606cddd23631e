"""Making an arena's files and attaching to them: what `Arena.create` and `Arena.attach` do before there is an `Arena`.

Called by them alone, in the process that creates or attaches. Whatever fails leaves no file and no descriptor behind.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shmrl.arena import files as names
from shmrl.arena import memory, spill
from shmrl.arena._ctl import ctl_nbytes, format_ctl, spill_dir_of
from shmrl.arena.files import Files
from shmrl.arena.placement import Pages
from shmrl.errors import ArenaCorrupt, ArenaError, ArenaFull, ForeignArena
from shmrl.units import PAGE, parse_bytes

if TYPE_CHECKING:
    from shmrl.arena.arena import Arena

log = logging.getLogger(__name__)

MAX_CAPACITY = 1 << 47
FIRST_STEP = 256 << 20
TABLE_STEP = 16384  # descriptors: 4 MiB
_TITLE = b"shmrl:"  # what setproctitle puts before a role's name


@dataclass(frozen=True, slots=True)
class Wanted:
    """An arena that create() was asked for, in numbers.

    nbytes: its capacity. run_id: None is the first 32 bits of its id. ttl_ns: of orphans, 0 = they live on. shares:
    bytes by source.
    """

    nbytes: int
    run_id: str | None
    max_processes: int
    ttl_ns: int
    pages: Pages
    spill_dir: str | None
    shares: dict[str, int]


def capacity_nbytes(capacity: int | str, max_processes: int) -> int:
    """Whole pages. ValueError."""
    asked = parse_bytes(capacity)
    nbytes = -(-asked // PAGE) * PAGE
    if not PAGE <= nbytes <= MAX_CAPACITY or not 1 <= max_processes <= 256:
        raise ValueError(f"capacity={asked} (1 to 2^47 bytes), max_processes={max_processes} (1 to 256)")
    return nbytes


def ttl_ns(orphan_ttl_s: float | None) -> int:
    """What the header holds; 0 for never. ValueError."""
    if orphan_ttl_s is None:
        return 0
    if not 0 <= orphan_ttl_s <= 2**31:
        raise ValueError(f"orphan_ttl_s={orphan_ttl_s}: 0 to 2^31 seconds, or None for never")
    return max(1, int(orphan_ttl_s * 1e9))


def require(mount: Path | None, nbytes: int) -> None:
    if short := memory.refusals(mount, nbytes):
        raise ArenaFull(f"an arena of {nbytes} bytes ({memory.human(nbytes)}) does not fit: " + "; ".join(short))


def _require_address_space(where: Files, ctl: int, data: int) -> None:
    if short := memory.address_space_refusals(memory.mapped(ctl, data)):
        raise ArenaError(f"{where.address} cannot be attached: " + "; ".join(short))


def made(cls: type[Arena], where: Files, live: int, wanted: Wanted) -> Arena:
    """Files, header, first commitments; on any failure nothing is left."""
    fds = [live]
    try:
        fds.append(where.create("ctl"))
        spilled = None if wanted.spill_dir is None else spill.path_of(wanted.spill_dir, where.key[-32:])
        _format(where, fds[1], wanted, spilled)
        fds.append(where.create("data"))
        where.size(fds[2], wanted.nbytes)
        fds.append(_spill_made(spilled))
        arena = cls(where, (fds[0], fds[1], fds[2], fds[3]), reader=None)
    except BaseException:
        where.unlink()
        for fd in fds if len(fds) < 4 else ():
            os.close(fd)
        raise
    try:
        wanted.pages.place(*arena._data_at())
        first = _first_commitments(arena, where, wanted.nbytes)
        wanted.pages.make_huge(arena._data_at()[0], first)
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


def _format(where: Files, ctl: int, wanted: Wanted, spilled: Path | None) -> None:
    size, fixed = ctl_nbytes(wanted.nbytes)
    where.size(ctl, size)
    os.posix_fallocate(ctl, 0, fixed)
    node, boot = names.node_of(where.directory)
    ident = where.key[-32:]
    with mmap.mmap(ctl, mmap.PAGESIZE) as header:
        format_ctl(
            header,
            wanted.nbytes,
            ident=bytes.fromhex(ident),
            node=node,
            boot=boot,
            max_processes=wanted.max_processes,
            table_step=min(TABLE_STEP, max(1024, wanted.nbytes // 4096)),
            huge=wanted.pages.huge,
            orphan_ttl_ns=wanted.ttl_ns,
            run_id=(wanted.run_id or ident[:8]).encode(),
            spill_dir=b"" if spilled is None else os.fsencode(spilled),
            shares=wanted.shares,
        )


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
        require(where.mount, nbytes)
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


def attached(cls: type[Arena], where: Files, reader: int | None) -> Arena:
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


def process_name() -> bytes:
    """What people see: the title of a role ("env-server:reverse-text"), else module or script and first argument, and
    which child of multiprocessing it is ("train.py config.toml ForkPoolWorker-3")."""
    title = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0]
    if title.startswith(_TITLE):
        return title.removeprefix(_TITLE)[:80]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    first = spec.name if spec is not None else os.path.basename(sys.argv[0])
    children = sys.modules.get("multiprocessing.process")  # not imported: who has children has imported it
    child = f" {children.current_process().name}" if children and children.parent_process() else ""
    words = " ".join([first, *sys.argv[1:2]])[: 79 - len(child[-40:])]
    return (words + child[-40:]).encode(errors="replace")
