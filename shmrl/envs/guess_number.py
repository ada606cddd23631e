"""`guess-number`: a session that thinks of a number; every reply is a guess, every observation a hint.

Observations are one character: ">" (the number is larger), "<" (smaller), "?" (no number), "=" (found). Runs in the env
workers.
"""

from __future__ import annotations

import random
import re
from typing import Any

from shmrl.env.interface import SessionEnvironment, Step
from shmrl.types import Task


class GuessNumber(SessionEnvironment):
    """Guess an integer in [1, high]. Finding it with the n-th of `guesses` guesses pays (guesses - n + 1) / guesses.

    Args:
        high: the largest number. guesses: how many there are. seed: of the task set.
    """

    def __init__(self, high: int = 9, guesses: int = 4, seed: int = 0) -> None:
        if high < 1 or guesses < 1:
            raise ValueError(f"high = {high}, guesses = {guesses}: both must be positive")
        self.high, self.guesses, self.seed = high, guesses, seed
        self.number = self.used = 0

    def reset(self, seed: int, **data: Any) -> str:
        self.number, self.used = random.Random(seed).randint(1, self.high), 0
        return f"1-{self.high}"

    def step(self, action: str) -> Step:
        self.used += 1
        found = re.search(r"\d{1,9}", action)
        guess = int(found.group()) if found else None
        if guess == self.number:
            return Step("=", (self.guesses - self.used + 1) / self.guesses, done=True)
        hint = "?" if guess is None else ">" if guess < self.number else "<"
        return Step(hint, done=self.used >= self.guesses)

    def demonstrate(self, task: Task, messages: list[dict[str, Any]]) -> str:
        """The next guess of a binary search over what the observations so far leave."""
        low, high = 1, self.high
        for reply, observation in zip(messages[1::2], messages[2::2], strict=False):
            guess = int(reply["content"])
            low, high = (guess + 1, high) if observation["content"] == ">" else (low, guess - 1)
        return str((low + high) // 2)
