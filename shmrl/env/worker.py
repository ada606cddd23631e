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
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any

import psutil
import setproctitle

from shmrl.arena import Arena
from shmrl.arena.waiting import giving_up
from shmrl.config.addresses import redacted
from shmrl.config.tables import Log
from shmrl.env import sandbox
from shmrl.env.chat import chat_format
from shmrl.env.death import die_with
from shmrl.env.interface import Environment, Episode
from shmrl.env.link import Link
from shmrl.env.model import Model, ModelSpec, ScriptedModel
from shmrl.env.protocol import KEEPS, MAX_TASKS, episode_to_wire, error_reply, expect, task_from_wire, task_to_wire
from shmrl.errors import EnvError, ProtocolError, ShmrlError
from shmrl.inference.client import EngineClient
from shmrl.monitor.log import setup
from shmrl.payload import SharedRows, encode
from shmrl.types import EpisodeResult, ErrorInfo, Sample, Task
from shmrl.wire import pack, unpack

log = logging.getLogger("shmrl.env.worker")
BEAT_S = 0.5
TURN = 64  # tasks of an iterator that are read before others get their turn
MAX_AHEAD = 1 << 20  # tasks of an iterator that one request may skip: a resumed run has to, a mistake would for ever
ENCODERS = 4
"""Threads that encode. More would only queue for the two things they share: memory bandwidth and space in the arena."""


