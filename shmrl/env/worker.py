"""`python -m shmrl.env.worker FD`: one worker process of an env server. It alone runs the environment's code.

Loads the environment, attaches to the arena, then runs rollouts side by side on one event loop. When an episode ends,
its branches are encoded straight into the arena by a thread, with the interpreter lock released where bytes move; only
references go back. FD is one end of a socket pair: when the server is gone, so are this process and its children.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import psutil
import setproctitle

from shmrl.arena import Arena, unlink
from shmrl.config.addresses import redacted
from shmrl.env import sandbox
from shmrl.env.chat import chat_format
from shmrl.env.death import die_with, exit_as_a_fork, inherit, keep_from_forks, tidy_after_the_dead
from shmrl.env.frames import failure, unloadable
from shmrl.env.interface import Environment, Episode
from shmrl.env.keep import Keeper
from shmrl.env.link import Link
from shmrl.env.model import Model, ModelSpec, ScriptedModel
from shmrl.env.progress import Progress
from shmrl.env.protocol import (
    KEEPS,
    MAX_TASKS,
    episode_to_wire,
    error_reply,
    expect,
    shares,
    task_from_wire,
    task_to_wire,
)
from shmrl.env.starting import log_of
from shmrl.env.threads import packed, put_the_loop_first
from shmrl.errors import ConfigError, EnvError, ProtocolError, ShmrlError
from shmrl.inference.client import EngineClient
from shmrl.monitor.log import setup
from shmrl.monitor.metrics import LoopLag
from shmrl.payload import SharedRows
from shmrl.types import EpisodeResult, ErrorInfo, Sample, Task
from shmrl.wire import pack, unpack, unpack_in_turns

log = logging.getLogger("shmrl.env.worker")
BEAT_S, LAG_TICK_S = 0.5, 0.05
TURN = 64  # tasks of an iterator that are read before others get their turn
MAX_AHEAD = 1 << 20  # tasks of an iterator that one request may skip: a resumed run has to, a mistake would for ever


class Worker:
    """Runs what the server sends. `settings` is the server's `start` message (see `pool.py`)."""

    def __init__(self, link: Link, settings: Mapping[str, Any], tasks: TaskSet, arena: Arena) -> None:
        self.link, self.settings, self.tasks, self.arena = link, settings, tasks, arena
        self.environment = tasks.environment
        self._running: dict[int, asyncio.Task[None]] = {}
        self._engines: dict[tuple[tuple[str, ...], tuple[str, ...], float], EngineClient] = {}
        limits = {"timeout_s": settings["timeout_s"], "on_full": settings["on_full"]}
        self._keeper = Keeper(arena, link, limits)
        self._seen: set[tuple[str, str]] = set()  # whose traceback is in the log
        self._lag = LoopLag(LAG_TICK_S)

    async def run(self) -> None:
        """Serve until the server hangs up or this task is cancelled; then end every episode and free what it kept."""
        beat, lag = asyncio.create_task(self._beat()), asyncio.create_task(self._lag.run())
        try:
            while (frame := await self.link.receive()) is not None:
                self._on_frame(*frame)
            exit_as_a_fork()
        finally:
            for task in (beat, lag, *self._running.values()):
                task.cancel()
            await asyncio.gather(beat, lag, *self._running.values(), return_exceptions=True)
            await asyncio.gather(*(engine.aclose() for engine in self._engines.values()))
            self._keeper.close()
            await self.link.flush()
            await self.environment.teardown()

    def _on_frame(self, number: int, kind: str, payload: bytes) -> None:
        if kind == "cancel":
            task = self._running.get(number)
            if task is not None:
                task.cancel()
            return
        if kind == "prefix":
            self._keeper.answered(number, payload)
            return
        task = asyncio.create_task(self._answer(number, kind, payload))
        self._running[number] = task
        task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        """A cancelled request replies here: its task may have been cancelled before it began, and then none of it ran
        (the request and its cancel were read at once)."""
        del self._running[number]
        if task.cancelled():
            self.link.send(number, "failed", error_reply(ErrorInfo("Cancelled", "the episode was cancelled")))

    async def _answer(self, number: int, kind: str, payload: bytes) -> None:
        """Exactly one reply per request, whatever happens to it; that of a cancelled one is `_ended`'s. What an
        environment raises to end the process, or a coroutine, ends its episode alone."""
        try:
            self.link.send(number, "reply", await getattr(self, f"_{kind}")(number, await unpack_in_turns(payload)))
        except TasksetFailed as error:
            self.link.send(0, "fatal", _fatal(self.settings["env_id"], error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            exit_as_a_fork()
            info = failure(error)
            what = info.message if isinstance(error, ShmrlError) else str(info)
            log.warning("%s failed: %s", kind, what, exc_info=self._is_news(error, info))
            self.link.send(number, "failed", error_reply(info))

    def _is_news(self, error: BaseException, info: ErrorInfo) -> bool:
        """Whether the log needs this traceback: it is not ours, and no other came from there."""
        if isinstance(error, ShmrlError) or (info.type, info.where) in self._seen:
            return False
        self._seen.add((info.type, info.where))
        return True

    async def _beat(self) -> None:
        """Tells the server that the loop turns, and how late it is."""
        me = psutil.Process()
        while True:
            await asyncio.sleep(BEAT_S)
            facts = {
                "loop_lag_ms": self._lag.quantiles_ms(),
                "rss_bytes": me.memory_info().rss,
                "running": len(self._running),
            }
            self.link.send(0, "beat", pack(facts))

    # -------------------------------------------------------------------------------------------------------- methods

    async def _tasks(self, _: int, request: dict[str, Any]) -> bytes:
        expect(request, "tasks", split=str, start=int, n=int)
        if min(request["start"], request["n"]) < 0:
            raise ProtocolError(f"tasks: start = {request['start']}, n = {request['n']}: both count from 0")
        if request["n"] > MAX_TASKS:  # they are made on the event loop, where every other episode would wait for them
            raise ProtocolError(f"tasks: n = {request['n']} at once; at most {MAX_TASKS}")
        found = await self.tasks.read(request["split"], request["start"], request["n"])
        return await packed({"success": True, "tasks": [task_to_wire(task) for task in found]})

    async def _run_rollout(self, number: int, request: dict[str, Any]) -> bytes:
        expect(request, "run_rollout", task=(dict, list), model=dict, seed=int, keep=str, tag=str)
        task, spec = task_from_wire(request["task"]), ModelSpec.from_wire(request["model"])
        keep, tag = request["keep"], request["tag"]
        progress = self._progress(number, request)
        model, episode = await self._play(task, spec, keep, request["seed"], progress)
        if progress is not None and keep != "eval":
            progress("storing", model)
        siblings = shares("run_rollout", request)
        if siblings:
            shared = await self._keeper.shared_by_group(model, tag, number)
        else:
            shared = await self._keeper.shared([] if keep == "eval" else [model], tag)
        samples: tuple[Sample, ...] = ()
        try:
            result = await self._result(task, model, episode, keep, tag, shared)
            samples = result.samples
        finally:
            shared.close(samples)
        if siblings:
            self._keeper.tell(number, shared, samples)
        return await packed(episode_to_wire(result))

    async def _run_group(self, number: int, request: dict[str, Any]) -> bytes:
        """One episode per seed; the environment's `score_group` sees those that succeeded, all at once."""
        expect(request, "run_group", task=(dict, list), model=dict, seeds=list, keep=str, tag=str)
        task, spec, keep = task_from_wire(request["task"]), ModelSpec.from_wire(request["model"]), request["keep"]
        async with asyncio.TaskGroup() as group:
            told = [self._progress(number, request, index) for index in range(len(request["seeds"]))]
            rollouts = [self._play(task, spec, keep, *one) for one in zip(request["seeds"], told, strict=True)]
            plays = [group.create_task(self._caught(play)) for play in rollouts]
        played = [play.result() for play in plays]
        score = getattr(self.environment, "score_group", None)
        if score is not None:
            await score([item[1] for item in played if not isinstance(item, ErrorInfo)])
        tag = request["tag"]
        models = [item[0] for item in played if not isinstance(item, ErrorInfo)]
        shared = await self._keeper.shared([] if keep == "eval" else models, tag)
        results: list[EpisodeResult] = []
        try:
            for index, item in enumerate(played):
                reply = item
                if not isinstance(item, ErrorInfo):
                    model, episode = item
                    reply = await self._caught(self._result(task, model, episode, keep, f"{tag}/{index}", shared))
                failed = isinstance(reply, ErrorInfo)
                results.append(EpisodeResult(False, task.id, error=reply) if failed else reply)
        finally:
            shared.close(sample for result in results for sample in result.samples)
        return await packed({"success": True, "episodes": [episode_to_wire(result) for result in results]})

    async def _caught(self, awaitable: Any) -> Any:
        """The result, or the failure as data."""
        try:
            return await awaitable
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return failure(error)

    # ------------------------------------------------------------------------------------------------------- episodes

    def _progress(self, number: int, request: Mapping[str, Any], episode: int = 0) -> Progress | None:
        """Who is told how an episode gets on, if anybody asked for it."""
        tell = partial(self.link.send, number, "delta")
        return Progress(tell, episode, texts=request["keep"] == "eval") if request.get("deltas") else None

    async def _play(
        self, task: Task, spec: ModelSpec, keep: str, seed: int, progress: Progress | None
    ) -> tuple[Model, Episode]:
        """One rollout. EnvError for a keep that is none, and for an Episode that is none."""
        if keep not in KEEPS:
            raise EnvError(f"keep = {keep!r}: expected one of {', '.join(KEEPS)}")
        model = self._model(task, spec, keep, seed)
        model.on_progress = progress
        episode = await self.environment.rollout(task, model)
        exit_as_a_fork()
        if progress is not None:
            progress("scoring", model)
        if not isinstance(episode, Episode):
            raise EnvError(f"rollout returned a {type(episode).__name__}, not an Episode")
        return model, episode

    def _model(self, task: Task, spec: ModelSpec, keep: str, seed: int) -> Model:
        chat, max_turns = chat_format(spec.tokenizer), self.settings["max_turns"]
        if keep == "warmup":
            demonstrate = getattr(self.environment, "demonstrate", None)
            if demonstrate is None:
                raise EnvError(
                    f"{redacted(self.settings['env_id'])} has no demonstrate(task, messages), which a warm-up needs"
                )
            return ScriptedModel(spec, chat, lambda messages: demonstrate(task, messages), max_turns=max_turns)
        if keep == "eval":  # nothing is trained on it, so nothing is captured
            spec = replace(spec, fields=(), head=0)
        return Model(spec, chat, self._engine(spec), seed=seed, max_turns=max_turns)

    def _engine(self, spec: ModelSpec) -> EngineClient:
        key = (spec.urls, spec.near, spec.timeout_s)
        if key not in self._engines:
            self._engines[key] = EngineClient(spec.urls, near=spec.near, timeout_s=spec.timeout_s)
        return self._engines[key]

    async def _result(
        self, task: Task, model: Model, episode: Episode, keep: str, tag: str, shared: SharedRows
    ) -> EpisodeResult:
        """The episode's scores, and references to its branches, which are in the arena from here on."""
        rewards, metrics = _numbers("rewards", episode.rewards), _numbers("metrics", episode.metrics)
        reward = _number("reward", episode.reward)
        stop_reason = episode.stop_reason if episode.stop_reason != "stop" else model.stop_reason
        start, end = model.versions
        meta = {"task": task.id, "reward": reward, "rewards": rewards, "stop_reason": stop_reason}
        samples = () if keep == "eval" else await self._keeper.store(model, meta, tag, shared)
        return EpisodeResult(
            success=True,
            task_id=task.id,
            reward=reward,
            rewards=rewards,
            metrics=metrics,
            stop_reason=stop_reason,
            num_turns=model.turns,
            num_tokens=model.num_tokens,
            version_start=start,
            version_end=end,
            samples=samples,
            messages=_messages(model, episode) if keep == "eval" else None,
        )


class TasksetFailed(Exception):
    """The task set raised (the cause); the run cannot go on with it."""


class TaskSet:
    """An environment's tasks by index: sequences are indexed, iterators are remembered as far as they were read."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._sets: dict[str, Any] = {}
        self._read: dict[str, tuple[list[Task], Iterator[Task]]] = {}

    async def read(self, split: str, start: int, n: int) -> list[Task]:
        """Tasks start .. start + n, fewer at the end. TasksetFailed, with what the environment raised as its cause;
        ProtocolError for more than MAX_AHEAD of an iterator at once."""
        known = len(self._read[split][0]) if split in self._read else 0
        try:
            if split not in self._sets:
                self._sets[split] = self.environment.tasks(split)  # type: ignore[arg-type]
            tasks = self._sets[split]
            indexed = hasattr(tasks, "__getitem__")
            if indexed or start + n - known <= MAX_AHEAD:
                return list(_slice(tasks if indexed else await self._known(split, start + n), start, n))
        except Exception as error:
            raise TasksetFailed(f"task set {split!r} raised") from error
        raise ProtocolError(
            f"tasks: start = {start}, and {known} tasks of {split!r} were read so far. It is an iterator, of which at "
            f"most {MAX_AHEAD} are read at once: the environment may give a sequence instead (shmrl.env.Generated)"
        )

    async def _known(self, split: str, count: int) -> list[Task]:
        """The first tasks of an iterator, `count` if there are as many; the event loop turns meanwhile."""
        known, rest = self._read.setdefault(split, ([], iter(self._sets[split])))
        while len(known) < count and (task := next(rest, None)) is not None:
            known.append(task)
            if len(known) % TURN == 0:
                await asyncio.sleep(0)
        return known


def _slice(tasks: Any, start: int, n: int) -> Iterator[Task]:
    for index in range(start, start + n):
        try:
            yield tasks[index]
        except IndexError:
            return


def _messages(model: Model, episode: Episode) -> tuple[dict[str, Any], ...]:
    if episode.messages is not None:
        return tuple(dict(message) for message in episode.messages)
    return tuple(model.conversations[-1].messages) if model.conversations else ()


def _numbers(what: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(f"{what}.{name}", value) for name, value in values.items()}


def _number(what: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise EnvError(f"{what} is {number}: a finite number is needed")
    return number


# ---------------------------------------------------------------------------------------------------------- process


def _fatal(env_id: str, error: BaseException) -> bytes:
    """Why this worker cannot serve, for every client that waits; the log has the traceback. A configuration error needs
    none."""
    cause = error.__cause__ if isinstance(error, TasksetFailed) and error.__cause__ else error
    if isinstance(cause, ConfigError):
        return pack({"problems": cause.problems})
    log.error("%s cannot be loaded", redacted(env_id), exc_info=cause)
    return pack({"raised": unloadable(redacted(env_id), cause)})


async def _load(settings: Mapping[str, Any]) -> TaskSet:
    """The environment, set up, and its tasks, the first one read: what is wrong with them shows before any episode."""
    sandbox.use(settings["sandbox"])
    registry = import_module("shmrl.envs.registry")  # environments stand above this room: they are met by name only
    environment: Environment = registry.load(settings["env_id"], settings["env_args"])
    await environment.setup()
    tasks = TaskSet(environment)
    if not await tasks.read(settings["split"], 0, 1):
        raise EnvError(f"the task set of split {settings['split']!r} is empty")
    return tasks


async def _main(end: socket.socket) -> int:
    link = await Link.over(end)
    first = await link.receive()
    if first is None:
        return 1
    settings = unpack(first[2])
    setproctitle.setproctitle(f"shmrl:env-worker {settings['name']}/{settings['slot']}")
    setup(f"{settings['name']}/{settings['slot']}", log_of(settings))
    try:
        tasks = await _load(settings)
    except Exception as error:
        link.send(0, "fatal", _fatal(settings["env_id"], error))
        await link.flush()
        await link.close()
        return 1
    with Arena.attach(settings["arena"]) as arena:
        if settings["own_arena"]:
            inherit(partial(unlink, settings["arena"]))
        facts = {
            "demonstrates": hasattr(tasks.environment, "demonstrate"),
            "scores_groups": hasattr(tasks.environment, "score_group"),
        }
        put_the_loop_first()
        link.send(0, "ready", pack(facts))
        serving = asyncio.create_task(Worker(link, settings, tasks, arena).run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        await asyncio.gather(serving, return_exceptions=True)
    tidy_after_the_dead()
    await link.close()
    return 0


def main(argv: list[str]) -> int:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when its workers stop
    end = socket.socket(fileno=int(argv[0]))
    end.set_inheritable(False)
    keep_from_forks(end)
    die_with(end)
    return asyncio.run(_main(end))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
