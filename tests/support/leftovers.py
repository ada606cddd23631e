"""What a test left behind: processes, shared memory, listening ports. Used by the autouse fixture in tests/conftest.py.

Processes are recognised by a variable in their environment, which every descendant inherits, however it was started
and whoever its parent is by now. Shared memory counts unless a process that is not ours has it mapped, so that other
work on the machine does not fail a test.
"""

import os
import time
from pathlib import Path

import psutil

MARK = "SHMRL_TEST_SESSION"
SHM = Path("/dev/shm")
_SESSION_LONG = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # one per interpreter, by design


def mark_descendants() -> None:
    """Every process started from here on carries the mark (SPT_NOENV: process titles must not overwrite it)."""
    os.environ[MARK] = str(os.getpid())
    os.environ["SPT_NOENV"] = "1"


def processes() -> set[psutil.Process]:
    """Live descendants of this test session, re-parented ones included."""
    wanted = f"{MARK}={os.getpid()}".encode()
    return {process for pid in psutil.pids() if pid != os.getpid() and (process := _marked(pid, wanted))}


def _marked(pid: int, wanted: bytes) -> psutil.Process | None:
    try:
        if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return None
        process = psutil.Process(pid)
        if any(name in word for word in process.cmdline() for name in _SESSION_LONG):
            return None
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, psutil.Error):
        return None


def segments() -> set[str]:
    """Names of our uid's segments in shared memory."""
    return {path.name for path in SHM.glob(f"shmrl-{os.getuid()}-*")}


def ports() -> set[int]:
    """Ports on which this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def _mapped_by_others(name: str, ours: set[int]) -> bool:
    for pid in psutil.pids():
        if pid in ours:
            continue
        try:
            if name.rsplit(".", 1)[0] in Path(f"/proc/{pid}/maps").read_text():  # `live` itself is never mapped
                return True
        except OSError:
            continue
    return False


def wait_until_gone(
    before: tuple[set[psutil.Process], set[str], set[int]], timeout_s: float = 10.0
) -> dict[str, list[str]]:
    """What is there now, was not before, and does not go away by itself; empty when the test was clean."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = _new(before)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _new(before: tuple[set[psutil.Process], set[str], set[int]]) -> dict[str, list[str]]:
    now = processes()
    ours = {os.getpid(), *(process.pid for process in now)}
    shm = [name for name in sorted(segments() - before[1]) if not _mapped_by_others(name, ours)]
    found = {
        "processes": sorted(str(process) for process in now - before[0]),
        "shared memory": shm,
        "listening ports": sorted(map(str, ports() - before[2])),
    }
    return {kind: names for kind, names in found.items() if names}
