"""An environment of shmrl as one of NeMo Gym's: an env server with its workers, and a client of it, in this process.

A request's task is `task_input.task_data` (and what stands beside it); without any it is task number `task_id` of the
split that the taskset names (`<environment>:train`, `<environment>:eval`). Training keeps arrays in the arena and a
result refers to them (`shmrl_payload`), until the lease ends; an evaluation has the messages in its `response`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from shmrl import errors
from shmrl.arena import Arena
from shmrl.config import EnvServerConfig, Sampling
from shmrl.config.gym import EpisodeTable, Limits, Reference
from shmrl.config.load import validated
from shmrl.config.nesting import Instance, Nesting, server_url
from shmrl.config.sources import EnvSpec
from shmrl.config.tables import HostPort
from shmrl.env.chat import chat_format
from shmrl.env.client import EnvClient
from shmrl.env.episodes.episodes import Course
from shmrl.env.episodes.leases import Leases, payload_to_json
from shmrl.env.episodes.protocol import Protocol
from shmrl.env.episodes.servers import Servers
from shmrl.env.episodes.telemetry import Counted
from shmrl.env.episodes.wire import EpisodeFailed, EpisodeRequest, Failure, Stage
from shmrl.env.server import EnvServer
from shmrl.errors import ArenaError, ConfigError, EnvError, ServerDied, ShmrlError
from shmrl.node.host import read_token
from shmrl.types import EpisodeResult, ErrorInfo, Task

log = logging.getLogger(__name__)
SPLITS = ("train", "eval")
HOPELESS = ("ProtocolError", "ConfigError", "TasksetError")
"""Failures of ours that another attempt would meet again."""
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""A request's responses_create_params, and what they are called here."""


