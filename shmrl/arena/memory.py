"""How much memory an arena may take: mount, MemAvailable and every memory cgroup up to the root, with their names.

Called by create() and before every step of growth, in whichever process needs the space. posix_fallocate past a
cgroup's limit is an OOM kill and not an error, so the arithmetic comes first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound. Example: Limit("/dev/shm", limit=67_108_864, free=67_108_864)"""

    name: str
    limit: int
    free: int

    @property
    def headroom(self) -> int:
        """What growth leaves alone: the larger of 1 GiB and 5%, at most an eighth of the limit."""
        return min(max(GIB, self.limit // 20), self.limit // 8)

    def __str__(self) -> str:
        return f"{self.name} has {human(self.free)} free of {human(self.limit)}"


def human(nbytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    size, unit = float(nbytes), 0
    while abs(size) >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{size:.1f} {'KMGT'[unit - 1]}iB"


def limits(directory: Path, *, mount: bool) -> list[Limit]:
    """Every bound on shared memory of this process, with what is free now; `mount`: the directory's file system too."""
    out = [mount_of(directory)] if mount else []
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    out.append(Limit("memory (MemAvailable)", int(info["MemTotal"]) << 10, int(info["MemAvailable"]) << 10))
    return out + list(_cgroups())


def refusing(directory: Path, nbytes: int, *, mount: bool, headroom: bool) -> Limit | None:
    """The first bound that `nbytes` more would break, or None."""
    for limit in limits(directory, mount=mount):
        if nbytes + (limit.headroom if headroom else 0) > limit.free:
            return limit
    return None


def growable(directory: Path, *, mount: bool) -> int:
    """Bytes that growth may still take now, headroom left alone."""
    return max(0, min(limit.free - limit.headroom for limit in limits(directory, mount=mount)))


def mount_of(directory: Path) -> Limit:
    """The file system under a directory. OSError."""
    s = os.statvfs(directory)
    return Limit(str(directory), s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize)


def _cgroups() -> Iterator[Limit]:
    """Limit and free of each memory cgroup with a limit, v2 and v1, innermost first."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _ancestors(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            yield from _ancestors(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _ancestors(root: Path, path: str, limit_name: str, usage_name: str) -> Iterator[Limit]:
    group = root / path.lstrip("/")
    while group == root or root in group.parents:
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None and limit < 1 << 60:
            # page cache of files can be reclaimed; shared memory is charged as cache too, and cannot
            yield Limit(f"cgroup {group}", limit, max(0, limit - usage + _reclaimable(group)))
        group = group.parent


def _reclaimable(group: Path) -> int:
    try:
        stat = dict(line.split()[:2] for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1 counts descendants under their own names
    return int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
