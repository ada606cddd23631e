"""The process table of a run, as it is now: role, health, memory, CPU since the last look.

Health is what the kernel says (running, sleeping, stopped, a zombie), and for processes with the arena attached what
their lock says: alive, or dead and not swept. Of a run by hand only the latter are known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from shmrl.monitor.page.paced import PATIENCE
from shmrl.monitor.processes import roles

SCAN_S = 30.0  # at least, between two looks at every process of this machine; sooner when one of ours is gone
STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGESIZE")


class ProcessTable:
    """The processes of a run from look to look, so that CPU is a rate."""

    def __init__(self) -> None:
        self._run_id: str | None = None
        self._roles: dict[int, str] = {}
        self._titles: dict[int, str] = {}
        self._used: dict[int, tuple[float, float, float]] = {}  # when it was looked at, its start, its CPU seconds
        self._boot = psutil.boot_time()
        self._scanned, self._pause_s = 0.0, 0.0

    def scan(self, run_id: str | None) -> None:
        """Looks through every process of this machine for those of the run, unless it did so a moment ago."""
        now = time.monotonic()
        gone = any(not psutil.pid_exists(pid) for pid in self._roles)
        pause_s = self._pause_s if gone else max(SCAN_S, self._pause_s)
        if run_id == self._run_id and now < self._scanned + pause_s:
            return
        used = time.thread_time()
        self._roles = {} if run_id is None else roles(run_id)
        self._titles.clear()
        self._used = {pid: used for pid, used in self._used.items() if pid in self._roles}
        self._run_id, self._scanned, self._pause_s = run_id, now, PATIENCE * (time.thread_time() - used)

    def rows(self, attached: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """One row per process, by role. attached: who has the arena, as `arena.picture` lists them."""
        in_arena = {one["pid"]: one for one in attached}
        rows = []
        for pid in {*self._roles, *in_arena}:
            facts = self._facts(pid)
            one = in_arena.get(pid, {})
            if facts is None and (not one or one["alive"]):  # gone, or in another pid namespace
                if not one:
                    continue
                facts = {"health": "alive"}
            role = self._roles.get(pid) or one.get("name", "")
            rows.append({"pid": pid, "role": role, "arena": one.get("name"), **(facts or {"health": "dead"})})
            if one and not one["alive"]:
                rows[-1]["health"] = "dead"
        return sorted(rows, key=lambda row: (row["role"], row["pid"]))

    def _facts(self, pid: int) -> dict[str, Any] | None:
        """None of a process that is gone, or that is not ours to see. /proc itself: psutil takes five times as long."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            pages = Path(f"/proc/{pid}/statm").read_text().split()
            title = self._titles.get(pid) or self._titles.setdefault(pid, _title(pid))
        except OSError:
            self._titles.pop(pid, None)
            return None
        state, *rest = stat[stat.rindex(")") + 2 :].split()  # rest[0] is field 4 of proc_pid_stat(5)
        used_s, started = (int(rest[10]) + int(rest[11])) / _TICKS, self._boot + int(rest[18]) / _TICKS
        return {
            "title": title,
            "health": STATES.get(state, "alive"),
            "started": started,
            "threads": int(rest[16]),
            "rss_bytes": int(pages[1]) * _PAGE,
            "shared_bytes": int(pages[2]) * _PAGE,
            "cpu_percent": self._rate(pid, started, used_s),
        }

    def _rate(self, pid: int, started: float, used_s: float) -> float | None:
        """Percent of a core since the last look; None at the first."""
        now = time.monotonic()
        before, began, then_s = self._used.get(pid, (now, 0.0, 0.0))
        self._used[pid] = now, started, used_s
        return 100 * (used_s - then_s) / (now - before) if began == started and now > before else None


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")[:120]
