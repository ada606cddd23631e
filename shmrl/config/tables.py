"""The tables of the configuration that stand for themselves: one class per table, and the rules inside it.

`tree.py` puts them together and has the rules between them. Runs in every process; imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shmrl.units import parse_bytes, parse_shares

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+")]
Address = Annotated[str, Field(pattern=r"^(tcp://\S+:\d+|ipc://\S+)$")]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Beta = Annotated[float, Field(ge=0, lt=1)]
PROCESS_SLOTS = 256  # of an arena
LONGEST_TAG = 112  # bytes of a block's tag
FETCHED = "fetched"  # the source of copies of other nodes' blocks, in their tags
SPILL_AFTER_S = 0.5  # arena.timeout_s where writers may spill


def _port(address: str) -> str:
    if int(address.rpartition(":")[2]) > 65535:
        raise ValueError("a host that others can reach it by, and a port")
    return address


def reachable(address: str) -> str:
    """The address; ValueError for a wildcard, which nobody can connect to."""
    if address.rpartition(":")[0] in ("0.0.0.0", "[::]", "*"):
        raise ValueError("a host that others can reach it by, and a port")
    return address


HostPort = Annotated[
    str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}$"), AfterValidator(_port)
]  # port 0: a free one


class Table(BaseModel):
    """One TOML table: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Restarts(Table):
    """`[run.restarts]`: how often a role that dies is started again in place, the arena kept, before the run ends.

    The trainer goes back to its last checkpoint and is sent the steps since then again: arena.retain_steps covers them.
    The orchestrator goes on where it stood, with the finished groups that are in the arena.
    """

    orchestrator: Count = 0
    trainer: Count = 0
    inference: Count = 0
    node: Count = 3


class Run(Table):
    """`[run]`: what this run is called, where it writes, how long it goes."""

    name: Name = "run"
    output_dir: Path = Path("runs/run")
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    max_steps: Positive = 100
    restarts: Restarts = Restarts()


class Log(Table):
    """`[log]`: level of every process's log, and JSON lines instead of text."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json_lines: bool = Field(False, alias="json")


class TinyModel(Table):
    """`[model.tiny]`: the shape of a Qwen3-MoE with random weights, made on the spot with a byte-level tokenizer."""

    layers: Positive = 4
    hidden: Positive = 64
    heads: Positive = 4
    kv_heads: Positive = 2
    head_dim: Positive = 16
    experts: Annotated[int, Field(ge=2)] = 8
    top_k: Positive = 2
    moe_intermediate: Positive = 64
    vocab: Annotated[int, Field(ge=261)] = 264
    max_positions: Positive = 1024
    initializer_range: Annotated[float, Field(gt=0)] = 0.05

    @model_validator(mode="after")
    def _shape(self) -> TinyModel:
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} of {self.experts} experts")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        return self


class ModelConfig(Table):
    """`[model]`: a checkpoint directory (`path`) or the shape of a model made on the spot (`tiny`)."""

    name: Name = "policy"
    path: Path | None = None
    tiny: TinyModel | None = None

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give exactly one of model.path and [model.tiny]")
        return self


class Warmup(Table):
    """`[warmup]`: supervised steps on the environments' own demonstrations, before version 0 is published."""

    steps: Count = 0
    lr: Annotated[float, Field(gt=0)] = 3e-3
    batch_size: Positive = 64


