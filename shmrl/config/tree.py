"""The whole configuration: every table in its place, the rules between them, and what follows from the file alone.

`RunTree` is what `shmrl run` and every role but the env server reads; `EnvServerConfig` is what `shmrl env-server`
reads. What needs the machine (ports, shared memory, a checkpoint's config.json, env ids) is checked by the launcher's
preflight; everything here is arithmetic on the file alone. Runs in every process; imports no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from shmrl.config.deployment import Deployment, JobConfig, Slurm
from shmrl.config.engine import Inference
from shmrl.config.gym import GymConfig
from shmrl.config.host import ArenaConfig, NodeConfig
from shmrl.config.orchestrator import Orchestrator
from shmrl.config.sources import EnvSpec, EvalSource, LegacySpec, Sampling, ServeConfig, TrainSource, with_env
from shmrl.config.tables import (
    LONGEST_TAG,
    PROCESS_SLOTS,
    Log,
    ModelConfig,
    Monitor,
    Name,
    Problems,
    Run,
    Table,
    Warmup,
)
from shmrl.config.training import Trainer

METRICS = "metrics"  # below the socket directory: where processes answer for Prometheus


def socket_root() -> Path:
    """Where the node-local directories of this uid's runs are."""
    return Path(tempfile.gettempdir()) / f"shmrl-{os.getuid()}"