class Worker:
    """Runs what the server sends. `settings` is the server's `start` message (see `pool.py`)."""

    def __init__(self, link: Link, settings: Mapping[str, Any], tasks: TaskSet, arena: Arena) -> None:
        self.link, self.settings, self.tasks, self.arena = link, settings, tasks, arena
        self.environment = tasks.environment
        self._running: dict[int, asyncio.Task[None]] = {}
        self._engines: dict[tuple[tuple[str, ...], float], EngineClient] = {}
        self._encoders = ThreadPoolExecutor(ENCODERS, "encode")
        self._lag_s = 0.0

    async def run(self) -> None:
        """Serve until the server hangs up or this task is cancelled; then end every episode and free what it kept."""
        beat = asyncio.create_task(self._beat())
        try:
            while (frame := await self.link.receive()) is not None:
                self._on_frame(*frame)
        finally:
            beat.cancel()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(beat, *self._running.values(), return_exceptions=True)
            await asyncio.gather(*(engine.aclose() for engine in self._engines.values()))
            self._encoders.shutdown()
            await self.link.flush()
            await self.environment.teardown()

    def _on_frame(self, number: int, kind: str, payload: bytes) -> None:
        if kind == "cancel":
            task = self._running.get(number)
            if task is not None:
                task.cancel()
            return
        task = asyncio.create_task(self._answer(number, kind, payload))
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def _answer(self, number: int, kind: str, payload: bytes) -> None:
        """Exactly one reply per request, whatever happens to it."""
        try:
            self.link.send(number, "reply", await getattr(self, f"_{kind}")(unpack(payload)))
        except asyncio.CancelledError:
            self.link.send(number, "failed", error_reply(ErrorInfo("Cancelled", "the episode was cancelled")))
        except TasksetFailed as error:
            self.link.send(0, "fatal", _fatal(error.__cause__ or error))
        except Exception as error:
            log.warning(
                "%s failed: %s: %s", kind, type(error).__name__, error, exc_info=not isinstance(error, ShmrlError)
            )
            self.link.send(number, "failed", error_reply(error))

    async def _beat(self) -> None:
        """Tells the server that the loop turns, and how late it is."""
        me = psutil.Process()
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            self._lag_s = time.monotonic() - before - BEAT_S
            facts = {"lag_ms": 1000 * self._lag_s, "rss_bytes": me.memory_info().rss, "running": len(self._running)}
            self.link.send(0, "beat", pack(facts))

    # -------------------------------------------------------------------------------------------------------- methods

    async def _tasks(self, request: dict[str, Any]) -> bytes:
        expect(request, "tasks", split=str, start=int, n=int)
        if min(request["start"], request["n"]) < 0:
            raise ProtocolError(f"tasks: start = {request['start']}, n = {request['n']}: both count from 0")
        if request["n"] > MAX_TASKS:  # they are made on the event loop, where every other episode would wait for them
            raise ProtocolError(f"tasks: n = {request['n']} at once; at most {MAX_TASKS}")
        found = await self.tasks.read(request["split"], request["start"], request["n"])
        return pack({"success": True, "tasks": [task_to_wire(task) for task in found]})

    async def _run_rollout(self, request: dict[str, Any]) -> bytes:
        expect(request, "run_rollout", task=(dict, list), model=dict, seed=int, keep=str, tag=str)
        task, spec = task_from_wire(request["task"]), ModelSpec.from_wire(request["model"])
        keep, tag = request["keep"], request["tag"]
        model, episode = await self._play(task, spec, keep, request["seed"])
        shared = await self._shared([model], keep, tag)
        samples: tuple[Sample, ...] = ()
        try:
            result = await self._result(task, model, episode, keep, tag, shared)
            samples = result.samples
        finally:
            shared.close(samples)
        return pack(episode_to_wire(result))

    async def _run_group(self, request: dict[str, Any]) -> bytes:
        """One episode per seed; the environment's `score_group` sees those that succeeded, all at once."""
        expect(request, "run_group", task=(dict, list), model=dict, seeds=list, keep=str, tag=str)
        task, spec, keep = task_from_wire(request["task"]), ModelSpec.from_wire(request["model"]), request["keep"]
        async with asyncio.TaskGroup() as group:
            plays = [group.create_task(self._caught(self._play(task, spec, keep, seed))) for seed in request["seeds"]]
        played = [play.result() for play in plays]
        score = getattr(self.environment, "score_group", None)
        if score is not None:
            await score([item[1] for item in played if not isinstance(item, ErrorInfo)])
        tag = request["tag"]
        shared = await self._shared([item[0] for item in played if not isinstance(item, ErrorInfo)], keep, tag)
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
        return pack({"success": True, "episodes": [episode_to_wire(result) for result in results]})

    async def _caught(self, awaitable: Any) -> Any:
        """The result, or the failure as data."""
        try:
            return await awaitable
        except Exception as error:
            return ErrorInfo.of(error)

    # ------------------------------------------------------------------------------------------------------- episodes

    async def _play(self, task: Task, spec: ModelSpec, keep: str, seed: int) -> tuple[Model, Episode]:
        """One rollout. EnvError for a keep that is none, and for an Episode that is none."""
        if keep not in KEEPS:
            raise EnvError(f"keep = {keep!r}: expected one of {', '.join(KEEPS)}")
        model = self._model(task, spec, keep, seed)
        episode = await self.environment.rollout(task, model)
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
        return Model(spec, chat, self._engine(spec.urls, spec.timeout_s), seed=seed, max_turns=max_turns)

    def _engine(self, urls: tuple[str, ...], timeout_s: float) -> EngineClient:
        key = (urls, timeout_s)
        if key not in self._engines:
            self._engines[key] = EngineClient(urls, timeout_s=timeout_s)
        return self._engines[key]

    async def _shared(self, models: Sequence[Model], keep: str, tag: str) -> SharedRows:
        """What the request's branches have in common, found in a thread: routing is compared byte for byte."""
        if keep == "eval" or sum(len(model.conversations) for model in models) < 2:
            return SharedRows(self.arena, tag, {})

        def find() -> SharedRows:
            return SharedRows(self.arena, tag, dict(pair for model in models for pair in model.openings().items()))

        return await asyncio.get_running_loop().run_in_executor(self._encoders, find)

    async def _result(
        self, task: Task, model: Model, episode: Episode, keep: str, tag: str, shared: SharedRows
    ) -> EpisodeResult:
        """The episode's scores, and references to its branches, which are in the arena from here on."""
        rewards, metrics = _numbers("rewards", episode.rewards), _numbers("metrics", episode.metrics)
        reward = _number("reward", episode.reward)
        stop_reason = episode.stop_reason if episode.stop_reason != "stop" else model.stop_reason
        start, end = model.versions
        meta = {"task": task.id, "reward": reward, "rewards": rewards, "stop_reason": stop_reason}
        samples = () if keep == "eval" else await self._keep(model, meta, tag, shared)
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

    async def _keep(self, model: Model, meta: dict[str, Any], tag: str, shared: SharedRows) -> tuple[Sample, ...]:
        """Encode in a thread; a cancelled episode waits for it, so that its failure is told after its last block."""
        wanted = threading.Event()
        wanted.set()
        storing = asyncio.get_running_loop().run_in_executor(
            self._encoders, self._store, model, meta, tag, shared, wanted
        )
        try:
            return await asyncio.shield(storing)
        except asyncio.CancelledError:
            wanted.clear()  # if it waits for space, others need that more
            await asyncio.wait([storing])
            storing.exception()  # its failure was asked for
            raise

    def _store(
        self, model: Model, meta: dict[str, Any], tag: str, shared: SharedRows, wanted: threading.Event
    ) -> tuple[Sample, ...]:
        """All branches or none: if one does not validate or finds no space, its siblings' own blocks are freed."""
        samples: list[Sample] = []
        limits = {"timeout_s": self.settings["timeout_s"], "on_full": self.settings["on_full"]}
        try:
            with giving_up(wanted):
                for index, branch in enumerate(model.branches(meta)):
                    prefix = shared.prefix((model, index), **limits)
                    samples.append(encode(self.arena, branch, tag, prefix, **limits))
        except BaseException:
            self.arena.free([sample.segments[-1][0] for sample in samples])
            raise
        return tuple(samples)


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


