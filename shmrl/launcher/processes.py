"""Finding and ending the processes of a run, whoever started them.

Two proofs that a process belongs to the run: it descends from a role we started (pid and start time, so that a reused
pid is never mistaken), or its environment carries the run's id, which survives re-parenting (torch's ranks run in
sessions of their own). Used by the supervisor at teardown, and by the janitor when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from shmrl.monitor.processes import ROLE_VARIABLE, RUN_VARIABLE

_QUIET_S = 0.2  # nothing found for so long: a child caught between fork and exec would have shown


def child_environment(run_id: str, role: str) -> dict[str, str]:
    """Environment of every process of a role: the run's id and the role's name, one thread unless set, an
    /proc/environ that survives.

    SPT_NOENV keeps setproctitle from writing titles over the environment, which would erase the id.
    """
    ours = {RUN_VARIABLE: run_id, ROLE_VARIABLE: role, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **ours}


def find(run_id: str, roots: Iterable[tuple[int, float]]) -> set[psutil.Process]:
    """Every live process of the run except this one; `roots` are (pid, start time) of the roles."""
    found = _tagged({RUN_VARIABLE: run_id})
    for pid, created in roots:
        process = _process(pid)
        if process is not None and process.create_time() == created:
            found.add(process)
            with contextlib.suppress(psutil.Error):
                found.update(process.children(recursive=True))
    return {process for process in found if process.pid != os.getpid() and _alive(process)}


def find_role(run_id: str, role: str) -> set[psutil.Process]:
    """Every live process of one role of the run."""
    return {process for process in _tagged({RUN_VARIABLE: run_id, ROLE_VARIABLE: role}) if _alive(process)}


def kill_all(found: Callable[[], set[psutil.Process]], timeout_s: float) -> list[psutil.Process]:
    """SIGKILL until nothing is `found` for a moment; returns what is still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    quiet_since: float | None = None
    while True:
        left = found()
        now = time.monotonic()
        quiet_since = None if left else quiet_since or now
        if now > deadline or (quiet_since is not None and now - quiet_since >= _QUIET_S):
            return sorted(left, key=lambda process: process.pid)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def _tagged(variables: Mapping[str, str]) -> set[psutil.Process]:
    """Every process with these in its environment."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    pids = [pid for pid in psutil.pids() if wanted <= _environment(pid)]
    return {process for pid in pids if (process := _process(pid))}


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # gone, or somebody else's
        return set()


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
