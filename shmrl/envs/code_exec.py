"""`code-exec`: one generated programming problem, one answer, which is run on up to 12 tests, each in a sandbox.

The reward is the fraction of the tests whose output is right. The tests of an answer run side by side. Runs in the env
workers of a server with `serve.sandbox`.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from shmrl.env.interface import SessionEnvironment, Split, Step, task_seed
from shmrl.env.sandbox import Outcome, sandbox
from shmrl.envs.code_problems import PROBLEMS
from shmrl.types import Task

MOST_TESTS = 12
EVAL_EVERY = 5
"""Every so many problems, one is for evaluation alone."""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_running = ThreadPoolExecutor(max(MOST_TESTS, 4 * (os.cpu_count() or 1)), "sandbox")
"""Sandboxes of this process at a time: more would only take each other's seconds."""


class CodeExec(SessionEnvironment):
    """Programs from standard input to standard output.

    Args:
        tests: per answer, 1 to 12. wall_s: seconds for each. seed: of the task set.
    """

    def __init__(self, tests: int = MOST_TESTS, wall_s: float = 10.0, seed: int = 0) -> None:
        if not 1 <= tests <= MOST_TESTS or wall_s <= 0:
            raise ValueError(f"tests = {tests}, wall_s = {wall_s}: 1 to {MOST_TESTS} tests, and a positive time")
        self.num_tests, self.seed, self.sandbox = tests, seed, sandbox()
        self.limits = replace(self.sandbox.limits, wall_s=wall_s)
        self.tests: list[tuple[str, str]] = []

    def tasks(self, split: Split) -> Sequence[Task]:
        names = [name for i, name in enumerate(PROBLEMS) if (i % EVAL_EVERY == 0) == (split == "eval")]
        return [Task(name, {"problem": name}, task_seed(self.seed, split, i)) for i, name in enumerate(names)]

    def reset(self, seed: int, problem: str | None = None, **_: Any) -> str:
        """A problem by name, else by seed, and its tests, which the seed draws."""
        draw = random.Random(seed)
        chosen = PROBLEMS[problem or draw.choice([*PROBLEMS])]
        self.tests = [chosen.test(draw) for _ in range(self.num_tests)]
        given, expected = chosen.test(draw)
        return f"{chosen.statement}\n\nExample input:\n{given}\nIts output:\n{expected}"

    def step(self, action: str) -> Step:
        """Run the last code block of the answer (all of it, if it has none) on every test."""
        blocks = _FENCE.findall(action)
        source = blocks[-1] if blocks else action
        outcomes = list(_running.map(lambda test: self.sandbox.python(source, test[0], self.limits), self.tests))
        right = [_right(outcome, test[1]) for outcome, test in zip(outcomes, self.tests, strict=True)]
        verdicts = "\n".join(_verdict(outcome, ok) for outcome, ok in zip(outcomes, right, strict=True))
        return Step(verdicts, sum(right) / len(right), done=True)


def _right(outcome: Outcome, expected: str) -> bool:
    return outcome.ok and outcome.stdout.strip() == expected


def _verdict(outcome: Outcome, right: bool) -> str:
    """One line per test. Example: "memory: MemoryError" """
    if right:
        return "right"
    lines = outcome.stderr.strip().splitlines()
    if outcome.limit is None and outcome.code == 0:
        return "wrong"
    return f"{outcome.limit or f'exit code {outcome.code}'}: {lines[-1][:200] if lines else ''}".rstrip(": ")
