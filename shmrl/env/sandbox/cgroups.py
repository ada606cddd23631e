"""Memory and pids cgroups around one sandbox: rlimits bound each process, these bound all of them together.

Used by `bwrap.py` in the env workers, where this process may make groups below its own: cgroup v2 with the controllers
delegated, or the two hierarchies of v1. Elsewhere there are none, and the server says so at its start.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

log = logging.getLogger(__name__)
ROOT = Path("/sys/fs/cgroup")
LIMITS = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}
SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
HITS = {"memory": ("memory.events", "memory.oom_control"), "pids": ("pids.events",)}
HIT_KEYS = {"memory": "oom_kill", "pids": "max"}
_numbers = itertools.count()


def parents() -> dict[str, Path]:
    """controller ("memory", "pids") -> the directory below which a group of it can be made. Removes what dead
    processes left there."""
    found: dict[str, Path] = {}
    for name in LIMITS:
        for directory in _candidates(name):
            if _usable(name, directory):
                found[name] = directory
                _sweep(directory)
                break
    return found


class Group:
    """One sandbox's groups. `procs`: the files that a process writes its pid to, to enter."""

    def __init__(self, parents: Mapping[str, Path], memory: int, processes: int) -> None:
        self._made: dict[str, Path] = {}
        name = f"shmrl-{os.getpid()}-{next(_numbers)}"
        try:
            for controller, parent in parents.items():
                directory = self._made[controller] = parent / name
                directory.mkdir(exist_ok=True)  # in v2 one directory has both
                _write_first(directory, LIMITS[controller], memory if controller == "memory" else processes)
                if controller == "memory":
                    v2 = (directory / SWAP[0]).exists()
                    _write_first(directory, SWAP, 0 if v2 else memory, optional=True)
        except BaseException:
            self.close()
            raise
        self.procs = sorted({str(directory / "cgroup.procs") for directory in self._made.values()})

    def hits(self) -> set[str]:
        """Controllers whose limit was met: "memory" killed a process, "pids" refused one."""
        return {name for name, directory in self._made.items() if _count(directory, name)}

    def close(self) -> None:
        """Remove the groups; every process in them has ended."""
        for directory in set(self._made.values()):
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("cgroup %s cannot be removed: %s", directory, error.strerror)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _candidates(controller: str) -> Iterator[Path]:
    """Where this process is in the hierarchy of a controller; in a container its path may be the host's."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        roots = [ROOT / controller] if controller in names.split(",") else [] if names else [ROOT, ROOT / "unified"]
        for root in roots:
            yield root / path.lstrip("/")
            yield root


def _usable(controller: str, directory: Path) -> bool:
    probe = directory / f"shmrl-{os.getpid()}-probe-{next(_numbers)}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        limited = any((probe / file).exists() for file in LIMITS[controller])
        return limited and os.access(probe / "cgroup.procs", os.W_OK)
    finally:
        probe.rmdir()


def _sweep(directory: Path) -> None:
    """Remove the empty groups of processes that are no more."""
    for group in directory.glob("shmrl-*"):
        pid = group.name.split("-")[1]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):  # not empty, or another process was faster
                group.rmdir()


def _write_first(directory: Path, files: tuple[str, ...], value: int, *, optional: bool = False) -> None:
    for file in files:
        if (directory / file).exists():
            (directory / file).write_text(str(value))
            return
    if not optional:
        raise OSError(f"{directory} has none of {', '.join(files)}")


def _count(directory: Path, controller: str) -> int:
    for file in HITS[controller]:
        if (directory / file).exists():
            counters = dict(line.split() for line in (directory / file).read_text().splitlines())
            return int(counters.get(HIT_KEYS[controller], 0))
    return 0
