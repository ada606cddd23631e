"""Environments that misbehave in one way each, and some that only need a line; loaded by env workers by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

from shmrl.env import Environment, Episode, Generated
from shmrl.env.sandbox import sandbox
from shmrl.types import Task


class Echo(Environment):
    """One turn; the reward is the task's, or 1. `lone`: a metric whose name cannot be sent."""

    def tasks(self, split):
        return Generated(lambda i: Task(f"{split}-{i}", {"text": "ab"}, i), 100)

    async def rollout(self, task, model):
        await model.chat_text([{"role": "user", "content": task.data["text"]}])
        reward = task.data.get("reward", 1.0)
        return Episode(reward, metrics={"a lone \ud800" if task.data.get("lone") else "one": 1.0})


class Turns(Echo):
    """`turns` turns of one conversation, then, if the task says `branch`, another second turn: a branch. `text`: what
    it begins with."""

    async def rollout(self, task, model):
        messages: list[Any] = []
        for turn in range(task.data["turns"]):
            before = "" if turn else task.data.get("text", "")
            messages.append({"role": "user", "content": f"{before}t{turn}"})
            messages.append((await model.chat.completions.create(messages=messages)).choices[0].message)
        if task.data.get("branch"):
            again = [*messages[:2], {"role": "user", "content": "again"}]
            await model.chat.completions.create(messages=again)
        return Episode(1.0)


class Scored(Echo):
    """Knows its group: each episode's reward becomes the group's size."""

    async def score_group(self, episodes):
        for episode in episodes:
            episode.reward = float(len(episodes))


class IteratedTasks(Echo):
    """A finite task set that is an iterator."""

    def tasks(self, split):
        return (Task(f"{split}-{i}", {"text": "x"}, i) for i in range(5))


class EndlessTasks(Echo):
    """A task set that is an iterator without an end."""

    def tasks(self, split):
        return (Task(f"{split}-{i}", {}, i) for i in count())


class RaisingTasks(Echo):
    def tasks(self, split):
        raise RuntimeError("the data set moved to the moon")


class RaisingLater(Echo):
    """The first tasks are there, the rest is not."""

    def tasks(self, split):
        yield Task("0", {"text": "x"}, 0)
        raise RuntimeError("row 1 is rotten")


class DyingAtStart(Echo):
    def __init__(self):
        print("no more paper", flush=True)
        os._exit(3)


class Gated(Echo):
    """Says in `directory` that it is being loaded, and stays so until there is a file `open`."""

    def __init__(self, directory):
        (Path(directory) / f"loading-{os.getpid()}").touch()
        while not (Path(directory) / "open").exists():
            time.sleep(0.01)


class Boxed(Echo):
    """Runs what a model wrote."""

    def __init__(self):
        self.box = sandbox()


class Raising(Echo):
    """Has a bug, one frame down; `demonstrate` has it, too."""

    async def rollout(self, task, model):
        return Episode(self.demonstrate(task, []))

    def demonstrate(self, task, messages):
        return float(json.loads(task.data["text"]))


class Dying(Echo):
    """Kills its worker in the rollouts whose task says so."""

    async def rollout(self, task, model):
        if task.data.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return Episode(1.0)


class Blocking(Echo):
    """Blocks the worker's event loop for `task.data["seconds"]`."""

    async def rollout(self, task, model):
        time.sleep(task.data.get("seconds", 0))  # noqa: ASYNC251
        return Episode(1.0)


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}


class Calculator(Echo):
    """The model calls `add` until it answers; the reward is whether it says the task's sum."""

    async def rollout(self, task, model):
        messages: list[Any] = [{"role": "user", "content": f"{task.data['a']} + {task.data['b']}"}]
        while not model.exhausted:
            choice = (await model.chat.completions.create(messages=messages, tools=[ADD])).choices[0]
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls:
                total = sum(json.loads(call["function"]["arguments"]).values())
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
        right = messages[-1]["content"] == str(task.data["a"] + task.data["b"])
        return Episode(float(right), metrics={"calls": float(sum(m["role"] == "tool" for m in messages))})


class Remembering(Echo):
    """Knows what it was made with."""

    def __init__(self, word, *, times=1, **rest):
        self.said = {"word": word, "times": times, **rest}

    def tasks(self, split):
        return [Task("0", self.said, 0)]


class Positional(Echo):
    def __init__(self, *words):
        self.words = words


class Clinging(Echo):
    """Lets go of nothing: a rollout that is cancelled goes on, for ever where the task says so."""

    async def rollout(self, task, model):
        while True:
            try:
                await model.chat_text([{"role": "user", "content": "a"}])
                return Episode(1.0)
            except asyncio.CancelledError:
                if not task.data.get("for_ever"):
                    return Episode(0.0)


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Misbehaving(Echo):
    """Ends its rollout as the task says: by what `raises` names, or as two processes."""

    async def rollout(self, task, model):
        if task.data.get("forks"):
            return Episode(2.0 if os.fork() == 0 else 1.0)
        kinds = {"speechless": Speechless(), "long": ValueError("x" * (20 << 20)), "exit": SystemExit(3)}
        kinds |= {"interrupt": KeyboardInterrupt(), "generator": GeneratorExit()}
        if (name := task.data.get("raises")) is not None:
            raise kinds[name]
        return Episode(1.0)


class Forking(Echo):
    """Leaves a child behind in every rollout."""

    async def rollout(self, task, model):
        child = await asyncio.create_subprocess_exec("sleep", "600")
        return Episode(float(child.pid))
