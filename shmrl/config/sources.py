"""A source of the configuration: which environment, how it is served, how its tokens are drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shmrl.config.addresses import redacted
from shmrl.config.tables import Address, Count, HostPort, Name, Positive, Table, Url, reachable


class Sampling(Table):
    """`sampling`: how a source's tokens are drawn. Truncated sampling needs top_k, which bounds its masks."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest ids that have this much together; below 1 it needs top_k."""
    top_k: int = -1
    """Draw from this many likeliest ids; -1: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw from ids at least this likely, relative to the likeliest; above 0 it needs top_k."""
    max_tokens: Positive = 128
    """Of one reply."""

    @property
    def truncated(self) -> bool:
        """True when some ids can be excluded, so that every sampled token needs its kept set."""
        return self.top_p < 1 or self.min_p > 0 or self.top_k > 0

    @model_validator(mode="after")
    def _bounded(self) -> Sampling:
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k = {self.top_k}: use -1 for no limit, or a positive number")
        if (self.top_p < 1 or self.min_p > 0) and self.top_k < 1:
            raise ValueError(
                f"truncated sampling (top_p = {self.top_p}, min_p = {self.min_p}) without top_k: the sampler's kept "
                "set would have no bound; set top_k (for example 64)"
            )
        return self


REMOTE = "openenv:"


def remote_urls(env_id: str) -> list[str]:
    """The URLs of an env id that is remote; else an empty list. Example: "openenv:http://a:8000,http://b:8000" """
    urls = env_id.removeprefix(REMOTE).split(",") if env_id.startswith(REMOTE) else []
    return urls if all(re.match(r"https?://[^\s/]", url) for url in urls) else []


