"""metrics.jsonl: one object per step, written by the orchestrator alone; and what it measures of its own process.

Names are pinned (`train/reward`, `arena/blocks`, ...): tests, dashboards and scripts read them. A line is whole or not
there: it is written in one call, and a resumed run first cuts the file back to its checkpoint's step.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAG_TICK_S = 0.01
LAG_WINDOW_S = 60.0


class MetricsFile:
    """`metrics.jsonl` of a run. `resume_step`: keep the lines up to this step; None starts an empty file."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in lines(path) if line["step"] <= resume_step] if resume_step is not None else []
        partial = path.with_suffix(".jsonl.part")
        partial.write_text("".join(_encoded(line) for line in kept))
        os.replace(partial, path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step. `record` has "step"; values that are no finite numbers become null."""
        line = {"step": record["step"], **{key: record[key] for key in sorted(record) if key != "step"}}
        with self._path.open("a") as file:
            file.write(_encoded(line))


def last_step(path: Path) -> int | None:
    """The step of the last line; None where there is none."""
    return max((line["step"] for line in lines(path)), default=None)


def lines(path: Path) -> list[dict[str, Any]]:
    """The file's lines up to the first that is none of ours; a torn last one (the writer was killed) is left out."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        found.append(line)
    return found


def _encoded(line: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(finite) + "\n"


def rss_bytes() -> tuple[int, int]:
    """(resident, resident anonymous) bytes of this process; mapped arena pages are in the first only."""
    found = {"VmRSS": 0, "RssAnon": 0}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return found["VmRSS"], found["RssAnon"]


class LoopLag:
    """How late the event loop wakes a task that asked for `tick_s`, over the last minute."""

    def __init__(self, tick_s: float = LAG_TICK_S) -> None:
        self._tick_s = tick_s
        self._late: deque[float] = deque(maxlen=int(LAG_WINDOW_S / tick_s))

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            asked = time.monotonic()
            await asyncio.sleep(self._tick_s)
            self._late.append(time.monotonic() - asked - self._tick_s)

    def quantiles_ms(self) -> dict[str, float]:
        """p50, p99 and max of the last minute, in milliseconds. Example: {"p50": 0.1, "p99": 1.2, "max": 4.0}"""
        late = sorted(self._late) or [0.0]
        at = {"p50": len(late) // 2, "p99": int(len(late) * 0.99), "max": len(late) - 1}
        return {name: round(1000.0 * late[index], 3) for name, index in at.items()}

    def take_p99_ms(self) -> float:
        """The 99th percentile in milliseconds since the last call, of a minute at most; starts a new window."""
        found = self.quantiles_ms()["p99"]
        self._late.clear()
        return found
