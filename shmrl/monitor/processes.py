"""Which processes belong to a run: they carry its id and their role's name in their environment.

The launcher gives every role both (`shmrl.launcher.processes`); the page lists them. Reads /proc, of our own uid.
"""

from __future__ import annotations

from pathlib import Path

import psutil

RUN_VARIABLE, ROLE_VARIABLE = "SHMRL_RUN", "SHMRL_ROLE"


def environment(pid: int) -> dict[str, str]:
    """Of a live process, as it was at its start; {} of one that is gone, or somebody else's."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def roles(run_id: str) -> dict[int, str]:
    """{pid: role} of every live process of a run."""
    found = {}
    for pid in psutil.pids():
        variables = environment(pid)
        if variables.get(RUN_VARIABLE) == run_id:
            found[pid] = variables.get(ROLE_VARIABLE, "")
    return found