class OwnTable(EpisodeTable):
    """`shmrl` in a nesting: what an env server's file says, where Gym's keys leave room for it.

    model: as `[gym.model]`; its urls and name may come from `model_server` (its base_url, or host and port, and model).
    serve, arena: as the tables of these names. num_workers: worker processes.
    """

    env: EnvSpec
    split: Literal["train", "eval"] = "train"
    model: dict[str, Any]
    model_server: Reference | None = None
    blocks: HostPort | None = None
    serve: dict[str, Any] = Field(default_factory=dict)
    arena: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def block_of(cls, config: EnvServerConfig) -> dict[str, Any]:
        """The block that says what an env server's file with [gym] says."""
        assert config.gym is not None
        assert config.serve.http is not None
        host, _, port = config.serve.http.rpartition(":")
        gym = config.gym.model_dump(mode="json", exclude={"head"}, exclude_none=True)
        parts = config.model_dump(mode="json", include={"env", "split", "serve", "arena"}, exclude_none=True)
        serve = {key: value for key, value in parts.pop("serve").items() if key not in ("protocols", "http")}
        return {"entrypoint": "app.py", "host": host.strip("[]"), "port": int(port), **gym, **parts, "serve": serve}

    def env_server_config(self, instance: Instance, nesting: Nesting) -> EnvServerConfig:
        """The whole as an env server's configuration. ConfigError."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        serve = {**self.serve, "protocols": ["gym"], "http": f"{host}:{self.port}"}
        if self.num_workers is not None:
            serve["pool"] = {"workers": self.num_workers}
        limits = {key: getattr(self, key) for key in Limits.model_fields}
        tree = {
            "name": instance.name,
            "split": self.split,
            "env": self.env.model_dump(exclude_none=True),
            "serve": serve,
            "gym": {**limits, "blocks": self.blocks, "model": {**self._policy(nesting), **self.model}},
            "arena": self.arena,
        }
        try:
            return validated(EnvServerConfig, tree)
        except ConfigError as error:
            raise ConfigError([f"{instance.path}: {problem}" for problem in error.problems]) from None

    def _policy(self, nesting: Nesting) -> dict[str, Any]:
        if self.model_server is None:
            return {}
        url = server_url(nesting.url(self.model_server))
        name = nesting.instances[self.model_server.name].block.get("model")
        return {"urls": [url]} | ({"name": name} if isinstance(name, str) else {})


class OwnEnvironment(Protocol):
    """`shmrl`."""

    Table: ClassVar[type[EpisodeTable]] = OwnTable
    table: OwnTable

    def __init__(self, instance: Instance, table: OwnTable, servers: Servers, counted: Counted) -> None:
        super().__init__(instance, table, servers, counted)
        self.config = table.env_server_config(instance, servers.nesting)
        assert self.config.gym is not None
        self.gym = self.config.gym
        self._numbers = itertools.count()
        self._server: EnvServer | None = None
        self._client: EnvClient | None = None
        self._arena: Arena | None = None
        self._directory: Path | None = None

    async def start(self) -> None:
        """Returns when a worker has loaded the environment. ConfigError, TasksetError, WorkerDied, PortInUse."""
        config = self.config
        await asyncio.to_thread(self._check_model)
        self._directory = Path(tempfile.mkdtemp(prefix="shmrl-gym-"))  # 0700
        address = config.serve.address or f"ipc://{self._directory}/env.sock"
        serve = config.serve.model_copy(update={"protocols": [], "http": self.gym.blocks, "address": address})
        plain = config.model_copy(update={"serve": serve, "gym": None})
        self._server = server = EnvServer(config.env.id, config.env.args, address, config=plain)
        self._serving = asyncio.create_task(server.run())
        bound = asyncio.create_task(server.bound.wait())
        await asyncio.wait([self._serving, bound], return_when=asyncio.FIRST_COMPLETED)
        bound.cancel()
        if self._serving.done():
            self._serving.result()
        self._client = EnvClient(server.address, read_token(config.arena))
        await self._client.connect()
        self._remove_directory()  # nobody else is to connect, and a process that is killed leaves nothing
        self._info = await self._client.info()
        self._arena = Arena.attach(self._info["arena"])
        self._leases = Leases(self._arena, config.serve.lease_s, self.counted)

    def _check_model(self) -> None:
        """ConfigError now, not a failure of every episode later."""
        try:
            chat_format(self.gym.model.tokenizer)
        except EnvError as error:
            raise ConfigError(f"{self.instance.path}: model.tokenizer: {error}") from None

    async def ended(self) -> None:
        await asyncio.wait([self._serving])
        self._serving.result()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._arena is not None:
            self._leases.close()
            self._arena.close()
        if self._server is not None:
            await self._server.close()
            await asyncio.wait([self._serving])
            if not self._serving.cancelled() and (error := self._serving.exception()) is not None:
                log.debug("the env server had ended: %s", error)  # `start` or `ended` raised it
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    # ------------------------------------------------------------------------------------------------------- episodes

    async def run(self, request: EpisodeRequest, course: Course) -> Mapping[str, Any]:
        course.stage = "seed"
        split = self._split(request)
        task = await self._task(request, split)
        spec = self._model(request)
        course.stage = "agent"
        result = await self._rollout(task, spec, split, course)
        answer: dict[str, Any] = {
            "reward": result.reward,
            "rewards": result.rewards,
            "metrics": result.metrics,
            "stop_reason": result.stop_reason,
            "num_turns": result.num_turns,
            "num_tokens": result.num_tokens,
        }
        given = request.task.task_input.get("responses_create_params")
        if isinstance(given, dict):
            answer["responses_create_params"] = given
        if result.messages is not None:
            answer["response"] = self._response(result, course)
        if result.samples:
            self._keep(result, course)
            where = self._info["arena"], self._info["node"], self._leases.lease_s
            answer["shmrl_payload"] = payload_to_json(result.samples, *where)
        return answer

    def _split(self, request: EpisodeRequest) -> str:
        named = request.task.task_id.taskset.rpartition(":")[2]
        return named if named in SPLITS else self.config.split

    async def _task(self, request: EpisodeRequest, split: str) -> Task:
        """The task of a request. EpisodeFailed, at the stage `seed`, for one that there is not."""
        name, given = request.task.task_id, request.task.task_input
        rest = {key: value for key, value in given.items() if key not in ("task_data", "responses_create_params")}
        own = given.get("task_data") or {}
        if not isinstance(own, dict):
            raise _hopeless(f"task_input.task_data is a {type(own).__name__}, not a map")
        data = {**rest, **own}
        if data:
            return Task(name.task_id, data, _seed(f"{name.taskset}/{name.task_id}"))
        if not name.task_id.isdigit():
            raise _hopeless(f"task {name.task_id!r} has no task_data, and is no number of a task of {split!r}")
        assert self._client is not None
        try:
            found = await self._client.tasks(split, int(name.task_id), 1)
        except EnvError as error:
            raise _told(ErrorInfo.of(error), "seed") from error
        if not found:
            raise _hopeless(f"{split!r} has no task number {name.task_id}")
        return found[0]

    def _model(self, request: EpisodeRequest) -> dict[str, Any]:
        """The `model` map of the rollout: as configured, its sampling as the request wants it."""
        model, given = self.gym.model, request.task.task_input.get("responses_create_params")
        wanted = given if isinstance(given, dict) else {}
        changes = {ours: wanted[key] for key, ours in SAMPLING.items() if wanted.get(key) is not None}
        try:
            sampling = validated(Sampling, {**model.sampling.model_dump(), **changes})
        except ConfigError as error:
            raise _hopeless(f"responses_create_params: {error}") from None
        return {**model.model_dump(exclude={"sampling"}), "sampling": sampling.model_dump()}

    async def _rollout(self, task: Task, spec: dict[str, Any], split: str, course: Course) -> EpisodeResult:
        """The episode itself; its cancellation reaches the worker, which frees what it kept. EpisodeFailed."""
        assert self._client is not None
        number = next(self._numbers)
        try:
            result = await self._client.run_rollout(
                task,
                model=spec,
                group_id=course.capture_key,
                seed=_seed(course.capture_key),
                keep=split,
                tag=f"gym/{self.config.name}/{number}/0",
            )
        except EnvError as error:
            raise _told(ErrorInfo.of(error), "agent") from error
        if not result.success:
            assert result.error is not None
            raise _told(result.error, "agent")
        return result

    def _keep(self, result: EpisodeResult, course: Course) -> None:
        try:
            self._leases.keep(result.samples)
        except ArenaError as error:
            raise _told(ErrorInfo.of(error), course.stage) from error

    def _response(self, result: EpisodeResult, course: Course) -> dict[str, Any]:
        """The conversation as a response of OpenAI's Responses API: everything from the first reply on."""
        messages = list(result.messages or ())
        first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
        return {
            "id": f"resp_{course.capture_key}",
            "created_at": time.time(),
            "model": self.gym.model.name,
            "object": "response",
            "output": [_item(f"msg_{i}", message) for i, message in enumerate(messages[first:])],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "status": "completed",
        }


