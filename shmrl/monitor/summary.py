"""What a run came to, in a few lines: read from its metrics.jsonl when it ends. Called by the launcher."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from shmrl.units import size

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WIDTH = 40


def summary(
    records: Sequence[Mapping[str, Any]], output_dir: Path, arena: Mapping[str, int], marks: str | None = None
) -> list[str]:
    """The reward's course, evaluations, totals, and where the files are; empty without a step. arena: statistics of its
    end (Arena.stats)."""
    steps = [record for record in records if record["step"]]
    if not steps:
        return []
    marks = marks or marks_of(sys.stdout.encoding)
    took = sum(record.get("time/step") or 0.0 for record in steps)
    lines = [f"{len(steps)} steps in {duration(took)}, {took / len(steps):.1f} s each"]
    rewards = {"reward": "train/reward"}
    rewards |= {name.removesuffix("/reward"): name for name in sorted(_names(records)) if _is_eval(name)}
    widest = max(map(len, rewards))
    for label, name in rewards.items():
        if values := [record[name] for record in records if record.get(name) is not None]:
            course = f"{values[0]:.4f} -> {values[-1]:.4f}, best {max(values):.4f}"
            lines.append(f"{label:<{widest}}  {sparkline(values, marks)}  {course}")
    counts = {end: sum(record.get(f"episodes/{end}") or 0 for record in steps) for end in _OUTCOMES}
    ended = ", ".join(f"{count:,.0f} {end.replace('_', ' ')}" for end, count in counts.items() if count)
    lines.append(f"episodes: {ended}")
    counts_of_blocks = f"{arena['created']:,} blocks created, {arena['freed']:,} freed, {arena['blocks']:,} left"
    lines.append(f"arena: {size(arena['peak_bytes'])} at most, {counts_of_blocks}")
    return [*lines, f"files: {output_dir}: {', '.join(_files(output_dir))}"]


_OUTCOMES = ("shipped", "filtered", "stale", "failed", "cancelled", "timed_out")


def sparkline(values: Sequence[float], marks: str = BLOCKS, width: int = WIDTH) -> str:
    """The course of values, lowest to highest mark; means of neighbours where there are more than `width`."""
    count = min(width, len(values))
    cuts = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(marks[min(len(marks) - 1, int((mean - low) / span * len(marks))) if span else 0] for mean in means)


def marks_of(encoding: str | None) -> str:
    """What an output of this encoding can show."""
    return BLOCKS if (encoding or "").lower().replace("-", "").startswith("utf") else PLAIN


def duration(seconds: float) -> str:
    """Example: duration(3725) == "1 h 2 min" """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _names(records: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for record in records for name in record}


def _is_eval(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/reward")


def _files(output_dir: Path) -> list[str]:
    """What there is, newest of what is numbered."""
    found = [name for name in ("metrics.jsonl", "rollouts") if (output_dir / name).exists()]
    for kind in ("weights", "checkpoints"):
        steps = [int(path.name[5:]) for path in (output_dir / kind).glob("step_*") if path.name[5:].isdigit()]
        found += [f"{kind}/step_{max(steps)}"] if steps else []
    return [*found, "logs/latest"]
