"""rollouts/step_N.jsonl: a few of each step's episodes with their text, for people to read.

Called by the orchestrator before it ships a step, while it holds the blocks. The text is the `text` column of the
episode's block: it never travelled through the orchestrator before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmrl.errors import LostPayload
from shmrl.payload import read_text
from shmrl.types import EpisodeResult, Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena


def write_rollouts(
    directory: Path, step: int, arena: Arena, episodes: Iterable[tuple[str, EpisodeResult, float, Sample]]
) -> None:
    """Write (source, result, advantage, sample) rows as `step_<step>.jsonl`, replacing an earlier attempt's file."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_line(arena, *episode)) for episode in episodes]
    (directory / f"step_{step}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _line(arena: Arena, source: str, result: EpisodeResult, advantage: float, sample: Sample) -> dict[str, Any]:
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
        "messages": _messages(arena, sample),
    }


def _messages(arena: Arena, sample: Sample) -> list[dict[str, Any]] | None:
    """None without text, and where the block is lost: what becomes of it is for the trainer's ranks to agree on."""
    try:
        return read_text(arena, sample)
    except LostPayload:
        return None
