"""Environments of the project's own behind `/run`."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from shmrl.env import Environment, Episode, Generated
from shmrl.env.episodes.episodes import Course
from shmrl.env.episodes.protocol import Protocol
from shmrl.env.episodes.wire import EpisodeFailed, EpisodeRequest, Failure
from shmrl.errors import EnvError
from shmrl.types import Task


class Recorded(Environment):
    """What the recorded foreign server did with its two tasks: a turn, or the death of a sandbox."""

    def __init__(self, runs: str | None = None) -> None:
        self.runs = runs

    def tasks(self, split):
        return Generated(lambda i: Task(f"{split}-{i}", {"answer": "cba"}, i), 4)

    def note(self, task_id):
        if self.runs:
            with Path(self.runs).open("a") as file:
                file.write(f"{task_id}\n")

    async def rollout(self, task, model):
        self.note(task.id)
        if task.id == "t-fail":
            raise EnvError("sandbox died")
        if task.id == "t-bug":
            raise KeyError("a bug")
        if task.id == "t-dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if task.id == "t-hang":
            await asyncio.Event().wait()
        await model.chat_text([{"role": "user", "content": f"reverse {task.data['answer'][::-1]}"}])
        return Episode(1.0, rewards={"exact": 1.0}, metrics={"length": 3.0})


class Always(Protocol):
    """A protocol that is not bundled: opens nothing, and says what it was asked."""

    async def run(self, request: EpisodeRequest, course: Course) -> dict[str, Any]:
        course.stage = "agent"
        if request.task.task_input.get("masked"):
            raise EpisodeFailed(Failure.of("no", terminal=True, stage="verification", failure_kind="always:masked"))
        return {"reward": request.task.task_input.get("reward", 1.0), "task": request.task.task_id.task_id}
