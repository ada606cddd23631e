"""What an environment's author writes: tasks, a rollout, rewards. Authors never touch arrays.

Two shapes. A *rollout environment* talks to the model itself; a *session environment* only has reset and step, and
`SessionRollout` drives it as a rollout, so that it gets everything a rollout has. Runs in the env workers; imported by
`shmrl.envs` and by authors, so it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from shmrl.env.hosted import Hosted
from shmrl.env.threads import to_the_end
from shmrl.errors import EnvError
from shmrl.types import Task

if TYPE_CHECKING:
    from shmrl.env.model import Model

Split = Literal["train", "eval"]
STEPS = 64
"""Sessions of one worker that can be in a step at a time."""


@dataclass(slots=True)
class Episode:
    """What a rollout hands back. `reward` is the total, `rewards` its weighted parts, `metrics` mere observations.

    messages: the conversation for whoever reads it; None means the one the model recorded.

    Example: Episode(reward=0.83, rewards={"lcs": 0.83}, metrics={"length": 6.0}, stop_reason="stop")
    """

    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = "stop"
    messages: list[dict[str, Any]] | None = None


class Environment(Hosted):
    """Base of rollout environments; construct-time arguments are `env.args` of the configuration.

    Three more methods are optional and found by name:
        async score_group(episodes: list[Episode]) -> None: adjusts rewards in place, knowing the whole group;
        demonstrate(task, messages) -> str: the assistant's ideal next reply (supervised warm-up needs it);
        and the attribute `name` for logs.
    """

    async def setup(self) -> None:
        """Called once per worker, before anything else."""

    async def teardown(self) -> None:
        """Called once per worker when it stops."""

    def tasks(self, split: Split) -> Iterable[Task]:
        """The problems of one split: a sequence, a `Generated`, or an iterator; finite or infinite.

        Workers each call it for themselves, so it must give the same tasks every time.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tasks()")

    async def rollout(self, task: Task, model: Model) -> Episode:
        """One attempt at one task, by calls of `model.chat.completions.create(messages=...)`."""
        raise NotImplementedError(f"{type(self).__name__} has no rollout()")


@dataclass(frozen=True, slots=True)
class Step:
    """What a session answers to an action, and to a reset. Example: Step("higher", reward=0.0, done=False)

    Attributes:
        observation: a text, or a map that clients of the session get as it is.
        reward: of this step alone; None where there is none.
        done: nothing follows; `truncated` says that it ended for want of time or turns.
        info: facts beside the observation.
    """

    observation: str | Mapping[str, Any]
    reward: float | None = 0.0
    done: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Any) -> Step:
        """The Step of whatever an environment's `step` gives back; EnvError for what is none.

        A Step, Gymnasium's tuple of five (or of four, without truncated), or an OpenEnv observation: an object with
        `reward`, `done` and `model_dump()`.
        """
        if isinstance(answer, Step):
            return answer
        if isinstance(answer, tuple) and len(answer) == 5:
            observation, reward, terminated, truncated, info = answer
            return cls(_observation(observation), _reward(reward), bool(terminated or truncated), bool(truncated), info)
        if isinstance(answer, tuple) and len(answer) == 4:
            observation, reward, done, info = answer
            return cls(_observation(observation), _reward(reward), bool(done), info=info)
        if hasattr(answer, "model_dump"):
            fields = answer.model_dump()
            reward, done, info = fields.pop("reward", None), fields.pop("done", False), fields.pop("metadata", {})
            return cls(fields, _reward(reward), bool(done), info=info)
        raise EnvError(f"step returned a {type(answer).__name__}, not a Step or (observation, reward, ..., info)")

    @classmethod
    def first(cls, answer: Any) -> Step:
        """The Step of what `reset` gives back: an observation, (observation, info), or an OpenEnv observation."""
        if isinstance(answer, Step) or hasattr(answer, "model_dump"):
            return cls.of(answer)
        observation, info = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        return cls(_observation(observation), None, info=info)

    @property
    def text(self) -> str:
        """The observation as a message to a model: of a map its `prompt`, else all of it as JSON."""
        if isinstance(self.observation, str):
            return self.observation
        prompt = self.observation.get("prompt")
        return prompt if isinstance(prompt, str) else json.dumps(self.observation, default=str)


def _observation(value: Any) -> str | Mapping[str, Any]:
    if isinstance(value, (str, Mapping)):
        return value
    raise EnvError(f"an observation is a text or a map, not a {type(value).__name__}")


def _reward(value: Any) -> float | None:
    return None if value is None else float(value)


class SessionEnvironment(Hosted):
    """Base of session environments: one instance per session, plain blocking methods.

    `reset` returns at once; `step` may take its time. Optional: `tasks(split)`, by default seeds without end;
    `demonstrate(task, messages)`; `close()`, called when the session is over. Served over WebSocket, a session may also
    have the attributes `tools`, `dataset_size` and `rubric_components`, which its state tells, and the parameters
    `row_index` and `evaluation` of `reset`.
    """

    def reset(self, seed: int, **data: Any) -> Any:
        """Begin a session; `data` is the task's own. Returns the first observation, which is the first user message."""
        raise NotImplementedError(f"{type(self).__name__} has no reset()")

    def step(self, action: str) -> Any:
        """The effect of one reply of the model: a Step, or what `Step.of` takes for one."""
        raise NotImplementedError(f"{type(self).__name__} has no step()")