class EnvSpec(Table):
    """`env`: which environment, and its arguments."""

    id: str
    """A bundled name, `module:attribute`, `verifiers:<taskset>`, `gem:<id>` or `openenv:<url>[,<url>...]`."""
    url: Url | list[Url] | None = None
    """One server's address or several's, a short way to write `id = "openenv:..."`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    max_turns: Positive | None = None
    """Most turns of an episode; required of what someone else runs: nobody here knows when it would end."""

    @property
    def urls(self) -> list[str]:
        """Of the servers that someone else runs; empty for an environment of this machine."""
        return remote_urls(self.id)

    @property
    def evaluations(self) -> int:
        """Sessions that a remote environment's evaluations share."""
        return int(self.args.get("evaluation_sessions", 1))

    def without_secrets(self) -> EnvSpec:
        """The same, to be shown or kept: its URLs end after their hosts."""
        return self.model_copy(update={"id": redacted(self.id), "url": None})

    @model_validator(mode="before")
    @classmethod
    def _of_url(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not given.get("url"):
            return given
        urls = [given["url"]] if isinstance(given["url"], str) else given["url"]
        named = REMOTE + ",".join(map(str, urls))
        if given.get("id", named) != named:
            raise ValueError(f"id = {given['id']!r} and url: give one of them")
        return {**given, "id": named}

    @model_validator(mode="after")
    def _turns(self) -> EnvSpec:
        if self.urls and self.max_turns is None:
            raise ValueError(f"max_turns is required for {self.id}: the environment is someone else's")
        return self


LEGACY = "legacy:"


class LegacySpec(Table):
    """`legacy`, instead of `env`: an environment of verifiers 0.1."""

    id: str
    """Of its package, which has `load_environment`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `load_environment`."""


def with_env(given: Any) -> Any:
    """A table's raw values, with the `env` that its `legacy` stands for. ValueError unless exactly one is given.

    Example: {"legacy": {"id": "a"}} -> {"legacy": {"id": "a"}, "env": {"id": "legacy:a", "args": {}}}
    """
    if not isinstance(given, dict):
        return given
    legacy = given.get("legacy")
    if not isinstance(legacy, dict):
        if "env" not in given and legacy is None:
            raise ValueError("env and legacy: give one of them")
        return given
    env = {"id": f"{LEGACY}{legacy.get('id', '')}", "args": legacy.get("args", {})}
    if given.get("env", env) != env:
        raise ValueError("env and legacy: give one of them")
    return {**given, "env": env}


class WorkerPool(Table):
    """`serve.pool`: how many worker processes."""

    kind: Literal["static", "elastic"] = "static"
    """"static": `workers` of them; "elastic": one, further ones as nine tenths of their places are taken, and idle ones
    are ended again."""
    workers: Positive | None = None
    """Processes of a static pool; 1 without it."""
    max_workers: Positive | None = None
    """Processes of an elastic pool, at most."""
    per_worker: Positive | None = None
    """Requests that a worker of an elastic pool runs at a time."""

    @model_validator(mode="after")
    def _sized(self) -> WorkerPool:
        elastic = self.kind == "elastic"
        if elastic and (self.workers is not None or self.max_workers is None or self.per_worker is None):
            raise ValueError("an elastic pool takes max_workers and per_worker, and no workers")
        if not elastic and (self.max_workers is not None or self.per_worker is not None):
            raise ValueError("max_workers and per_worker are for kind = 'elastic'; a static pool takes workers")
        return self

    @property
    def least(self) -> int:
        """Workers that are always there."""
        return self.workers or 1

    @property
    def most(self) -> int:
        """Workers at a time, at most."""
        return self.max_workers or self.workers or 1


class ServeConfig(Table):
    """`serve`: how one environment is hosted."""

    address: Address | None = None
    """Of a server that someone else runs; without it the source's own, at orchestrator.env_server_base_port + i. In an
    env server's own file: where it listens."""
    http: HostPort | None = None
    """"host:port" for sessions, with protocols = ["openenv"]; without protocols for the blocks of a server that has an
    arena of its own."""
    pool: WorkerPool = WorkerPool()
    max_concurrent: Positive = 1024
    """Episodes that are under way at a time; others wait."""
    request_timeout_s: Annotated[float, Field(ge=0)] = 300.0
    """How long an episode may take (of a run or an evaluation; it then fails with "Timeout: no end within 300 s"), and
    each message of a session; 0: no limit."""
    cleanup_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long an episode that was cancelled or timed out may take to end, before its worker is ended and replaced."""
    restart_budget: Count = 5
    """How often a worker is started again when it dies."""
    sandbox: Literal["bwrap"] | None = None
    """Where the environment runs what a model wrote; environments that do refuse to load without one."""
    python: Path | None = None
    """The workers' interpreter, for an environment that needs other packages or another Python."""
    protocols: list[Literal["openenv", "gym"]] = Field(default_factory=list)
    """Sessions (openenv) or episodes (gym, with [gym]) for others, at http; beside the native protocol or, in a
    server's own file without address, instead."""
    max_concurrent_envs: Positive = 64
    """Sessions at a time."""
    idle_timeout_s: Annotated[float, Field(ge=0)] = 900.0
    """A session without a message for so long is closed; 0: never."""
    token: Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{8,}$")] | None = None
    """What clients of sessions have to know, part of their URL; of episodes, as a bearer token."""
    lease_s: Annotated[float, Field(gt=0)] = 3600.0
    """How long the blocks that an episode's result refers to are kept for who collects it (gym)."""

    @property
    def serves_blocks(self) -> bool:
        """Whether `http` is for blocks of the server's own arena."""
        return self.http is not None and not self.protocols

    @model_validator(mode="after")
    def _served(self) -> ServeConfig:
        if self.http is not None and not self.protocols:
            reachable(self.http)
        if self.protocols and self.http is None:
            raise ValueError(f'protocols = {self.protocols} need http = "host:port"')
        if "openenv" in self.protocols and self.python is not None:
            raise ValueError("python is of workers, and sessions are not theirs: leave out protocols or python")
        if len(self.protocols) > 1:
            raise ValueError(f"protocols = {self.protocols}: a port serves one of them; start a server for each")
        return self


class Source(Table):
    """What train and eval sources share."""

    name: Name
    """Of the source in metrics, logs and tags; no two are alike."""
    env: EnvSpec
    legacy: LegacySpec | None = None
    sampling: Sampling = Sampling()
    serve: ServeConfig = ServeConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_env(cls, given: Any) -> Any:
        return with_env(given)

    def absolute(self) -> Self:
        """The same source with its interpreter's absolute path; of a venv it is a link, and must stay one."""
        python = self.serve.python and self.serve.python.absolute()
        return self.model_copy(update={"serve": self.serve.model_copy(update={"python": python})})

    def without_secrets(self) -> Self:
        """The same source, which can be talked about and not connected to."""
        return self.model_copy(
            update={"env": self.env.without_secrets(), "serve": self.serve.model_copy(update={"token": None})}
        )


class TrainSource(Source):
    """`[[orchestrator.train.source]]`: episodes to learn from."""

    ratio: Annotated[float, Field(gt=0)] = 1.0
    """How often groups of this source start, against the other sources."""
    group_size: Positive | None = None
    """Episodes per task; orchestrator.group_size without it."""


class EvalSource(Source):
    """`[[orchestrator.eval.source]]`: what is evaluated before the first step, every few steps, and after the last."""

    interval: Positive = 10
    """Steps between two evaluations."""
    num_examples: Positive = 64
    """Tasks of one, the first of the task set."""
    rollouts_per_example: Positive = 1
    """Episodes per task; pass@k is over these."""


class TrainSources(Table):
    source: Annotated[list[TrainSource], Field(min_length=1)]


class EvalSources(Table):
    source: list[EvalSource] = Field(default_factory=list)
