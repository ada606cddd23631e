"""What every table of the configuration is made of - types of values, the base class - and tables of the whole run.

`host.py`, `engine.py`, `training.py`, `sources.py` and `orchestrator.py` have the tables of one room each, with the
rules inside them; `tree.py` puts all together and has the rules between them. The string below a key is its meaning.
Runs in every process; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
URL = r"^https?://[^\s/]+"
ADDRESS = r"^(tcp://\S+:\d+|ipc://\S+)$"
DEVICE = r"^(cpu|cuda(:\d+)?)$"
HOST_PORT = r"^(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}$"
Name = Annotated[str, Field(pattern=NAME)]
Url = Annotated[str, Field(pattern=URL)]
Address = Annotated[str, Field(pattern=ADDRESS)]
Device = Annotated[str, Field(pattern=DEVICE)]
PROCESS_SLOTS = 256  # of an arena
LONGEST_TAG = 112  # bytes of a block's tag


def _port(address: str) -> str:
    if int(address.rpartition(":")[2]) > 65535:
        raise ValueError("a host that others can reach it by, and a port")
    return address


def reachable(address: str) -> str:
    """The address; ValueError for a wildcard, which nobody can connect to."""
    if address.rpartition(":")[0] in ("0.0.0.0", "[::]", "*"):
        raise ValueError("a host that others can reach it by, and a port")
    return address


HostPort = Annotated[str, Field(pattern=HOST_PORT), AfterValidator(_port)]  # port 0: a free one


class Problems(ValueError):
    """Several faults of one table, each a line of its own for the user."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(problems))

    @classmethod
    def check(cls, problems: Sequence[str]) -> None:
        """Raise if there are any."""
        if problems:
            raise cls(problems)


class Table(BaseModel):
    """One TOML table: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Restarts(Table):
    """`[run.restarts]`: how often a role that dies is started again in place, the arena kept, before the run ends."""

    orchestrator: Count = 0
    """It goes on where it stood, with the finished groups that are in the arena."""
    trainer: Count = 0
    """Goes back to its last checkpoint and is sent the steps since then again, which arena.retain_steps keeps."""
    inference: Count = 0
    """Gets the newest weights; requests wait for it."""
    node: Count = 3
    """The node server, where node.address asks for one."""


class Run(Table):
    """`[run]`: what this run is called, where it writes, how long it goes."""

    name: Name = "run"
    """Stands in every log, process title and block."""
    output_dir: Path = Path("runs/run")
    """Where everything goes: metrics.jsonl, logs/, weights/, checkpoints/, configs/. Without it runs/<run.name>."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Of weights made on the spot, tasks, sampling."""
    max_steps: Positive = 100
    """Optimizer steps of the run."""
    restarts: Restarts = Restarts()


class Log(Table):
    """`[log]`: every process's log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """SHMRL_LOG_LEVEL in the environment wins over it."""
    json_lines: bool = Field(False, alias="json")
    """One JSON object per line instead of text."""
    file: Path | None = None
    """Where the log goes beside stderr, which under `shmrl run` is a file per role already."""


class TinyModel(Table):
    """`[model.tiny]`: the shape of a Qwen3-MoE with random weights, made on the spot with a byte-level tokenizer."""

    layers: Positive = 4
    """Decoder layers, each with a router."""
    hidden: Positive = 64
    """Width of the residual stream."""
    heads: Positive = 4
    """Attention heads; a multiple of kv_heads."""
    kv_heads: Positive = 2
    """Key and value heads."""
    head_dim: Positive = 16
    """Width of a head."""
    experts: Annotated[int, Field(ge=2)] = 8
    """Experts of a layer."""
    top_k: Positive = 2
    """Experts that a token goes to."""
    moe_intermediate: Positive = 64
    """Width of an expert."""
    vocab: Annotated[int, Field(ge=261)] = 264
    """256 bytes and the special tokens, at least."""
    max_positions: Positive = 1024
    """Longest context."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.05
    """Standard deviation of the first weights."""

    @model_validator(mode="after")
    def _shape(self) -> TinyModel:
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} of {self.experts} experts: lower it, or raise experts")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        return self


class ModelConfig(Table):
    """`[model]`: a checkpoint directory (`path`) or the shape of a model made on the spot (`tiny`)."""

    name: Name = "policy"
    """What the engine serves it as."""
    path: Path | None = None
    """A directory in Hugging Face layout: config.json, safetensors, tokenizer.json."""
    tiny: TinyModel | None = None

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give exactly one of model.path and [model.tiny]")
        return self


class Warmup(Table):
    """`[warmup]`: supervised steps on the environments' own demonstrations, before version 0 is published."""

    steps: Count = 0
    """How many; 0: none."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Their learning rate."""
    batch_size: Positive = 64
    """Demonstrations of a step."""


class Page(Table):
    """`[monitor.page]`: the run in a browser. Nobody is asked for a password."""

    enabled: bool = True
    """Whether `shmrl run` offers the page; its process starts when somebody looks."""
    host: str = "127.0.0.1"
    """Where it listens: on loopback for this user's own processes alone, elsewhere for everybody who reaches it."""
    port: Port = 8470
    """The next one that is free is taken where this one is not."""


class Wandb(Table):
    """`[monitor.wandb]`: the run at Weights & Biases too (extra `monitor`), under the names of metrics.jsonl."""

    project: str
    """Where the run appears."""
    entity: str | None = None
    """Whose project; without it that of the key that is logged in."""
    mode: Literal["online", "offline"] = "online"
    """offline: into files alone, for `wandb sync`."""


class Monitor(Table):
    """`[monitor]`: what is shown and kept of a run while it goes on."""

    console: bool = True
    """A line per step on the terminal, and what is waited for."""
    rollouts: Count = 4
    """Episodes of each step that go to rollouts/ with their text and the facts of their last 2,048 tokens."""
    prometheus: bool = True
    """Whether processes answer when the page's /metrics is scraped; until then it costs nothing."""
    tensorboard: bool = False
    """Event files in <output_dir>/tensorboard too (extra `monitor`)."""
    wandb: Wandb | None = None
    page: Page = Page()