class ArenaConfig(Table):
    """`[arena]`: the pool of shared memory. `address` and `token_file` are written by `run` or by `shmrl node`.

    backing: "shm" (/dev/shm), "memfd" (no mount, gone with the last process), "file" in the directory `base`, for
    example of a tmpfs mounted with huge=. huge_pages: "auto" takes what mount or shmem_enabled give, "always" asks the
    kernel for each step and refuses to start without. numa: "interleave" over the nodes, or "bind:0-1,3". on_full:
    "spill" puts what finds no room within timeout_s into files under spill_dir, a directory of a local disk. timeout_s
    is 60, or 0.5 with "spill": a file costs less than a long wait, and groups are held back while room is to come.
    shares: what sources can count on, fractions of the capacity (0.5) or sizes ("2GiB"); beyond it they borrow what
    is idle. retain_steps: how many of the last steps keep their blocks after their use, for `shmrl replay export` and
    for ranks that go back to a checkpoint. fetch_capacity: what copies of other nodes' blocks can count on, as in
    shares. transport: "required" refuses a run whose trainer would have to fetch blocks over HTTP, "preferred" takes
    shared memory where it can.
    """

    address: str | None = None
    token_file: Path | None = None
    capacity: int | str | None = None
    backing: Literal["shm", "memfd", "file"] = "shm"
    base: Path | None = None
    huge_pages: Literal["auto", "always", "never"] = "auto"
    numa: Annotated[str, Field(pattern=r"^(none|interleave|bind:\d+(-\d+)?(,\d+(-\d+)?)*)$")] = "none"
    on_full: Literal["block", "raise", "spill"] = "block"
    spill_dir: Path | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    verify: bool = False
    preallocate: bool = False
    orphan_ttl_s: Annotated[float, Field(gt=0, le=1 << 31)] = 600.0
    retain_steps: Count = 0
    shares: dict[str, float | int | str] = {}
    fetch_capacity: float | int | str | None = None
    transport: Literal["required", "preferred"] = "preferred"

    @property
    def guaranteed(self) -> dict[str, float | int | str]:
        """`shares`, and that of the copies: "fetched" is the source in their tags."""
        return self.shares if self.fetch_capacity is None else {**self.shares, FETCHED: self.fetch_capacity}

    @model_validator(mode="before")
    @classmethod
    def _spills_soon(cls, given: Any) -> Any:
        spills = isinstance(given, dict) and given.get("on_full") == "spill"
        return {"timeout_s": SPILL_AFTER_S, **given} if spills else given

    @model_validator(mode="after")
    def _capacity(self) -> ArenaConfig:
        if self.capacity is not None and parse_bytes(self.capacity) < 1 << 20:
            raise ValueError(f"capacity = {self.capacity!r} is below 1MiB")
        return self

    @model_validator(mode="after")
    def _shares(self) -> ArenaConfig:
        sizes = [source for source, share in self.guaranteed.items() if not isinstance(share, float)]
        if sizes and self.capacity is None:
            raise ValueError(f"shares of {', '.join(sizes)} are sizes: they need capacity (or give fractions, as 0.5)")
        parse_shares(self.guaranteed, 1 << 47 if self.capacity is None else parse_bytes(self.capacity))
        return self

    @model_validator(mode="after")
    def _spill(self) -> ArenaConfig:
        if (self.on_full == "spill") != (self.spill_dir is not None):
            raise ValueError("spill_dir (an existing directory) belongs to on_full = 'spill', and only there")
        return self

    @model_validator(mode="after")
    def _base(self) -> ArenaConfig:
        if (self.backing == "file") != (self.base is not None):
            raise ValueError(
                "base (a directory, of a mount that holds the arena) belongs to backing = 'file', and only there"
            )
        return self


class NodeConfig(Table):
    """`[node]`: the server that other nodes read this node's blocks from, and that fetches theirs, once for all ranks.

    address: "host:port" at which other nodes reach it; without it there is no server, and ranks fetch by themselves.
    certificate, key: files (PEM) that make it an https server. ca: the file that other nodes' servers are checked by.
    """

    address: Annotated[HostPort, AfterValidator(reachable)] | None = None
    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def url(self) -> str | None:
        """Of this node's own server."""
        return self.address and f"{'https' if self.certificate else 'http'}://{self.address}"

    @model_validator(mode="after")
    def _servable(self) -> NodeConfig:
        if self.address is not None and not int(self.address.rpartition(":")[2]):
            raise ValueError(f"address = {self.address!r}: its ranks could not tell the port")
        if (self.certificate is None) != (self.key is None) or (self.certificate and not self.address):
            raise ValueError("certificate and key belong together, and to an address")
        return self


VLLM_SET_HERE = {
    "model": "model.path",
    "tokenizer": "model.path",
    "served_model_name": "model.name",
    "seed": "run.seed",
    "host": "inference.host",
    "port": "inference.port",
    "dtype": "inference.dtype",
    "max_model_len": "inference.max_model_len",
    "max_num_seqs": "inference.max_num_seqs",
    "max_logprobs": "inference.max_logprobs",
    "logprobs_mode": "inference.logprobs_mode",
    "enable_return_routed_experts": "trainer.router_replay",
    "return_sampling_mask": "trainer.sampling_replay",
    "worker_extension_cls": "",
    "generation_config": "",
    "enable_scale_out": "",
}
"""Arguments of vLLM that shmrl sets, and the key they come from ("": fixed)."""


