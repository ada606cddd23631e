"""`reverse-text`: the user message is a short text, the right reply is that text reversed. One turn.

The reward is the length of the longest common subsequence of reply and target over the length of the longer of the two,
so that neither a prefix nor a flood of letters is worth much. Runs in the env workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from shmrl.env.interface import Environment, Episode, Generated, Rubric, Split, metric, reward, task_seed
from shmrl.env.model import Model
from shmrl.types import Task


class ReverseText(Environment):
    """Generated lowercase texts.

    Args:
        min_length, max_length: letters of a text, both inclusive, uniformly drawn.
        alphabet: what letters there are.
        seed: of the task set. num_tasks: how many there are per split; None means without end.
        demonstration_noise: probability with which a letter of a demonstration is replaced by a random one, so that a
            warm-up gives reinforcement learning a start instead of the answer.
    """

    def __init__(
        self,
        min_length: int = 4,
        max_length: int = 8,
        alphabet: str = "abcdefghijklmnopqrstuvwxyz",
        seed: int = 0,
        num_tasks: int | None = None,
        demonstration_noise: float = 0.0,
    ) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(
                f"min_length = {min_length}, max_length = {max_length}: need 1 <= min_length <= max_length"
            )
        if not 0 <= demonstration_noise <= 1:
            raise ValueError(f"demonstration_noise = {demonstration_noise} is not a probability")
        self.lengths = (min_length, max_length)
        self.alphabet, self.seed, self.num_tasks, self.noise = alphabet, seed, num_tasks, demonstration_noise
        self.rubric = Rubric(reward(lcs_ratio, name="lcs"), metric(exact))

    def tasks(self, split: Split) -> Iterable[Task]:
        return Generated(lambda index: self._task(split, index), self.num_tasks)

    def _task(self, split: Split, index: int) -> Task:
        seed = task_seed(self.seed, split, index)
        draw = random.Random(seed)
        text = "".join(draw.choices(self.alphabet, k=draw.randint(*self.lengths)))
        return Task(f"{split}-{index}", {"text": text}, seed)

    async def rollout(self, task: Task, model: Model) -> Episode:
        text = task.data["text"]
        answer = await model.chat_text([{"role": "user", "content": text}])
        return self.rubric.episode(answer.strip(), text[::-1])

    def demonstrate(self, task: Task, messages: list[dict[str, Any]]) -> str:
        """The reversed text, with `demonstration_noise`."""
        draw = random.Random(task.seed + 1)
        target = task.data["text"][::-1]
        return "".join(draw.choice(self.alphabet) if draw.random() < self.noise else letter for letter in target)


def lcs_ratio(answer: str, target: str) -> float:
    """LCS(answer, target) / max(len(answer), len(target)), in [0, 1]; two empty texts are equal.

    Example: lcs_ratio("cab", "cba") == 2 / 3
    """
    longer = max(len(answer), len(target))
    return lcs_length(answer, target) / longer if longer else 1.0


def exact(answer: str, target: str) -> float:
    """1 where the reply is the target."""
    return float(answer == target)


def lcs_length(a: str, b: str) -> int:
    """Length of the longest common subsequence, in O(len(a) * len(b)) time and O(len(b)) space."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
