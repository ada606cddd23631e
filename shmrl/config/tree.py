"""The shape of the configuration, as pydantic models: names, defaults, ranges and the rules between keys.

`RunTree` is what `shmrl run` and every role but the env server reads; `EnvServerConfig` is what `shmrl env-server`
reads. What needs the machine (ports, shared memory, a checkpoint's config.json, env ids) is checked by the launcher's
preflight; everything here is arithmetic on the file alone. Runs in every process; imports no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from shmrl.config.addresses import redacted
from shmrl.config.tables import (
    LONGEST_TAG,
    PROCESS_SLOTS,
    Address,
    ArenaConfig,
    Count,
    HostPort,
    Inference,
    Log,
    ModelConfig,
    Monitor,
    Name,
    NodeConfig,
    Port,
    Positive,
    Run,
    Table,
    Trainer,
    Url,
    Warmup,
    reachable,
)


class Sampling(Table):
    """`sampling`: how a source's tokens are drawn. Truncated sampling needs top_k, which bounds its masks."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Positive = 128

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
    """`env`: which environment, by bundled name, `module:attribute` or `openenv:<url>[,<url>...]`, and its arguments.

    url: one server's address or several's, a short way to write `id = "openenv:..."`. What comes from elsewhere needs
    max_turns: nobody here knows when it would end.
    """

    id: str
    url: Url | list[Url] | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    max_turns: Positive | None = None

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


class StaticPool(Table):
    """`serve.pool`: a fixed number of worker processes."""

    kind: Literal["static"] = "static"
    workers: Positive = 1


class ServeConfig(Table):
    """`[serve]`: how one environment is hosted. A source's address is derived unless it is given.

    http: "host:port". With protocols = ["openenv"] sessions are served there, beside the native protocol or, in an env
    server's own file without an address, instead of it; without protocols the blocks of a server with an arena of its
    own, to clients on other hosts. max_concurrent_envs, idle_timeout_s (0: none), token: of sessions;
    request_timeout_s bounds each of their messages.
    sandbox: where the environment runs what a model wrote; environments that do refuse to load without one.
    """

    address: Address | None = None
    http: HostPort | None = None
    pool: StaticPool = StaticPool()
    max_concurrent: Positive = 1024
    request_timeout_s: Annotated[float, Field(ge=0)] = 300.0
    restart_budget: Count = 5
    sandbox: Literal["bwrap"] | None = None
    protocols: list[Literal["openenv"]] = Field(default_factory=list)
    max_concurrent_envs: Positive = 64
    idle_timeout_s: Annotated[float, Field(ge=0)] = 900.0
    token: Annotated[str, Field(pattern=r"^[A-Za-z0-9._~-]{8,}$")] | None = None

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
        return self


class Source(Table):
    """What train and eval sources share."""

    name: Name
    env: EnvSpec
    sampling: Sampling = Sampling()
    serve: ServeConfig = ServeConfig()

    def without_secrets(self) -> Self:
        """The same source, which can be talked about and not connected to."""
        return self.model_copy(
            update={"env": self.env.without_secrets(), "serve": self.serve.model_copy(update={"token": None})}
        )


class TrainSource(Source):
    """`[[orchestrator.train.source]]`: episodes to learn from; `ratio` weighs sources against each other."""

    ratio: Annotated[float, Field(gt=0)] = 1.0
    group_size: Positive | None = None


class EvalSource(Source):
    """`[[orchestrator.eval.source]]`: every `interval` steps (and before the first and after the last), n examples."""

    interval: Positive = 10
    num_examples: Positive = 64
    rollouts_per_example: Positive = 1


class TrainSources(Table):
    source: Annotated[list[TrainSource], Field(min_length=1)]


class EvalSources(Table):
    source: list[EvalSource] = Field(default_factory=list)


class Filters(Table):
    """`[orchestrator.filters]`: which groups are not worth a gradient."""

    zero_advantage: bool = True


