"""Episodes of every shape that the payload path has to carry: three turns, a branch, one whose turns go on for longer
than the trainer takes."""

from itertools import count

from shmrl.env.interface import Environment, Episode
from shmrl.types import Task

KINDS = ("turns", "branches", "long")


class Shapes(Environment):
    """Task i is of kind i % 3; `long` prompts have `long` characters."""

    def __init__(self, long):
        self.long = long

    def tasks(self, split):
        return (Task(str(i), {"kind": KINDS[i % 3], "i": i}, seed=i) for i in count())

    async def rollout(self, task, model):
        kind, i = task.data["kind"], task.data["i"]
        messages = [{"role": "user", "content": "x" * self.long if kind == "long" else f"task {i}"}]
        for turn in range(3):
            reply = (await model.chat.completions.create(messages=messages)).choices[0].message
            messages += [reply, {"role": "user", "content": f"go on {turn}"}]
        if kind == "branches":  # the first turn again, answered differently: a second root-to-leaf path
            other = [*messages[:2], {"role": "user", "content": "another way"}]
            await model.chat.completions.create(messages=other)
        return Episode(reward=float(i % 5), stop_reason="stop")