def socket_dir(output_dir: Path, node: str = "") -> Path:
    """The one of the run that writes to `output_dir`; of a run over several nodes, the one of `node`."""
    name = f"{output_dir.resolve()}\0{node}" if node else str(output_dir.resolve())
    return socket_root() / hashlib.blake2s(name.encode(), digest_size=6).hexdigest()


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
    deployment: Deployment = Deployment()
    slurm: Slurm = Slurm()
    job: JobConfig | None = None

    # --- derived: the same in every process, because it depends on the file alone ------------------------------------

    @property
    def sources(self) -> list[tuple[Literal["train", "eval"], TrainSource | EvalSource]]:
        """(split, source) in config order, train first: the order of the derived ports."""
        train = [("train", source) for source in self.orchestrator.train.source]
        return [*train, *[("eval", source) for source in self.orchestrator.eval.source]]  # type: ignore[list-item]

    def source_key(self, index: int) -> str:
        """The dotted key of source `index`, which is a flag, too. Example: "orchestrator.eval.source.0" """
        split, _ = self.sources[index]
        return f"orchestrator.{split}.source.{index - len(self.orchestrator.train.source) * (split == 'eval')}"

    def env_address(self, index: int) -> str:
        """Address of source `index`: its own `serve.address`, else loopback at env_server_base_port + index. A replica
        takes a free port of its node, and publishes it."""
        if given := self.sources[index][1].serve.address:
            return given
        if self.deployment.several:
            return f"tcp://{self.host}:0"
        return f"tcp://127.0.0.1:{self.orchestrator.env_server_base_port + index}"

    @property
    def host(self) -> str:
        """This node's address for the others of a run over several; "<node>" where it is nobody's yet."""
        return self.job.host if self.job else "<node>"

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
                "log": self.log.model_copy(update={"file": self.log.file and self.log.file.resolve()}),
                "orchestrator": self._sources_as(lambda source: source.absolute()),
            }
        )

    def without_secrets(self) -> RunTree:
        """The same run for roles that reach no session server: without their tokens, which are in URLs too."""
        return self.model_copy(update={"orchestrator": self._sources_as(lambda source: source.without_secrets())})

    def _sources_as(self, changed: Callable[[Any], Any]) -> Orchestrator:
        tables = {}
        for split, config in (("train", self.orchestrator.train), ("eval", self.orchestrator.eval)):
            tables[split] = config.model_copy(update={"source": [changed(source) for source in config.source]})
        return self.orchestrator.model_copy(update=tables)

    @property
    def socket_dir(self) -> Path:
        """Short node-local directory for this run's ipc sockets, token and shipped steps."""
        return socket_dir(self.run.output_dir, self.job.node if self.job else "")

    @property
    def given_up(self) -> Path:
        """A file of this node that says: no orchestrator will come back."""
        return self.socket_dir / "given-up"

    @property
    def metrics_dir(self) -> Path | None:
        """Where its processes answer for Prometheus; None where they shall not."""
        return self.socket_dir / METRICS if self.monitor.prometheus else None

    @property
    def trainer_address(self) -> str:
        """Where the orchestrator binds for the trainer's ranks; of several nodes' ranks, it publishes the port."""
        if self.deployment.several and self.deployment.trainer_nodes > 1:
            return f"tcp://{self.host}:0"
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
        here = hosts <= {"127.0.0.1", "::1", "localhost"} and not self.deployment.several
        here |= self.inference.weight_transfer == "broadcast"
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
        Problems.check(
            self._lengths()
            + self._sources_fit()
            + self._addresses()
            + self._over_nodes()
            + self._processes()
            + self._trains()
        )
        return self

    def _lengths(self) -> list[str]:
        """Prompts need room, and padding must fit."""
        problems = []
        context, trained = self.inference.max_model_len, self.orchestrator.seq_len
        for index, (split, source) in enumerate(self.sources):
            asked = f"{self.source_key(index)}.sampling.max_tokens = {source.sampling.max_tokens}"
            if source.sampling.max_tokens >= context:
                problems.append(
                    f"{asked} leaves no room for a prompt in inference.max_model_len = {context}: lower it, or raise "
                    "inference.max_model_len"
                )
            elif split == "train" and source.sampling.max_tokens >= trained:
                problems.append(
                    f"{asked} leaves no room for a prompt in orchestrator.seq_len = {trained}: what is longer would be "
                    "cut before it is trained on; lower it, or raise seq_len"
                )
        if self.orchestrator.seq_len % self.trainer.pad_to_multiple_of:
            problems.append(
                f"orchestrator.seq_len = {self.orchestrator.seq_len} is not a multiple of trainer.pad_to_multiple_of = "
                f"{self.trainer.pad_to_multiple_of}"
            )
        return problems

    def _sources_fit(self) -> list[str]:
        """What a source says of itself against what the run gives it."""
        problems = []
        for name in (source.name for _, source in self.sources):
            tag = f"{self.run.name}/{name}/0000-e00000000.0000000/0000"
            if len(tag) > LONGEST_TAG:
                problems.append(f"run.name and source name are too long together: {tag!r} exceeds {LONGEST_TAG} bytes")
        for name in (source.name for _, source in self.sources if source.serve.serves_blocks):
            problems.append(f"{name}'s serve.http is for a server started by hand: a run's servers share its arena")
        for name in (source.name for _, source in self.sources if "gym" in source.serve.protocols):
            problems.append(f"{name}'s serve.protocols: gym is served by `shmrl env-server` with a file of its own")
        names = [source.name for _, source in self.sources]
        for name in self.arena.shares:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]}?" if close else f"sources are {', '.join(names)}"
                problems.append(f"arena.shares.{name}: no source has this name; {hint}")
        for source in (source for _, source in self.sources if source.env.urls and source.serve.pool.most > 1):
            problems.append(
                f"source {source.name!r} is remote: serve.pool.workers = {source.serve.pool.most}, but one worker "
                "counts its sessions, and only waits for them"
            )
        return problems

    def _processes(self) -> list[str]:
        """All of them attach to the arena."""
        spawned = [source.serve.pool.most + 1 for _, source in self.sources if source.serve.address is None]
        # launcher, orchestrator and node server
        processes = sum(spawned) + self.trainer.ranks + 2 + (self.node.address is not None)
        if processes <= PROCESS_SLOTS:
            return []
        return [
            f"{processes:,} processes would attach to the arena, which has {PROCESS_SLOTS} places: lower "
            "serve.pool (workers, max_workers) or trainer.ranks"
        ]

    def _trains(self) -> list[str]:
        """What the trainer asks of checkpoints, model and engine."""
        problems = []
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
        return problems

    def _addresses(self) -> list[str]:
        """Port 0 is for who publishes what it got."""
        problems = []
        if self.job is None and self.node.address is not None and not int(self.node.address.rpartition(":")[2]):
            problems.append(f"node.address = {self.node.address!r}: its ranks could not tell the port")
        if self.node.certificate and not self.node.address and not self.deployment.several:
            problems.append("node.certificate and node.key belong to a node.address")
        if self.job is None and not self.inference.port:
            problems.append("inference.port = 0: who calls the engine could not tell the port")
        return problems

    def _over_nodes(self) -> list[str]:
        """What cannot work over several nodes, or needs them."""
        over, problems = self.deployment, []
        if not over.several:
            if self.orchestrator.env_server_replicas > 1:
                problems.append("orchestrator.env_server_replicas > 1 needs deployment.kind = 'multi_node'")
            return problems
        if self.trainer.ranks % over.trainer_nodes:
            problems.append(
                f"trainer.ranks = {self.trainer.ranks} is not a multiple of deployment.trainer_nodes = "
                f"{over.trainer_nodes}"
            )
        if self.inference.colocate:
            problems.append("inference.colocate = true: over several nodes engines and ranks share no GPUs")
        if self.arena.transport == "required":
            problems.append(
                "arena.transport = 'required': over several nodes the trainer fetches every block from another node"
            )
        if self.run.restarts.trainer and over.trainer_nodes > 1:
            problems.append(
                f"run.restarts.trainer = {self.run.restarts.trainer}: ranks of several trainer nodes are not restarted "
                "in place; set it to 0, and slurm.requeue = true to go on from the last checkpoint"
            )
        for name in (source.name for _, source in self.sources if source.serve.protocols):
            problems.append(f"{name}'s serve.http: a server of sessions has one address, and every node has a replica")
        if self.job is None:
            if self.node.address is not None:
                problems.append("node.address: over several nodes every node's server has an address of its own")
            if self.inference.urls:
                problems.append("inference.urls: over several nodes every inference node has an engine of its own")
        return problems + self._disaggregated()

    def _disaggregated(self) -> list[str]:
        """Prefill and decode on different nodes: neither engine sees all tokens of a sequence."""
        if not self.deployment.prefill_nodes:
            return []
        if self.inference.backend != "vllm":
            return ["deployment.prefill_nodes: only vLLM hands a context over; set inference.backend = 'vllm'"]
        if self.trainer.router_replay:
            return [
                "deployment.prefill_nodes with trainer.router_replay = true: the routing of a prompt stays with the "
                "engine that prefills it, and no vLLM hands it over; set one of them to 0 or false"
            ]
        return []


class EnvServerConfig(Table):
    """What `shmrl env-server env.toml` reads: one environment, how it is served, and the arena it writes to."""

    name: Name = "env"
    """Of the source in logs and tags."""
    split: Literal["train", "eval"] = "train"
    """Which of the environment's task sets."""
    env: EnvSpec
    legacy: LegacySpec | None = None
    serve: ServeConfig = ServeConfig(address="tcp://127.0.0.1:5000")
    gym: GymConfig | None = None
    arena: ArenaConfig = ArenaConfig()
    log: Log = Log()
    job: JobConfig | None = None
    metrics_dir: Path | None = None
    """Where its process answers for Prometheus; written by `run` and `node`."""

    @model_validator(mode="before")
    @classmethod
    def _with_env(cls, given: Any) -> Any:
        return with_env(given)

    @model_validator(mode="after")
    def _gym(self) -> EnvServerConfig:
        if ("gym" in self.serve.protocols) != (self.gym is not None):
            raise ValueError('[gym] and serve.protocols = ["gym"] belong together: the other one is missing')
        return self

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