class Advantage(Table):
    """`[orchestrator.advantage]`: GRPO's group mean with options, or `custom` by import path `module:function`."""

    kind: Literal["grpo", "custom"] = "grpo"
    std: bool = False
    leave_one_out: bool = False
    length_penalty: Annotated[float, Field(ge=0)] = 0.0
    path: str | None = None

    @model_validator(mode="after")
    def _custom(self) -> Advantage:
        if (self.kind == "custom") != (self.path is not None):
            raise ValueError("advantage.path belongs to kind = 'custom', and only there")
        return self


class Orchestrator(Table):
    """`[orchestrator]`: batches, concurrency, staleness, sources. batch_size counts episodes per step."""

    batch_size: Positive | None = None
    token_batch_size: Positive | None = None
    group_size: Positive = 8
    seq_len: Positive = 1024
    max_inflight: Positive | None = None
    max_off_policy_steps: Count = 1
    env_server_base_port: Port = 5000
    connect_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    filters: Filters = Filters()
    advantage: Advantage = Advantage()
    train: TrainSources
    eval: EvalSources = EvalSources()

    @property
    def inflight(self) -> int:
        """Permits for episodes: max_inflight, else one batch ahead of the one being collected."""
        return self.max_inflight or 2 * (self.batch_size or 64 * self.group_size)

    @model_validator(mode="after")
    def _batches(self) -> Orchestrator:
        problems = []
        if (self.batch_size is None) == (self.token_batch_size is None):
            problems.append("give exactly one of batch_size and token_batch_size")
        for source in self.train.source:
            size = source.group_size or self.group_size
            if self.batch_size and self.batch_size % size:
                problems.append(
                    f"batch_size = {self.batch_size} is not a multiple of {source.name}'s group_size = {size}"
                )
            if size > self.inflight:
                problems.append(f"{source.name}'s group_size = {size} exceeds max_inflight = {self.inflight}")
        names = [source.name for source in (*self.train.source, *self.eval.source)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            problems.append(f"two sources are called {name!r}; names must differ across train and eval")
        if self.env_server_base_port + len(names) - 1 > 65535:
            problems.append(
                f"env_server_base_port = {self.env_server_base_port} leaves no room for {len(names)} servers"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


def socket_root() -> Path:
    """Where the node-local directories of this uid's runs are."""
    return Path(tempfile.gettempdir()) / f"shmrl-{os.getuid()}"


def socket_dir(output_dir: Path) -> Path:
    """The one of the run that writes to `output_dir`."""
    return socket_root() / hashlib.blake2s(str(output_dir.resolve()).encode(), digest_size=6).hexdigest()


class RunTree(Table):
    """The whole run. Resolved copies of it lie under `<output_dir>/configs/`."""

    run: Run = Run()
    log: Log = Log()
    model: ModelConfig
    warmup: Warmup = Warmup()
    arena: ArenaConfig = ArenaConfig()
    node: NodeConfig = NodeConfig()
    inference: Inference = Inference()
    orchestrator: Orchestrator
    trainer: Trainer = Trainer()
    monitor: Monitor = Monitor()

    # --- derived: the same in every process, because it depends on the file alone ------------------------------------

    @property
    def sources(self) -> list[tuple[Literal["train", "eval"], TrainSource | EvalSource]]:
        """(split, source) in config order, train first: the order of the derived ports."""
        train = [("train", source) for source in self.orchestrator.train.source]
        return [*train, *[("eval", source) for source in self.orchestrator.eval.source]]  # type: ignore[list-item]

    def env_address(self, index: int) -> str:
        """Address of source `index`: its own `serve.address`, else loopback at env_server_base_port + index."""
        given = self.sources[index][1].serve.address
        return given or f"tcp://127.0.0.1:{self.orchestrator.env_server_base_port + index}"

    def remote_sessions(self, urls: list[str]) -> tuple[int, int]:
        """(sessions for training, sessions for evaluation) that this run opens at most on these servers together."""
        on = [(split, source.env) for split, source in self.sources if set(source.env.urls) & set(urls)]
        trains = any(split == "train" for split, _ in on)
        return self.orchestrator.inflight if trains else 0, sum(env.evaluations for split, env in on if split == "eval")

    def absolute(self) -> RunTree:
        """The same run with absolute paths, so that its resolved files mean the same in every directory."""
        run = self.run.model_copy(update={"output_dir": self.run.output_dir.resolve()})
        path = self.model.path and self.model.path.resolve()
        base = self.arena.base and self.arena.base.resolve()
        files = {name: file.resolve() for name in ("certificate", "key", "ca") if (file := getattr(self.node, name))}
        python = self.inference.python and self.inference.python.absolute()  # a venv's is a link: it must stay one
        return self.model_copy(
            update={
                "run": run,
                "model": self.model.model_copy(update={"path": path}),
                "arena": self.arena.model_copy(update={"base": base}),
                "node": self.node.model_copy(update=files),
                "inference": self.inference.model_copy(update={"python": python}),
            }
        )

    def without_secrets(self) -> RunTree:
        """The same run for roles that reach no session server: without their tokens, which are in URLs too."""
        tables = {}
        for split, config in (("train", self.orchestrator.train), ("eval", self.orchestrator.eval)):
            sources = [source.without_secrets() for source in config.source]
            tables[split] = config.model_copy(update={"source": sources})
        return self.model_copy(update={"orchestrator": self.orchestrator.model_copy(update=tables)})

    @property
    def socket_dir(self) -> Path:
        """Short node-local directory for this run's ipc sockets, token and shipped steps."""
        return socket_dir(self.run.output_dir)

    @property
    def trainer_address(self) -> str:
        """Where the orchestrator binds for the trainer's ranks."""
        return f"ipc://{self.socket_dir}/trainer.sock"

    @property
    def initial_weights(self) -> Path:
        """Directory of version 0: the checkpoint, or the one made on the spot."""
        return self.model.path or self.weights_dir(0)

    def weights_dir(self, version: int) -> Path:
        """Directory of one published policy version (Hugging Face layout, safetensors)."""
        return self.run.output_dir / "weights" / f"step_{version}"

    @property
    def shared_weights(self) -> Path | None:
        """Directory in shared memory where ranks publish weights for a vLLM on this host, or for rank 0 to broadcast.

        Else None. Files there are mapped by who reads them: no disk, no copy through a socket.
        """
        hosts = {urlsplit(url).hostname for url in self.inference.urls}
        here = hosts <= {"127.0.0.1", "::1", "localhost"} or self.inference.weight_transfer == "broadcast"
        if self.inference.backend != "vllm" or not here:
            return None
        return Path("/dev/shm") / f"shmrl-weights-{os.getuid()}-{self.socket_dir.name}"

    def published_dir(self, version: int) -> Path:
        """Where the ranks publish a policy version for the engines."""
        shared = self.shared_weights
        return self.weights_dir(version) if shared is None else shared / f"step_{version}"

    @property
    def newest_weights(self) -> Path:
        """What an engine starts with: the newest published version, so that one restarted in place is not behind."""
        versions = {
            int(number): path
            for path in self.published_dir(0).parent.glob("step_*")
            if (number := path.name.removeprefix("step_")).isdigit()
        }
        return versions[max(versions)] if versions else self.initial_weights

    @property
    def captured(self) -> tuple[str, ...]:
        """Fields the engine has to return, as the trainer declares them."""
        wanted = {"routing": self.trainer.router_replay, "head": bool(self.trainer.head), "mask": self.needs_masks}
        return tuple(name for name, on in wanted.items() if on)

    @property
    def needs_masks(self) -> bool:
        """True when sampling is truncated somewhere and its replay is on."""
        return self.trainer.sampling_replay and any(s.sampling.truncated for s in self.orchestrator.train.source)

    @model_validator(mode="after")
    def _whole(self) -> RunTree:
        problems = []
        longest = max(source.sampling.max_tokens for _, source in self.sources)
        if longest >= self.inference.max_model_len:
            problems.append(
                f"sampling.max_tokens = {longest} does not fit inference.max_model_len = {self.inference.max_model_len}"
            )
        if self.orchestrator.seq_len % self.trainer.pad_to_multiple_of:
            problems.append(
                f"orchestrator.seq_len = {self.orchestrator.seq_len} is not a multiple of trainer.pad_to_multiple_of = "
                f"{self.trainer.pad_to_multiple_of}"
            )
        for name in (source.name for _, source in self.sources):
            tag = f"{self.run.name}/{name}/0000-e00000000.0000000/0000"
            if len(tag) > LONGEST_TAG:
                problems.append(f"run.name and source name are too long together: {tag!r} exceeds {LONGEST_TAG} bytes")
        for name in (source.name for _, source in self.sources if source.serve.serves_blocks):
            problems.append(f"{name}'s serve.http is for a server started by hand: a run's servers share its arena")
        names = [source.name for _, source in self.sources]
        for name in self.arena.shares:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]}?" if close else f"sources are {', '.join(names)}"
                problems.append(f"arena.shares.{name}: no source has this name; {hint}")
        for source in (source for _, source in self.sources if source.env.urls and source.serve.pool.workers > 1):
            problems.append(
                f"source {source.name!r} is remote: serve.pool.workers = {source.serve.pool.workers}, but one worker "
                "counts its sessions, and only waits for them"
            )
        spawned = [source.serve.pool.workers + 1 for _, source in self.sources if source.serve.address is None]
        # launcher, orchestrator and node server
        processes = sum(spawned) + self.trainer.ranks + 2 + (self.node.address is not None)
        if processes > PROCESS_SLOTS:
            problems.append(
                f"{processes:,} processes would attach to the arena, which has {PROCESS_SLOTS} places: lower "
                "serve.pool.workers or trainer.ranks"
            )
        interval, retained = self.trainer.checkpoint.interval, self.arena.retain_steps
        again = min(interval or self.run.max_steps, self.run.max_steps) - 1
        if self.run.restarts.trainer and retained < again:
            problems.append(
                f"run.restarts.trainer = {self.run.restarts.trainer}: a restarted trainer goes back to its last "
                f"checkpoint, up to {again} steps before the current one (trainer.checkpoint.interval = {interval}, "
                f"run.max_steps = {self.run.max_steps}), but arena.retain_steps = {retained}: set it to {again}, or "
                f"the interval to {retained + 1}"
            )
        if self.trainer.lora and self.warmup.steps and self.model.tiny:
            problems.append(
                "[trainer.lora] keeps the model it started from, and [warmup] overwrites that of [model.tiny]"
            )
        if self.trainer.head > self.inference.max_logprobs:
            problems.append(
                f"trainer.head = {self.trainer.head} exceeds the engine's max_logprobs = {self.inference.max_logprobs}"
            )
        if self.model.tiny and self.trainer.head > self.model.tiny.vocab:
            problems.append(f"trainer.head = {self.trainer.head} exceeds model.tiny.vocab = {self.model.tiny.vocab}")
        if self.model.tiny and self.inference.max_model_len > self.model.tiny.max_positions:
            problems.append(
                f"inference.max_model_len = {self.inference.max_model_len} exceeds model.tiny.max_positions = "
                f"{self.model.tiny.max_positions}"
            )
        if self.trainer.sampling_replay and self.needs_masks and self.inference.logprobs_mode != "processed_logprobs":
            problems.append("sampling replay needs inference.logprobs_mode = 'processed_logprobs'")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class EnvServerConfig(Table):
    """What `shmrl env-server env.toml` reads: one environment, how it is served, and the arena it writes to."""

    name: Name = "env"
    split: Literal["train", "eval"] = "train"
    env: EnvSpec
    serve: ServeConfig = ServeConfig(address="tcp://127.0.0.1:5000")
    arena: ArenaConfig = ArenaConfig()
    log: Log = Log()

    @model_validator(mode="after")
    def _http(self) -> EnvServerConfig:
        if self.serve.serves_blocks and self.arena.address is not None:
            raise ValueError("serve.http belongs to a server with an arena of its own, without arena.address")
        return self


class EvalConfig(EnvServerConfig):
    """One environment of `shmrl eval`: an env server's file, and how its tokens are drawn.

    serve.address and [arena] are not used: the server is one of its own, with an arena of its own.
    """

    split: Literal["train", "eval"] = "eval"
    sampling: Sampling = Sampling()
