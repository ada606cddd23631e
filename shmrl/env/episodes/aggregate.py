"""`/aggregate_metrics` of an environment of shmrl: statistics of the numbers at the top of its results.

Names are Gym's own: `mean/reward`, `max/reward`, ... A result with `mask_sample` ran, but its numbers measure nothing:
it is counted, and in no mean.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"


def responses(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results in a request; ValueError."""
    found = body.get("verify_responses")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("verify_responses: a list of maps is expected")
    return found


def metrics(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all results, per task (`group_level_metrics`) and per repeat (`repeat_level_metrics`).

    Example: metrics([{"reward": 1.0, "_ng_task_index": 0}])["key_metrics"] == {"mean/reward": 1.0}
    """
    scored = [one for one in results if not one.get("mask_sample")]
    overall = _statistics(scored)
    if len(scored) < len(results):
        overall["masked_rollouts"] = len(results) - len(scored)
    return {
        "group_level_metrics": _by(scored, TASK),
        "agent_metrics": overall,
        "key_metrics": {key: value for key, value in overall.items() if key.startswith("mean/reward")},
        "perf_summary": None,
        "repeat_level_metrics": _by(scored, ROLLOUT),
    }


def _by(results: Iterable[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for one in results:
        if isinstance(one.get(key), int):
            groups[one[key]].append(one)
    return [{key: index, **_statistics(groups[index])} for index in sorted(groups)]


def _statistics(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    values: dict[str, list[float]] = defaultdict(list)
    for one in results:
        for name, value in one.items():
            if not name.startswith("_") and isinstance(value, (int, float)) and math.isfinite(value):
                values[name].append(float(value))
    found: dict[str, Any] = {}
    for name, numbers in values.items():
        found[f"mean/{name}"] = statistics.fmean(numbers)
        found[f"max/{name}"] = max(numbers)
        found[f"min/{name}"] = min(numbers)
        found[f"median/{name}"] = statistics.median(numbers)
        found[f"std/{name}"] = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return found
