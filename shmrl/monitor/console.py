"""One line per step on the orchestrator's standard output: coloured on a terminal, plain in a log file, JSON if asked.

NO_COLOR (any value) keeps a terminal's lines plain, too.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from shmrl.monitor.progress import CLEAR_LINE, redraws

_COLUMNS = (  # label, metric, format, the order in which they give way on a narrow terminal (0: never)
    ("", "time/step", "{:.1f}s", 0),
    ("reward", "train/reward", "{:.4f}", 0),
    ("loss", "train/loss", "{:.4f}", 6),
    ("mismatch KL", "train/mismatch_kl", "{:.1e}", 5),
    ("entropy", "train/entropy", "{:.3f}", 4),
    ("grad norm", "train/grad_norm", "{:.3f}", 1),
    ("tokens/s", "train/tokens_per_s", "{:.0f}", 0),
    ("arena", "arena/used_fraction", "{:.1%}", 3),
    ("lag", "off_policy/mean", "{:.2f}", 2),
    ("dropped", "off_policy/dropped", "{:.0f}", 2),
)
_UNUSUAL = (  # shown only when there are any
    ("failed", "episodes/failed"),
    ("timed out", "episodes/timed_out"),
    ("truncated", "payload/truncated_samples"),
    ("requeued groups", "orchestrator/requeued_groups"),
    ("spilled", "arena/spilled"),
)


def step_line(record: Mapping[str, Any], max_steps: int, width: int | None = None) -> str:
    """The record as one line; metrics it does not have are left out, what seldom happens and evaluations come last.
    width: columns of a terminal, for which the less important ones give way."""
    parts = [(f"step {record['step']}/{max_steps}", 0)]
    for label, metric, shape, rank in _COLUMNS:
        if record.get(metric) is not None:
            parts.append((f"{label} {shape.format(record[metric])}".strip(), rank))
    parts += [(f"{label} {record[metric]:.0f}", 0) for label, metric in _UNUSUAL if record.get(metric)]
    for metric in sorted(record):
        if metric.startswith("eval/") and not metric.endswith("/failed"):
            parts.append((f"{metric.removeprefix('eval/')} {record[metric]:.4f}", 0))
    for rank in range(1, 7):
        if width is not None and len(_joined(parts)) >= width:
            parts = [part for part in parts if part[1] != rank]
    return _joined(parts)


def _joined(parts: list[tuple[str, int]]) -> str:
    return " | ".join(text for text, _ in parts)


def show(line: str, *, as_json: bool = False, **facts: Any) -> None:
    """Print lines at once; on a terminal numbers are coloured. as_json: an object with the text and the facts."""
    if as_json:
        print(json.dumps({"time": round(time.time(), 6), "message": line, **facts}), flush=True)
    elif redraws(sys.stdout):
        from rich.console import Console  # its import takes longer than a step's other work, and no log file needs it

        sys.stdout.write(CLEAR_LINE)
        Console().print(line, markup=False)
    else:
        print(line, flush=True)


def width() -> int | None:
    """Columns of the terminal that `show` prints on; None for a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
