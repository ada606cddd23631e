"""The public API as a user's type checker sees it: mypy reads this file strictly (pyproject.toml), and it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shmrl.env
from shmrl import Arena, Branch, Handle, MicroBatch, Sample, TensorBatch, assemble, encode, pack
from shmrl.env import Environment, Episode, Generated, SessionEnvironment, Step, Task, task_seed
from shmrl.env.model import Model


class Doubling(Environment):
    """As an author writes one."""

    def tasks(self, split: str) -> Generated:
        return Generated(lambda i: Task(f"{split}-{i}", {"number": i}, task_seed(0, split, i)))

    async def rollout(self, task: Task, model: Model) -> Episode:
        reply = await model.chat.completions.create(messages=[{"role": "user", "content": str(task.data["number"])}])
        right = reply.choices[0].message.get("content") == str(2 * task.data["number"])
        return Episode(reward=float(right))


class Counting(SessionEnvironment):
    """As an author writes one that is driven."""

    def reset(self, seed: int, **data: Any) -> Step:
        self.left = 3
        return Step("three")

    def step(self, action: str) -> Step:
        self.left -= 1
        return Step(str(self.left), reward=float(action == str(self.left)), done=not self.left)


def stored(arena: Arena, rows: NDArray[np.uint8]) -> tuple[Handle, Sample]:
    handle: Handle = arena.put(rows, tag="typed/a/0/0")
    branch = Branch([5, 6, 7], [0, 1, 1], [0.0, -0.1, -0.7], routing=np.ones((2, 1, 1), int), num_experts=8)
    return handle, encode(arena, branch, tag="typed/a/0/1")


def test_a_typed_program_runs() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    with Arena.create(capacity="8MiB") as arena:
        handle, sample = stored(arena, rows)
        with arena.get(handle) as view:
            assert np.asarray(view).tobytes() == rows.tobytes()
        ranks: list[list[MicroBatch]] = pack([sample], seq_len=8, num_ranks=1)
        batch: TensorBatch = assemble(arena, ranks[0][0])
        assert batch.arrays()["tokens"].tolist()[:3] == [5, 6, 7]
        assert arena.free([handle, *sample.handles]) == 2
        arena.unlink()
    assert Doubling().tasks("train")[3].id == "train-3"
    session = Counting()
    assert session.reset(seed=1).observation == "three"
    assert session.step("2").reward == 1


def test_what_a_checker_is_told_of_is_what_there_is() -> None:
    """A lazy package names its contents twice: for imports, and for those who read and do not import."""
    for package in (shmrl, shmrl.env):
        source = Path(str(package.__file__)).read_text()
        for name in package.__all__:
            assert getattr(package, name) is not None
            assert name.startswith("__") or f"import {name} as {name}\n" in source
