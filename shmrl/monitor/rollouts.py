"""rollouts/step_N.jsonl: a few of each step's episodes with their text and per-token facts, for people to read.

Called by the orchestrator before it ships a step, while it holds the blocks. Text and arrays are columns of the
episode's block: they never travelled through the orchestrator before. `payload.shown` reads them, where they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shmrl.types import EpisodeResult, Sample


def write_rollouts(
    directory: Path, step: int, episodes: Iterable[tuple[str, EpisodeResult, float, Sample, dict[str, Any]]]
) -> None:
    """Write (source, result, advantage, sample, what is `shown` of it) rows as `step_<step>.jsonl`, replacing an
    earlier attempt's file."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".step_{step}.jsonl"
    with partial.open("w") as file:
        for source, result, advantage, sample, shown in episodes:
            file.write(json.dumps(_line(source, result, advantage, sample) | shown) + "\n")
    partial.replace(directory / f"step_{step}.jsonl")


def _line(source: str, result: EpisodeResult, advantage: float, sample: Sample) -> dict[str, Any]:
    return {
        "source": source,
        "task_id": result.task_id,
        "reward": result.reward,
        "rewards": result.rewards,
        "advantage": advantage,
        "stop_reason": result.stop_reason,
        "num_turns": result.num_turns,
        "tokens": sample.T,
        "sampled_tokens": sample.S,
        "version_start": result.version_start,
        "version_end": result.version_end,
    }
