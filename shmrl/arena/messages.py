"""Why there is no room, and who has it: the numbers and names in ArenaFull, PeerDied and the warnings of a long wait.

Called in an attached process whose reserve was refused or waits; looks at the arena without its lock.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shmrl.arena import readers, shares, table
from shmrl.arena._arena import span_bytes
from shmrl.arena.memory import human, mount_limit
from shmrl.errors import ArenaError, ArenaFull

if TYPE_CHECKING:
    from shmrl.arena._ctl import Ctl
    from shmrl.arena.arena import Arena

TOP = 5  # holders that are named, and dead ones
LONG_S = 1.0  # who waited for so long has the time for a walk over what was shipped


def full(arena: Arena, nbytes: int, waited_s: float, tag: str = "", *, could_spill: bool = False) -> ArenaFull:
    """The refusal of `nbytes`: what there is, which limit refused, and who has the most. could_spill: had it asked."""
    with arena._look() as look:
        stats, groups = look.count("holder")
        guaranteed = look.shares()
        top = sorted(groups["holder"].items(), key=lambda item: -item[1][1])[:TOP]
        processes = table.processes(look.processes())
        held = "; ".join(_held(arena, look, key, *row, processes) for key, row in top)
        awaited = readers.awaited(look, processes)[:TOP] if waited_s > LONG_S else []
    why = f"; it cannot grow: {arena._refused[1]}" if arena._refused else ""
    why += "; no wait helps: the block is larger than the arena" if nbytes > stats["capacity_bytes"] else ""
    why += _spill_room(arena, stats, could_spill)
    if (mine := arena._share(tag)) is not None:
        why += f"; {shares.refusal(guaranteed, *mine)}"
    return ArenaFull(
        f"no room for {_rounded(nbytes)} after {waited_s:.1f} s: {human(stats['used_bytes'])} "
        f"of {human(stats['committed_bytes'])} committed ({human(stats['capacity_bytes'])} capacity) "
        f"are used by {stats['blocks']} blocks, {stats['orphaned']} of them orphans{why}. "
        f"Top holders: {held or 'none'}" + "".join(f"; {human(nbytes)} wait for {who}" for who, nbytes in awaited)
    )


def _rounded(nbytes: int) -> str:
    """Bytes that are asked for, and what they take where that is much more: cells below, pages above 32 KiB."""
    takes = span_bytes(nbytes)
    return f"{human(nbytes)} ({human(takes)} of the arena)" if takes - nbytes > nbytes / 8 else human(nbytes)


def hopeless(arena: Arena, nbytes: int, *, could_spill: bool) -> str:
    """Why no wait can help: every block is an orphan, and nobody else is attached who could free one; or ""."""
    stats = arena.stats()
    if not stats["blocks"] == stats["orphaned"] > 0 or arena._others_alive():
        return ""
    with arena._look() as look:
        left = _left_by_the_dead(look)
    return (
        f"no room for {human(nbytes)}: all {stats['blocks']} blocks ({human(stats['used_bytes'])}) belong to the dead, "
        f"{left}, and nobody else is attached; adopt and free them, or discard their run"
        f"{_spill_room(arena, stats, could_spill)}"
    )


def spill_failed(arena: Arena, nbytes: int, code: int, waited_s: float) -> ArenaError:
    """What a block that could not become a file is refused with."""
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return full(arena, nbytes, waited_s)
    return ArenaError(f"{human(nbytes)} cannot be spilled to {arena._spill_dir()}: {os.strerror(code)}")


def _held(
    arena: Arena, look: Ctl, index: int | None, blocks: int, nbytes: int, processes: dict[int, table.Process]
) -> str:
    """One holder: who, whether it lives and since when it is here, and how much it has."""
    much = f"{human(nbytes)} in {blocks} blocks"
    if index is None:
        return f"{table.ORPHANS}: {much}, {_left_by_the_dead(look)}"
    if (one := processes.get(index)) is None:
        return f"process {index} (has left): {much}"
    here_s = (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - one.since_ns) / 1e9
    life = "DEAD, not swept yet" if arena._is_dead(index) else "STOPPED" if arena._is_stopped(one.pid) else "alive"
    return f"{one.name} ({one.pid}), {life}, attached {here_s:.0f} s ago: {much}"


def _left_by_the_dead(look: Ctl) -> str:
    """Who had the orphans, most bytes first."""
    left = sorted(look.orphans().items(), key=lambda item: -item[1][1])
    told = ", ".join(f"{human(nbytes)} in {blocks} by {name}" for name, (blocks, nbytes) in left[:TOP])
    return f"left: {told}" + (f" and {len(left) - TOP} more" if len(left) > TOP else "")


def _spill_room(arena: Arena, stats: dict[str, int], could_spill: bool) -> str:
    """The other limit, in numbers; "" without a spill directory."""
    if not (path := arena._spill_dir()):
        return ""
    told = f"{human(stats['spilled_bytes'])} in {stats['spilled']} spilled blocks"
    told += ' (on_full="spill" would put this one there)' if could_spill else ""
    try:
        return f"; the spill directory {mount_limit(Path(path))}, {told}"
    except OSError as error:
        return f"; the spill directory {path} cannot be read ({error.strerror}), {told}"