class Inference(Table):
    """`[inference]`: the engine that shmrl starts, or `urls` of engines that someone else runs.

    With backend = "vllm", `python` is the interpreter that has vLLM (default: this one), and every key of
    `[inference.vllm]` becomes an argument of its server: `tensor_parallel_size = 2` is `--tensor-parallel-size 2`.
    colocate: engine and trainer share GPUs: the engine sleeps while a step is trained. weight_transfer: "files": vLLM
    reads what the trainer publishes, through shared memory on one host, else `run.output_dir`; "broadcast": rank 0
    sends it to every vLLM, by NCCL between GPUs, else gloo, and no file system is shared.
    """

    backend: Literal["embedded", "vllm"] = "embedded"
    python: Path | None = None
    vllm: dict[str, Any] = {}
    host: str = "127.0.0.1"
    port: Port = 8000
    urls: list[Url] = []
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Device = "cpu"
    max_model_len: Positive = 1024
    max_num_seqs: Positive = 64
    max_logprobs: Positive = 64
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    update_mode: Literal["wait", "keep", "abort"] = "keep"
    weight_transfer: Literal["files", "broadcast"] = "files"
    colocate: bool = False
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _vllm(self) -> Inference:
        given = [key for key, value in (("python", self.python), ("[inference.vllm]", self.vllm)) if value]
        if self.backend != "vllm" and (given or self.colocate):
            raise ValueError(f"{', '.join([*given, *['colocate'] * self.colocate])}: only with backend = 'vllm'")
        if self.weight_transfer == "broadcast" and (self.backend != "vllm" or self.colocate):
            raise ValueError("weight_transfer = 'broadcast': only with backend = 'vllm', and without colocate")
        if given and self.urls:
            raise ValueError(f"{' and '.join(given)} are for an engine started here, and urls names others")
        for key in (key.replace("-", "_") for key in self.vllm):
            if key in VLLM_SET_HERE:
                raise ValueError(f"vllm.{key} is set by shmrl, from {VLLM_SET_HERE[key] or 'what it needs'}")
        return self

    @property
    def engine_urls(self) -> list[str]:
        """Where the engines answer: `urls`, else the one started here."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.urls or [f"http://{host}:{self.port}"]


class Monitor(Table):
    """`[monitor]`: a line per step on the terminal, and how many rollouts per step go to rollouts/ with their text."""

    console: bool = True
    rollouts: Count = 4


class Loss(Table):
    """`[trainer.loss]`: icepop drops ratios outside [alpha, beta]; cispo, ppo clip at 1 - clip_low, 1 + clip_high."""

    kind: Literal["icepop", "cispo", "ppo", "custom"] = "icepop"
    alpha: Annotated[float, Field(gt=0)] = 0.2
    beta: Annotated[float, Field(gt=0)] = 5.0
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    score_centering: bool = False
    path: str | None = None
    args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _custom(self) -> Loss:
        if (self.kind == "custom") != (self.path is not None):
            raise ValueError("loss.path (module:function) belongs to kind = 'custom', and only there")
        if self.kind == "custom" and self.score_centering:
            raise ValueError("score_centering belongs to icepop, cispo and ppo: a custom loss gets the head itself")
        if self.alpha > self.beta:
            raise ValueError(f"alpha = {self.alpha} exceeds beta = {self.beta}")
        return self


class Optimizer(Table):
    """`[trainer.optimizer]`: AdamW."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class Scheduler(Table):
    """`[trainer.scheduler]`: learning rate over steps; warmup_steps rise linearly, then constant / linear / cosine."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class Checkpoint(Table):
    """`[trainer.checkpoint]`: every `interval` steps (0 = only at the end); keep the last n and every k-th."""

    interval: Count = 0
    keep_last: Positive = 2
    keep_every: Count = 0


class Lora(Table):
    """`[trainer.lora]`: train low-rank adapters of these linear layers alone; what is published has them merged in."""

    rank: Positive
    alpha: Annotated[float, Field(gt=0)]
    targets: Annotated[list[str], Field(min_length=1)] = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Trainer(Table):
    """`[trainer]`: ranks, precision, what is replayed, loss, optimizer. `head` is the captured top-k head's width.

    fsdp shards weights, gradients and optimizer over the ranks; with cpu_offload these shards live in host memory.
    context_parallel: how many neighbouring ranks share each sequence; the others divide the micro batches.
    compile: torch.compile of each decoder layer.
    """

    ranks: Positive = 1
    device: Device = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    fsdp: bool = False
    cpu_offload: bool = False
    context_parallel: Positive = 1
    compile: bool = False
    activation_checkpointing: bool = False
    router_replay: bool = True
    sampling_replay: bool = True
    head: Count = 0
    pad_to_multiple_of: Positive = 1
    logprob_chunk: Positive = 256
    keep_weights: Positive = 3
    loss: Loss = Loss()
    lora: Lora | None = None
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    checkpoint: Checkpoint = Checkpoint()

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that get micro batches of their own."""
        return self.ranks // self.context_parallel

    @model_validator(mode="after")
    def _parallel(self) -> Trainer:
        if self.ranks % self.context_parallel:
            raise ValueError(f"ranks = {self.ranks} is not a multiple of context_parallel = {self.context_parallel}")
        if self.cpu_offload and not (self.fsdp and self.device.startswith("cuda")):
            raise ValueError(
                "cpu_offload = true moves the shards of fsdp = true off a CUDA device: set both, or neither"
            )
        return self

    @model_validator(mode="after")
    def _compiled(self) -> Trainer:
        if self.compile and self.activation_checkpointing:
            raise ValueError(
                "compile = true with activation_checkpointing = true: what is recomputed may run another graph, of "
                "other shapes, than the forward pass; set one of them"
            )
        if self.compile and self.context_parallel > 1:
            raise ValueError(
                "compile = true with context_parallel > 1: attention gathers keys and values from other ranks, which "
                "is not compiled; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _centering(self) -> Trainer:
        if self.loss.score_centering and not self.head:
            raise ValueError("loss.score_centering needs the sampler's head: set trainer.head (for example 16)")
        return self
