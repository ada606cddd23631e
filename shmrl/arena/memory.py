"""How much memory an arena may take: mount, MemAvailable, every memory cgroup up to the root, this process's rlimits.

Called by create(), attach() and before every step of growth, in whichever process needs the space, and by preflight and
`shmrl doctor`. posix_fallocate past a cgroup's limit is an OOM kill, ftruncate past RLIMIT_FSIZE a SIGXFSZ, and a page
that a full tmpfs does not have a SIGBUS: none of them is an error to catch, so the arithmetic comes first.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shmrl.arena._ctl import ctl_nbytes

GIB = 1 << 30
DESCRIPTORS = 4  # live, ctl, data, and the one that replaces data's at the first write
RLIMITS = {"RLIMIT_AS": "address space", "RLIMIT_FSIZE": "file size", "RLIMIT_MEMLOCK": "locked memory"}
_RAISED_BY = {
    "RLIMIT_AS": "ulimit -v unlimited (an arena maps its whole capacity)",
    "RLIMIT_FSIZE": "ulimit -f unlimited (it counts for shared memory too)",
    "RLIMIT_MEMLOCK": "ulimit -l unlimited (or docker run --ulimit memlock=-1)",
}
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound on bytes. Example: Limit("/dev/shm", limit=67_108_864, free=67_108_864, remedy="...")

    remedy: what raises it, as a command where there is one; "{limit}" in it is the limit wanted in bytes, "{mib}" MiB.
    """

    name: str
    limit: int
    free: int
    remedy: str = ""

    @property
    def headroom(self) -> int:
        """What growth leaves alone: the larger of 1 GiB and 5%, at most an eighth of the limit."""
        return min(max(GIB, self.limit // 20), self.limit // 8)

    def refusal(self, nbytes: int) -> str:
        """What a person needs to know when this bound has no `nbytes`: needed, there, and what raises it."""
        wanted = self.limit - self.free + nbytes
        remedy = self.remedy.format(limit=wanted, mib=-(-wanted // (1 << 20)))
        return (
            f"{nbytes} bytes ({human(nbytes)}) are needed, {self.name} has {max(0, self.free)} bytes "
            f"({human(max(0, self.free))}) available of {self.limit} ({human(self.limit)}): {remedy}"
        )

    def __str__(self) -> str:
        return f"{self.name} has {human(self.free)} free of {human(self.limit)}"


def human(nbytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    size, unit = float(nbytes), 0
    while abs(size) >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{size:.1f} {'KMGT'[unit - 1]}iB"


def limits(mount: Path | None) -> list[Limit]:
    """Every bound on shared memory, with what is free now. mount: where its files are, None for memfds (no mount)."""
    out = [] if mount is None else [mount_limit(mount)]
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    total, free = int(info["MemTotal"]) << 10, int(info["MemAvailable"]) << 10
    out.append(Limit("memory (MemAvailable)", total, free, "make the arena smaller, or free memory on this machine"))
    return out + list(_cgroups())


def refusing(mount: Path | None, nbytes: int, *, headroom: bool) -> Limit | None:
    """The first bound that `nbytes` more would break, or None."""
    for limit in limits(mount):
        if nbytes + (limit.headroom if headroom else 0) > limit.free:
            return limit
    return None


def growable(mount: Path | None) -> int:
    """Bytes that growth may still take now, headroom left alone."""
    return max(0, min(limit.free - limit.headroom for limit in limits(mount)))


def refusals(mount: Path | None, nbytes: int) -> list[str]:
    """Why an arena of `nbytes` cannot be made there now: every bound that refuses, in numbers; [] when it can."""
    if mount is not None and not (mount.is_dir() and os.access(mount, os.W_OK | os.X_OK)):
        return [
            f"{mount} is missing or cannot be written to, and the arena is made there: backing 'memfd' needs no mount"
        ]
    short = [limit.refusal(nbytes) for limit in limits(mount) if nbytes > limit.free]
    return [
        *short,
        *_rlimit_refusals("RLIMIT_FSIZE", nbytes),
        *address_space_refusals(mapped(ctl_nbytes(nbytes)[0], nbytes)),
        *descriptor_refusals(),
    ]


def address_space_refusals(nbytes: int) -> list[str]:
    """Why this process cannot map that many bytes more; [] when it can."""
    return _rlimit_refusals("RLIMIT_AS", nbytes)


def mapped(ctl: int, data: int) -> int:
    """Address space of one attachment: ctl, data, and the private hold counts (8 bytes a descriptor of 256)."""
    return ctl + data + ctl // 32


def descriptor_refusals() -> list[str]:
    """Why this process cannot open an arena's files; [] when it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # less the one that lists them
    except OSError:  # none left for that
        used = soft
    if used + DESCRIPTORS <= soft:
        return []
    raised = f"ulimit -n {max(1024, used + 64)} (hard limit {hard})"
    return [f"{DESCRIPTORS} descriptors are needed, RLIMIT_NOFILE is {soft}, {used} are in use: {raised}"]


def rlimits() -> list[Limit]:
    """The finite limits in RLIMITS of this process; free is what it does not use yet."""
    return [limit for name in RLIMITS if (limit := rlimit(name)) is not None]


def rlimit(name: str) -> Limit | None:
    """One of RLIMITS; None when it is unlimited."""
    soft = resource.getrlimit(getattr(resource, name))[0]
    if not 0 <= soft < _UNLIMITED:
        return None
    used = 0
    if name == "RLIMIT_AS":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    return Limit(name, soft, soft - used, _RAISED_BY[name])


def _rlimit_refusals(name: str, nbytes: int) -> list[str]:
    limit = rlimit(name)
    return [limit.refusal(nbytes)] if limit is not None and nbytes > limit.free else []


def mount_limit(directory: Path) -> Limit:
    """The file system under a directory. OSError."""
    if not directory.is_dir():
        return Limit(str(directory), 0, 0, "make that directory")
    s = os.statvfs(directory)
    remedy = "free space there, or make the arena smaller"
    if directory == Path("/dev/shm"):
        remedy = (
            "start the container with --shm-size={mib}m or more (Kubernetes: an emptyDir of medium Memory at /dev/shm; "
            "root: mount -o remount,size={mib}m /dev/shm), or use backing 'memfd', which this mount does not bound"
        )
    return Limit(str(directory), s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize, remedy)


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
            free = max(0, limit - usage + _reclaimable(group))
            remedy = f"docker run --memory={{mib}}m, or as root: echo {{limit}} > {group / limit_name}"
            yield Limit(f"cgroup {group}", limit, free, remedy)
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