def _item(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    text, role = str(message.get("content") or ""), message.get("role")
    if role != "assistant":
        return {"type": "message", "role": str(role), "content": text}
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": name, "role": "assistant", "status": "completed", "content": content}


def _seed(text: str) -> int:
    """31 bits that only depend on the text."""
    return int.from_bytes(hashlib.blake2s(text.encode(errors="replace"), digest_size=4).digest(), "little") >> 1


def _hopeless(reason: str) -> EpisodeFailed:
    return EpisodeFailed(Failure.of(reason, terminal=True, stage="seed"))


def _told(error: ErrorInfo, stage: Stage) -> EpisodeFailed:
    """The failure of an episode. What failed of shmrl may not fail again; an error of the environment will."""
    kind = getattr(errors, error.type, None)
    ours = isinstance(kind, type) and issubclass(kind, ShmrlError)
    if error.type == "WorkerDied":
        name = "kill_shaped"
    elif error.type == ServerDied.__name__:
        name = "shutdown"
    elif error.type == "Cancelled":
        ours, name = True, "cancelled"
    else:
        name = f"shmrl:{_snake(error.type)}" if ours else "agent_run_error"
    reason = f"{error.type}: {error.message}"
    return EpisodeFailed(
        Failure.of(reason, terminal=not ours or error.type in HOPELESS, stage=stage, failure_kind=name)
    )


def _snake(name: str) -> str:
    """Example: "EngineError" -> "engine_error" """
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")
