"""Tasksets of verifiers v1 (0.4): `env.id = "verifiers:<taskset>"`, `env.args` = verifiers' own `[env]` table.

verifiers runs the episode (its harness, interception, tools, rewards) and sends every model call to the worker's
endpoint, with the id of the call's trace. Each trace is one agent's part of the episode and has a model of its own;
what the trainable ones recorded becomes the episode's branches. Roles run on this host (`runtime = subprocess`), in the
chat loop of `chat.py`, unless the taskset or `env.args` say otherwise. Runs in the env workers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes import PrimeConfig
from verifiers.v1.types import Sampling
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

from shmrl.env.endpoint import Endpoint, Session
from shmrl.env.interface import Environment, Episode, Split
from shmrl.env.model import Model
from shmrl.envs.verifiers import PREFIX, chat, quiet
from shmrl.envs.verifiers.records import finished
from shmrl.errors import ConfigError
from shmrl.types import Task

KEY_VARIABLE = "SHMRL_ENDPOINT_API_KEY"
"""Where verifiers' client finds the endpoint's key; programs of its subprocess runtime get no variable named so."""
TRACE = dict.fromkeys(("id", "ok", "rewards", "metrics", "stop_condition", "errors"), True)
RECORD = {"ok": True, "errors": True, "traces": {"__all__": {**TRACE, "agent": {"name", "trainable"}}}}
"""What `records` reads of an episode: no messages, whose size grows with it."""


class Taskset(Environment):
    """A taskset with the environment that verifiers pairs it with."""

    def __init__(self, taskset_id: str, /, **args: Any) -> None:
        chat.register()
        quiet()
        try:
            config = resolve_env_config(env_config(taskset_id, args))
        except ValueError as error:
            raise ConfigError(f"env id {PREFIX + taskset_id!r}: env.args: {error}") from None
        self.env = load_environment(config)
        self._task = type(self.env.taskset).task_type()
        self._data = self._task.data_type()
        self.endpoint = Endpoint()
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        lost = [name for name, field in self._data.model_fields.items() if field.exclude]
        if lost:
            raise ConfigError(
                f"env id {PREFIX + taskset_id!r}: {self._data.__name__} excludes {', '.join(lost)} from its dump, and "
                "tasks travel as one"
            )

    async def setup(self) -> None:
        await self.endpoint.start()
        os.environ[KEY_VARIABLE] = self.endpoint.key
        self._client = EvalClientConfig(base_url=self.endpoint.url, api_key_var=KEY_VARIABLE)
        ready = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((waiting, self._serving), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            self._serving.result()

    async def _serve(self, ready: asyncio.Event) -> None:
        """verifiers' shared tools and interception, entered and left by one task."""
        async with self.env.serving():
            ready.set()
            await self._stopping.wait()

    async def teardown(self) -> None:
        self._stopping.set()
        if self._serving is not None:
            await self._serving
        await self.endpoint.stop()

    def tasks(self, split: Split) -> Iterable[Task]:
        """The same for both splits: verifiers' tasksets have none, but may take one in `args.taskset`."""
        return self._tasks()

    def _tasks(self) -> Iterator[Task]:
        for task in self.env.taskset:
            yield Task(str(task.data.idx), task.data.model_dump(mode="json"), task.data.idx)

    async def rollout(self, task: Task, model: Model) -> Episode:
        rebuilt = self._task(self._data.model_validate(task.data), self.env.config.taskset.task)
        sampling = {key: model.spec.sampling.get(key) for key in ("temperature", "top_p", "max_tokens")}
        context = ModelContext(model=model.spec.name, client=self._client, sampling=Sampling(**sampling))
        parts: dict[str, Session] = {}

        def minted(trace: Any) -> None:
            parts[trace.id] = self.endpoint.open(trace.id, model.part(len(parts)))

        (slot,) = self.env.slots(rebuilt)
        try:
            episode = await self.env.run_slot(slot, context, on_trace=minted)
        finally:
            for name in parts:
                self.endpoint.close(name)
        record = episode.model_dump(mode="json", include=RECORD)
        return finished(record, parts, model)


def env_config(taskset_id: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """verifiers' `[env]` table: `args`, and for each role what a run on this host needs where nothing is said."""
    config = {**args, "taskset": {**args.get("taskset", {}), "id": taskset_id}}
    own_harness = default_harness_id(taskset_id) != "bash"
    for name, field in env_config_type(taskset_id, config.get("id") or "").model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        role = dict(config.get(name) or {})
        if isinstance(field.default.runtime, PrimeConfig):
            role.setdefault("runtime", {"type": "subprocess"})
        given = field.default.harness
        if (given is None and not own_harness) or (given is not None and given.id == "null"):
            role.setdefault("harness", {"id": chat.NAME})
        config[name] = role
    return config
