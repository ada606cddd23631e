"""Figures beside what is promised of them. Used by the benches that measure absolute times of the arena.

The clock also runs while others have the core, so the least of many is shown beside the median, and CPU time where a
figure is long enough for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

HEAD = f"{'':56} {'min':>9} {'p50':>9} {'CPU':>9} {'at most':>9}"


def row(what: str, times: Sequence[float], bar: float | None, unit: float, cpu: Sequence[float] = ()) -> str:
    """Seconds as a line of the table, in `unit` seconds (1e-6: us, 1e-3: ms); the bar in the same unit."""
    found = min(times) / unit, statistics.median(times) / unit
    used = f"{statistics.median(cpu) / unit:9.2f}" if cpu else f"{'':9}"
    name = {1e-6: "us", 1e-3: "ms"}[unit]
    held = "" if bar is None else "yes" if found[1] <= bar else "at calm moments" if found[0] <= bar else "NO"
    return f"{what + ', ' + name:56} {found[0]:9.2f} {found[1]:9.2f} {used} {'' if bar is None else bar:>9} {held}"


def timed(call: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """(wall, CPU) seconds of each call in this thread, after one that does not count."""
    call()
    wall, cpu = [], []
    for _ in range(rounds):
        began, used = time.perf_counter(), time.thread_time()
        result = call()
        cpu.append(time.thread_time() - used)
        wall.append(time.perf_counter() - began)
        del result
    return wall, cpu
