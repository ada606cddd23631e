"""The arena as the page draws it: every byte by source, step, holder, age and field, the blocks that have most of them,
what may leak, who is attached, what happened last. A look from outside, as `shmrl arena` takes it: nobody waits for it.
"""

from __future__ import annotations

from typing import Any

from shmrl.arena import commands, inspect, table
from shmrl.arena.inspect import Filter
from shmrl.config.budget import HIGH, LOW
from shmrl.errors import ArenaError, ConfigError

BLOCKS = 160  # that are drawn one by one; the rest of a group is one area
SUSPECTS = 20
EVENTS = 40


def picture(address: str | None, groups: int, retained: int = 0, first: int = 0) -> dict[str, Any]:
    """{"state": "alive", ...} of the arena, or {"state": "gone", "why"}.

    The bytes of each of `by` sum to used_bytes, as those of `shmrl arena stats` do; beyond `groups` the smallest are
    one row. retained: steps that the run keeps after their use. first: number of the oldest event that is wanted.
    marks: bytes above which no group of episodes starts, and below which they start again.
    """
    if address is None:
        return {"state": "gone", "why": "no arena is named in configs/orchestrator.toml"}
    try:
        return {"state": "alive", "address": address, **_look(address, groups, retained, first)}
    except (ArenaError, ConfigError, OSError) as error:
        return {"state": "gone", "address": address, "why": str(error)}


def _look(address: str, groups: int, retained: int, first: int) -> dict[str, Any]:
    with inspect.look(address, fields=True) as seen:
        counters, counted = seen.counts(*table.BY)
        newest = max((int(step) for step in counted["step"] if step), default=None)
        suspects = seen.suspects(newest, SUSPECTS, retained)
        waiting = seen.waiting()
        capacity = counters["capacity_bytes"]
        return {
            "run_id": seen.head["run_id"],
            "live": seen.is_live(),
            **counters,
            "marks": {"high": int(HIGH * capacity), "low": int(LOW * capacity)},
            "waiting": len(waiting),
            "oldest_wait_s": waiting[0].waits_s if waiting else 0.0,
            "newest_step": newest,
            "unnamed": table.UNNAMED,
            "by": {by: commands.largest(by, counted[by], groups) for by in table.BY},
            "largest": [_block(row) for row in seen.rows(Filter(), "size", BLOCKS)],
            "suspects": {
                "blocks": suspects.blocks,
                "rows": [{**_block(row), "why": row["why"]} for row in suspects.rows],
            },
            "attached": _attached(seen),
            "events": seen.events(first, EVENTS),
        }


def _block(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `shmrl arena ls` with the names of its groups, and without its handle: that is for processes."""
    parts = row["tag"].split("/", 2)
    return {
        **{key: row[key] for key in ("slot", "generation", "state", "flags", "tag", "step", "age_s", "held_by")},
        "bytes": row["span_bytes"],
        "nbytes": row["nbytes"],
        "source": parts[1] if len(parts) > 1 else "",
        "holder": row["owner"] or table.ORPHANS,
        "age": table.age_group(row["age_s"]),
    }


def _attached(seen: inspect.Look) -> list[dict[str, Any]]:
    return [
        {"pid": one.pid, "name": one.name, "alive": index in seen.alive, "stopped": seen.is_stopped(index)}
        for index, one in sorted(seen.processes.items())
    ]
