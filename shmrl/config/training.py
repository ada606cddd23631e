"""`[trainer]` and the tables below it: ranks, precision, what is replayed, loss, optimizer, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shmrl.config.tables import Count, Device, Positive, Table

Beta = Annotated[float, Field(ge=0, lt=1)]


class Loss(Table):
    """`[trainer.loss]`: what becomes of the ratio of the trainer's to the engine's probability of a token."""

    kind: Literal["icepop", "ipo", "cispo", "ppo", "custom"] = "icepop"
    """icepop drops ratios outside [alpha, beta]; ipo probabilities that moved by more than eps; cispo and ppo clip at
    1 - clip_low and 1 + clip_high."""
    alpha: Annotated[float, Field(gt=0)] = 0.2
    """icepop's smallest ratio."""
    beta: Annotated[float, Field(gt=0)] = 5.0
    """icepop's largest ratio."""
    eps: Annotated[float, Field(gt=0, le=1)] = 0.1
    """ipo: the largest |p - q| of trainer and sampler."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """cispo, ppo."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """cispo, ppo."""
    score_centering: bool = False
    """Subtract the sampler's expected score, over the captured head; needs trainer.head."""
    path: str | None = None
    """With kind = "custom": module:function."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the custom loss."""

    @model_validator(mode="after")
    def _custom(self) -> Loss:
        if (self.kind == "custom") != (self.path is not None):
            raise ValueError("loss.path (module:function) belongs to kind = 'custom', and only there")
        if self.kind in ("custom", "ipo") and self.score_centering:
            raise ValueError(
                "score_centering belongs to icepop, cispo and ppo: a custom loss gets the head itself, and ipo's band "
                "is of single tokens, which the tail behind the head is not"
            )
        if self.alpha > self.beta:
            raise ValueError(f"alpha = {self.alpha} exceeds beta = {self.beta}")
        return self


class Optimizer(Table):
    """`[trainer.optimizer]`: AdamW."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate, before the scheduler."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the second moment's root."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Longer gradients are scaled down to it."""


class Scheduler(Table):
    """`[trainer.scheduler]`: learning rate over steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls behind the rise."""
    warmup_steps: Count = 0
    """Steps in which it rises linearly."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What is left of it at the last step."""


class Checkpoint(Table):
    """`[trainer.checkpoint]`: what a run is resumed from: weights, optimizer, counters, positions in the task sets."""

    interval: Count = 20
    """Steps between two, and one at the end. What a run that dies has to do again; 0: all of it."""
    keep_last: Positive = 2
    """Older ones are removed."""
    keep_every: Count = 0
    """Keep those whose step is a multiple of this, too; 0: none."""


class Lora(Table):
    """`[trainer.lora]`: train low-rank adapters of these linear layers alone; what is published has them merged in."""

    rank: Positive
    """Of the adapters."""
    alpha: Annotated[float, Field(gt=0)]
    """The adapters' product is scaled by alpha / rank."""
    targets: Annotated[list[str], Field(min_length=1)] = Field(["q_proj", "k_proj", "v_proj", "o_proj"])
    """Names of the linear layers."""


class Trainer(Table):
    """`[trainer]`: ranks, precision, what is replayed, loss, optimizer."""

    ranks: Positive = 1
    """Processes under torch.distributed.run."""
    device: Device = "cpu"
    """cuda: rank i on GPU i of its host."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of forward and backward; the optimizer's weights are float32."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer over the ranks."""
    cpu_offload: bool = False
    """With fsdp on CUDA: the shards live in host memory."""
    context_parallel: Positive = 1
    """Neighbouring ranks that share each sequence; the others divide the micro batches."""
    compile: bool = False
    """torch.compile of each decoder layer."""
    activation_checkpointing: bool = False
    """Recompute a layer's activations in the backward pass: less memory, a third more work."""
    router_replay: bool = True
    """Train each token through the experts that the engine chose; needs a mixture of experts."""
    sampling_replay: bool = True
    """Where sampling is truncated, take probabilities over the ids that the sampler kept."""
    head: Count = 0
    """Width of the sampler's top-k head that is captured, for score_centering and custom losses; 0: none."""
    pad_to_multiple_of: Positive = 1
    """Of a micro batch's tokens."""
    logprob_chunk: Positive = 256
    """Tokens whose logits exist at a time."""
    keep_weights: Positive = 3
    """Published versions that stay in weights/."""
    stall_timeout_s: Annotated[float, Field(ge=0)] = 1800.0
    """A rank that has not read its part of a step after this time says where it stands and ends; 0: never."""
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
