"""`[inference]`: the engine that shmrl starts, or engines that someone else runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shmrl.config.tables import Device, Positive, Table, Url

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
    """`[inference]`: the engine that shmrl starts, or `urls` of engines that someone else runs."""

    backend: Literal["embedded", "vllm"] = "embedded"
    """embedded: a small engine of our own, for tests and small models. vllm: a vLLM server."""
    python: Path | None = None
    """The interpreter that has vLLM; this one without it."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's server: `tensor_parallel_size = 2` is `--tensor-parallel-size 2`."""
    host: str = "127.0.0.1"
    """The address that the engine binds."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port that the engine binds. Over several nodes host and port are each node's own, and published."""
    urls: list[Url] = Field(default_factory=list)
    """Engines that someone else runs; then none is started."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the engine's weights."""
    device: Device = "cpu"
    """Of the embedded engine."""
    max_model_len: Positive = 1024
    """Tokens of a context, prompt and reply."""
    max_num_seqs: Positive = 64
    """Requests that are generated side by side."""
    max_logprobs: Positive = 64
    """Widest head that can be asked for; trainer.head is at most this."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """Log-probabilities after temperature and truncation, or before."""
    update_mode: Literal["wait", "keep", "abort"] = "keep"
    """What happens to running requests when weights change: they end first, go on with the new ones, or are aborted."""
    weight_transfer: Literal["files", "broadcast"] = "files"
    """files: vLLM reads what the trainer publishes, through shared memory on one host, else run.output_dir.
    broadcast: rank 0 sends it to every vLLM, by NCCL between GPUs, else gloo."""
    colocate: bool = False
    """Engine and trainer share GPUs: the engine sleeps while a step is trained."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Of one answer."""

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
