"""`alphabet-sort`: each turn adds letters, and the right reply is all letters so far in alphabetical order. Multi-turn.

The reward is the mean over the turns of `lcs_ratio` (reverse_text). Runs in the env workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from shmrl.env.interface import Environment, Episode, Generated, Split, task_seed
from shmrl.env.model import Model
from shmrl.envs.reverse_text import lcs_ratio
from shmrl.types import Task


class AlphabetSort(Environment):
    """Generated letters, without repetition over an episode.

    Args:
        min_turns, max_turns: both inclusive. letters: per turn. seed, num_tasks: as in reverse-text.
    """

    def __init__(
        self, min_turns: int = 2, max_turns: int = 3, letters: int = 3, seed: int = 0, num_tasks: int | None = None
    ) -> None:
        if not 1 <= min_turns <= max_turns or letters < 1 or max_turns * letters > 26:
            raise ValueError(
                f"min_turns = {min_turns}, max_turns = {max_turns}, letters = {letters}: need "
                "1 <= min_turns <= max_turns and at most 26 letters in all"
            )
        self.turns, self.letters, self.seed, self.num_tasks = (min_turns, max_turns), letters, seed, num_tasks

    def tasks(self, split: Split) -> Iterable[Task]:
        return Generated(lambda index: self._task(split, index), self.num_tasks)

    def _task(self, split: Split, index: int) -> Task:
        seed = task_seed(self.seed, split, index)
        draw = random.Random(seed)
        turns = draw.randint(*self.turns)
        drawn = draw.sample("abcdefghijklmnopqrstuvwxyz", turns * self.letters)
        parts = ["".join(drawn[i : i + self.letters]) for i in range(0, len(drawn), self.letters)]
        return Task(f"{split}-{index}", {"parts": parts}, seed)

    async def rollout(self, task: Task, model: Model) -> Episode:
        messages: list[dict[str, Any]] = []
        scores = [0.0] * len(task.data["parts"])
        for turn, part in enumerate(task.data["parts"]):
            if model.exhausted:  # out of turns or of context: what was not asked counts 0
                break
            messages.append({"role": "user", "content": part})
            reply = (await model.chat.completions.create(messages=messages)).choices[0].message
            messages.append(reply)
            scores[turn] = lcs_ratio(reply["content"].strip(), _sorted(task, turn))
        mean = sum(scores) / len(scores)
        stop = "stop" if model.turns == len(scores) else model.limit
        return Episode(mean, {"sorted": mean}, {"turns": float(model.turns)}, stop, messages)

    def demonstrate(self, task: Task, messages: list[dict[str, Any]]) -> str:
        """All letters of the turns so far, sorted."""
        return _sorted(task, sum(message["role"] == "user" for message in messages) - 1)


def _sorted(task: Task, turn: int) -> str:
    return "".join(sorted("".join(task.data["parts"][: turn + 1])))
