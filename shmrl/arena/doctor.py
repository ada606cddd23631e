"""`shmrl doctor`: what this machine lets an arena do, as findings with numbers and remedies. Called by the CLI."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmrl.arena import files, inspect, memory, placement
from shmrl.arena.arena import Arena
from shmrl.arena.memory import human
from shmrl.errors import ArenaError

SMALL_SHM = 1 << 30
FEW_FILES = 1024


def doctor() -> list[dict[str, Any]]:
    """Findings: {"name", "status": "ok" | "warn" | "fail", "detail", "fix"}; fix is "" when there is nothing to do."""
    pages = [*_huge_pages(), *_numa()]
    return [*_shared_memory(), *_memory(), *_rlimits(), *pages, _locks(), _dead_arenas(), _cpu()]


def render(findings: list[dict[str, Any]]) -> str:
    """One line per finding, remedies below."""
    lines = []
    for one in findings:
        lines.append(f"{one['status']:<5} {one['name']:<24} {one['detail']}")
        lines += [f"      {'':<24} {one['fix']}"] if one["fix"] else []
    return "\n".join(lines)


def _finding(name: str, ok: bool, detail: str, fix: str = "", *, bad: str = "warn") -> dict[str, Any]:
    return {"name": name, "status": "ok" if ok else bad, "detail": detail, "fix": "" if ok else fix}


def _shared_memory() -> Iterator[dict[str, Any]]:
    if not files.SHM.is_dir() or not os.access(files.SHM, os.W_OK):
        yield _finding("/dev/shm", False, "missing or not writable", "use backing 'memfd', or mount a tmpfs there")
        return
    mount = memory.limits(files.SHM)[0]
    fix = "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory), or use backing 'memfd'"
    yield _finding("/dev/shm", mount.free >= SMALL_SHM, f"{human(mount.free)} free of {human(mount.limit)}", fix)


def _memory() -> Iterator[dict[str, Any]]:
    for limit in memory.limits(None):
        detail = f"{human(limit.free)} free of {human(limit.limit)}; growth leaves {human(limit.headroom)} alone"
        yield _finding(
            limit.name, limit.free > limit.headroom, detail, "an arena cannot grow here: free memory or raise the limit"
        )


def _rlimits() -> Iterator[dict[str, Any]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _finding("open files", soft >= FEW_FILES, f"{soft} (hard limit {hard})", f"ulimit -n {min(hard, 65536)}")
    finite = {limit.name: limit for limit in memory.rlimits()}
    for name, what in memory.RLIMITS.items():
        limit = finite.get(name)
        ok = limit is None or name == "RLIMIT_MEMLOCK"  # the CUDA driver counts what it pins elsewhere
        yield _finding(what, ok, "unlimited" if limit is None else human(limit.limit), limit.remedy if limit else "")


def _huge_pages() -> Iterator[dict[str, Any]]:
    """What the machine gives by itself, and what a small arena really gets when it asks."""
    for backing, directory in (("memfd", None), ("shm", files.SHM)):
        mount = placement.mount_of(directory)
        try:
            with Arena.create(2 * placement.HUGE_PAGE, backing=backing, huge_pages="always") as probe:
                got = probe.placement()["huge_bytes"]
                probe.unlink()
            yield _finding(
                f"huge pages, {backing}", True, f"{mount}: huge_pages = 'always' gets them ({human(got)} tried)"
            )
        except ArenaError as error:
            yield _finding(f"huge pages, {backing}", False, f"{mount}: none to be had", str(error))


def _numa() -> Iterator[dict[str, Any]]:
    """Where the pages of live arenas are, on a machine where that differs: as far as each process has touched them."""
    here = placement.nodes()
    alone = " (the only one: numa changes nothing)" if len(here) == 1 else ""
    yield _finding("NUMA nodes", True, ",".join(map(str, here)) + alone)
    for row in inspect.list_arenas() if len(here) > 1 else ():
        with inspect.look(row["address"]) as seen:
            processes = sorted(seen.processes.items())
        for index, process in processes:
            name, maps = row["address"].partition(":")[2], Path(f"/proc/{process.pid}/numa_maps")
            where = placement.bytes_by_node(f"{name}.data", maps)
            total = sum(where.values())
            share = ", ".join(f"node {n} {human(b)} ({100 * b // total}%)" for n, b in sorted(where.items()))
            yield _finding(f"pages, {process.name or index}", True, share or "none touched")


def _locks() -> dict[str, Any]:
    """Whether one description sees another's lock: liveness rests on it."""
    first = os.memfd_create("shmrl-doctor")
    second = os.open(f"/proc/self/fd/{first}", os.O_RDWR)
    try:
        ok = files.lock_byte(first, 0) and files.byte_taken(second, 0) and not files.lock_byte(second, 0)
    except OSError as error:
        return _finding(
            "kernel byte locks", False, str(error), "liveness needs OFD locks (Linux 3.15 or later)", bad="fail"
        )
    finally:
        os.close(second)
        os.close(first)
    return _finding(
        "kernel byte locks", ok, "seen across descriptions" if ok else "not seen across descriptions", bad="fail"
    )


def _dead_arenas() -> dict[str, Any]:
    rows = inspect.list_arenas()
    dead, live = ([row for row in rows if row["state"] == state] for state in ("dead", "alive"))
    held = sum(row["committed_bytes"] for row in dead)
    orphans, their_bytes = (sum(row[key] for row in live) for key in ("orphaned", "orphaned_bytes"))
    detail = f"{len(live)} live with {orphans} orphans ({human(their_bytes)}), {len(dead)} dead holding {human(held)}"
    return _finding("arenas", not dead, detail, "shmrl arena gc")


def _cpu() -> dict[str, Any]:
    flags = ""
    with open("/proc/cpuinfo") as info:
        flags = next((line for line in info if line.startswith(("flags", "Features"))), "")
    fast = {"sse4_2", "crc32"} & set(flags.split())
    return _finding(
        "checksum instructions", bool(fast), ", ".join(sorted(fast)) or "none", "checksums use a table: 30x slower"
    )
