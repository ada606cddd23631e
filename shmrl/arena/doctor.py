"""What this machine lets an arena do, as findings with numbers and remedies: the arena's part of `shmrl doctor`."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmrl.arena import files, inspect, memory, opening, placement, printed
from shmrl.arena.arena import Arena
from shmrl.arena.memory import human
from shmrl.errors import ArenaError

Finding = dict[str, Any]
SMALL_SHM = 1 << 30
FEW_FILES = 1024


def doctor(backing: str = "shm") -> list[Finding]:
    """Findings: {"name", "status": "ok" | "warn" | "fail", "detail", "fix"}; fix is "" when there is nothing to do.

    backing: of the arena that is wanted: /dev/shm matters to "shm" alone.
    """
    pages = [*_huge_pages(), *_numa()]
    return [*_shared_memory(backing), *_memory(), *_rlimits(), *pages, _locks(), _dead_arenas(), _cpu()]


def finding(name: str, ok: bool, detail: str, fix: str = "", *, bad: str = "warn") -> Finding:
    """ok, or what is off and what to do about it."""
    return {"name": name, "status": "ok" if ok else bad, "detail": detail, "fix": "" if ok else fix}


def _shared_memory(backing: str) -> Iterator[Finding]:
    if backing != "shm":
        yield finding("/dev/shm", True, f"not needed: arena.backing = {backing!r}")
        return
    if not files.SHM.is_dir() or not os.access(files.SHM, os.W_OK):
        yield finding("/dev/shm", False, "missing or not writable", "use backing 'memfd', or mount a tmpfs there")
        return
    mount = memory.limits(files.SHM)[0]
    fix = "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory), or use backing 'memfd'"
    yield finding("/dev/shm", mount.free >= SMALL_SHM, f"{human(mount.free)} free of {human(mount.limit)}", fix)


def _memory() -> Iterator[Finding]:
    for limit in memory.limits(None):
        detail = f"{human(limit.free)} free of {human(limit.limit)}; growth leaves {human(limit.headroom)} alone"
        yield finding(
            limit.name, limit.free > limit.headroom, detail, "an arena cannot grow here: free memory or raise the limit"
        )


def _rlimits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield finding("open files", soft >= FEW_FILES, f"{soft} (hard limit {hard})", f"ulimit -n {min(hard, 65536)}")
    finite = {limit.name: limit for limit in memory.rlimits()}
    for name, what in memory.RLIMITS.items():
        limit = finite.get(name)
        ok = limit is None or name == "RLIMIT_MEMLOCK"  # the CUDA driver counts what it pins elsewhere
        yield finding(what, ok, "unlimited" if limit is None else human(limit.limit), limit.remedy if limit else "")


def _huge_pages() -> Iterator[Finding]:
    """What the machine gives by itself, and what a small arena really gets when it asks."""
    for backing, directory in (("memfd", None), ("shm", files.SHM)):
        mount = placement.mount_of(directory)
        try:
            with _made(backing, 2 * placement.HUGE_PAGE) as probe:
                got = probe.placement()["huge_bytes"]
                probe.unlink()
            yield finding(
                f"huge pages, {backing}", True, f"{mount}: huge_pages = 'always' gets them ({human(got)} tried)"
            )
        except ArenaError as error:
            yield finding(f"huge pages, {backing}", False, f"{mount}: none to be had", str(error))


def _made(backing: str, nbytes: int) -> Arena:
    """An arena with huge pages. Not by `Arena.create`, which removes dead ones: a doctor only looks."""
    where = files.new(backing, None)
    opening.require(where.mount, nbytes)
    pages = placement.Pages.chosen("always", "none", where.mount)
    return opening.made(Arena, *files.claimed(backing, None), opening.Wanted(nbytes, None, 256, 0, pages, None, {}))


def _numa() -> Iterator[Finding]:
    """Where the pages of live arenas are, on a machine where that differs: as far as each process has touched them."""
    here = placement.nodes()
    alone = " (the only one: numa changes nothing)" if len(here) == 1 else ""
    yield finding("NUMA nodes", True, ",".join(map(str, here)) + alone)
    for row in inspect.list_arenas() if len(here) > 1 else ():
        with inspect.look(row["address"]) as seen:
            processes = sorted(seen.processes.items())
        for index, process in processes:
            name, maps = row["address"].partition(":")[2], Path(f"/proc/{process.pid}/numa_maps")
            where = placement.bytes_by_node(f"{name}.data", maps)
            total = sum(where.values())
            share = ", ".join(f"node {n} {human(b)} ({100 * b // total}%)" for n, b in sorted(where.items()))
            yield finding(f"pages, {process.name or index}", True, share or "none touched")


def _locks() -> Finding:
    """Whether one description sees another's lock: liveness rests on it."""
    first = os.memfd_create("shmrl-doctor")
    second = os.open(f"/proc/self/fd/{first}", os.O_RDWR)
    try:
        ok = files.lock_byte(first, 0) and files.byte_taken(second, 0) and not files.lock_byte(second, 0)
    except OSError as error:
        return finding(
            "kernel byte locks", False, str(error), "liveness needs OFD locks (Linux 3.15 or later)", bad="fail"
        )
    finally:
        os.close(second)
        os.close(first)
    return finding(
        "kernel byte locks", ok, "seen across descriptions" if ok else "not seen across descriptions", bad="fail"
    )


def _dead_arenas() -> Finding:
    rows = inspect.list_arenas()
    dead, live = ([row for row in rows if row["state"] == state] for state in ("dead", "alive"))
    held = sum(row["committed_bytes"] for row in dead)
    orphans, their_bytes = (sum(row[key] for row in live) for key in ("orphaned", "orphaned_bytes"))
    unswept = {key: sum(row[key] for row in live) for key in ("unswept", "unswept_bytes")}
    also = f" and {printed.unswept(unswept)}" if unswept["unswept"] else ""
    detail = (
        f"{len(live)} live with {orphans} orphans ({human(their_bytes)}){also}, {len(dead)} dead holding {human(held)}"
    )
    return finding("arenas", not dead, detail, "shmrl arena gc")


def _cpu() -> Finding:
    flags = ""
    with open("/proc/cpuinfo") as info:
        flags = next((line for line in info if line.startswith(("flags", "Features"))), "")
    fast = {"sse4_2", "crc32"} & set(flags.split())
    return finding(
        "checksum instructions", bool(fast), ", ".join(sorted(fast)) or "none", "checksums use a table: 30x slower"
    )