class SessionRollout(Environment):
    """A session environment as a rollout: a fresh session per episode, its step rewards summed.

    `make` builds a session. The episode ends when the session is done, or when the model is out of turns or of context.
    Steps run in threads, so that one that takes its time holds up its own episode alone.
    """

    def __init__(self, make: Callable[[], Any], seed: int = 0) -> None:
        self.make, self.seed = make, seed
        probe = make()
        if hasattr(probe, "demonstrate"):
            self.demonstrate = probe.demonstrate
        self._own_tasks = getattr(probe, "tasks", None)
        self._steps = ThreadPoolExecutor(STEPS, "step")

    async def teardown(self) -> None:
        self._steps.shutdown()

    def tasks(self, split: Split) -> Iterable[Task]:
        if self._own_tasks is not None:
            return self._own_tasks(split)  # type: ignore[no-any-return]
        return Generated(lambda index: Task(str(index), {}, task_seed(self.seed, split, index)))

    async def rollout(self, task: Task, model: Model) -> Episode:
        session = self.make()
        try:
            first = Step.first(session.reset(task.seed, **task.data))
            return await converse(first, partial(self._step, session, action_model(session)), model)
        finally:
            if hasattr(session, "close"):
                session.close()

    async def _step(self, session: Any, action: Any, reply: str) -> Step:
        """In a thread; a cancelled episode waits for it, so that no session is closed while it steps."""
        taken = reply if action is None else action.model_validate({"message": reply})
        stepping = asyncio.get_running_loop().run_in_executor(self._steps, session.step, taken)
        return Step.of(await to_the_end(stepping))


def action_model(session: Any) -> Any:
    """The class that `step` names for its action, as OpenEnv environments do (a pydantic model); None for texts."""
    try:
        named = inspect.get_annotations(session.step, eval_str=True)
    except (NameError, TypeError):
        return None
    return next((kind for name, kind in named.items() if name != "return" and hasattr(kind, "model_validate")), None)


async def converse(first: Step, step: Callable[[str], Awaitable[Step]], model: Model) -> Episode:
    """An episode of a session: observations are the user's messages, replies the actions; the rewards are summed."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": first.text}]
    total, done = 0.0, False
    while not (done or model.exhausted):
        reply = (await model.chat.completions.create(messages=messages)).choices[0].message
        answer = await step(reply["content"])
        total, done = total + (answer.reward or 0.0), answer.done
        messages += [reply, {"role": "user", "content": answer.text}]
    stop = "done" if done else model.limit
    return Episode(total, {"steps": total}, {"turns": float(model.turns)}, stop, messages)


# ------------------------------------------------------------------------------------------------------- task sets


@dataclass(frozen=True, slots=True)
class Generated:
    """A task set made by index, so that no worker walks through it: `make(i)` for i < size, or without end.

    Example: Generated(lambda i: Task(str(i), {"text": "abc"}, seed=i), size=1000)[999]
    """

    make: Callable[[int], Task]
    size: int | None = None

    def __getitem__(self, index: int) -> Task:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(index)
        return self.make(index)

    def __iter__(self) -> Iterator[Task]:
        index = 0
        while self.size is None or index < self.size:
            yield self.make(index)
            index += 1


def task_seed(seed: int, split: str, index: int) -> int:
    """A 48-bit seed per task. Splits never share one: the lowest bit is the split. Equal on every machine."""
    digest = hashlib.blake2s(f"{seed}/{split}/{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") & ~1 | (split == "eval")


# --------------------------------------------------------------------------------------------------------- rewards


@dataclass(frozen=True, slots=True)
class Scorer:
    """One function of an episode; weight None makes it a metric, which is observed and not rewarded."""

    name: str
    function: Callable[..., float]
    weight: float | None


def reward(function: Callable[..., float], weight: float = 1.0, name: str | None = None) -> Scorer:
    """A weighted part of the reward. Example: reward(lcs_ratio, weight=0.8)"""
    return Scorer(name or function.__name__, function, weight)


def metric(function: Callable[..., float], name: str | None = None) -> Scorer:
    """An observation beside the reward. Example: metric(num_words)"""
    return Scorer(name or function.__name__, function, None)


class Rubric:
    """Scores an episode with all its functions, called with the same arguments.

    Example: Rubric(reward(lcs_ratio), metric(exact)).episode("cba", "cba").reward == 1.0
    """

    def __init__(self, *scorers: Scorer) -> None:
        self.scorers: Sequence[Scorer] = scorers

    def episode(self, *args: Any, stop_reason: str = "stop", messages: list[dict[str, Any]] | None = None) -> Episode:
        """An Episode whose reward is the weighted sum over the reward functions."""
        rewards = {s.name: s.weight * float(s.function(*args)) for s in self.scorers if s.weight is not None}
        metrics = {s.name: float(s.function(*args)) for s in self.scorers if s.weight is None}
        return Episode(sum(rewards.values()), rewards, metrics, stop_reason, messages)
