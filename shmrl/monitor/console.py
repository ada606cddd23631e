"""One line per step on the orchestrator's standard output: coloured on a terminal, plain in a log file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_COLUMNS = (  # label, metric, format
    ("", "time/step", "{:.1f}s"),
    ("reward", "train/reward", "{:.4f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("mismatch KL", "train/mismatch_kl", "{:.1e}"),
    ("entropy", "train/entropy", "{:.3f}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("tokens/s", "train/tokens_per_s", "{:.0f}"),
    ("arena", "arena/used_fraction", "{:.1%}"),
    ("lag", "off_policy/mean", "{:.2f}"),
    ("dropped", "off_policy/dropped", "{:.0f}"),
)


def step_line(record: Mapping[str, Any], max_steps: int) -> str:
    """The record as one line; metrics it does not have are left out, evaluations come last."""
    parts = [f"step {record['step']}/{max_steps}"]
    for label, metric, shape in _COLUMNS:
        if record.get(metric) is not None:
            parts.append(f"{label} {shape.format(record[metric])}".strip())
    for metric in sorted(record):
        if metric.startswith("eval/") and not metric.endswith("/failed"):
            parts.append(f"{metric.removeprefix('eval/')} {record[metric]:.4f}")
    return " | ".join(parts)


def show(line: str) -> None:
    """Print a line at once; on a terminal the numbers are highlighted."""
    if sys.stdout.isatty():
        from rich.console import Console  # its import takes longer than a step's other work, and no log file needs it

        Console().print(line)
    else:
        print(line, flush=True)
