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
LAG_WINDOW = 6000  # a minute of ticks


class MetricsFile:
    """`metrics.jsonl` of a run. `resume_step`: keep the lines up to this step; None starts an empty file."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if line["step"] <= resume_step] if resume_step is not None else []
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
    return max((line["step"] for line in _lines(path)), default=None)


def _lines(path: Path) -> list[dict[str, Any]]:
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
    """How late the event loop wakes a task that asked for 10 ms: the 99th percentile since the last look."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=LAG_WINDOW)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            asked = time.monotonic()
            await asyncio.sleep(LAG_TICK_S)
            self._late.append(time.monotonic() - asked - LAG_TICK_S)

    def take_p99_ms(self) -> float:
        """The percentile in milliseconds; starts a new window."""
        late = sorted(self._late)
        self._late.clear()
        return 1000.0 * late[min(len(late) - 1, int(len(late) * 0.99))] if late else 0.0