def _fatal(error: BaseException) -> bytes:
    """Why this worker cannot serve, for every client that waits."""
    text = "".join(traceback.format_exception(error))
    return pack({"traceback": text.encode("utf-8", "replace").decode()[-16384:]})


async def _load(settings: Mapping[str, Any]) -> TaskSet:
    """The environment, set up, and its tasks, the first one read: what is wrong with them shows before any episode."""
    sandbox.use(settings["sandbox"])
    registry = import_module("shmrl.envs.registry")  # environments stand above this room: they are met by name only
    environment: Environment = registry.load(settings["env_id"], settings["env_args"])
    await environment.setup()
    tasks = TaskSet(environment)
    if not await tasks.read(settings["split"], 0, 1):
        raise EnvError(f"{redacted(settings['env_id'])}: the task set of split {settings['split']!r} is empty")
    return tasks


async def _main(end: socket.socket) -> int:
    link = await Link.over(end)
    first = await link.receive()
    if first is None:
        return 1
    settings = unpack(first[2])
    setproctitle.setproctitle(f"shmrl:env-worker {settings['name']}/{settings['slot']}")
    setup(f"{settings['name']}/{settings['slot']}", Log(level=settings["log_level"], json=settings["log_json"]))
    try:
        tasks = await _load(settings)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, TasksetFailed) and error.__cause__ else error
        log.error("%s cannot be loaded", redacted(settings["env_id"]), exc_info=cause)
        link.send(0, "fatal", _fatal(cause))
        await link.flush()
        await link.close()
        return 1
    with Arena.attach(settings["arena"]) as arena:
        facts = {
            "demonstrates": hasattr(tasks.environment, "demonstrate"),
            "scores_groups": hasattr(tasks.environment, "score_group"),
        }
        link.send(0, "ready", pack(facts))
        serving = asyncio.create_task(Worker(link, settings, tasks, arena).run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        await asyncio.gather(serving, return_exceptions=True)
    await link.close()
    return 0


def main(argv: list[str]) -> int:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when its workers stop
    end = socket.socket(fileno=int(argv[0]))
    end.set_inheritable(False)
    die_with(end)
    return asyncio.run(_main(end))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
