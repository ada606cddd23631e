"""Starts vLLM's server for a run: its command line and environment, made of `[inference]`.

`shmrl inference` becomes the server (exec), so that the launcher watches vLLM itself: its log is the role's log, and
its end is the role's. vLLM's interpreter may be another Python; nothing of it is imported here.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from shmrl.config import RunTree
from shmrl.errors import ConfigError
from shmrl.inference.vllm.versions import Installed, Plan, installed, plan
from shmrl.node.ports import free, require_free
from shmrl.node.published import Addresses

log = logging.getLogger(__name__)

PLUGIN = Path(__file__).parent / "plugin"
EXTENSION = "shmrl_vllm_worker.ShmrlWorker"
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; else a share of all memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else workers are pinned to cores that ranks and env workers use, too
}
"""For an engine beside everything else on one machine; the environment's own values win."""


def interpreter(tree: RunTree) -> Path:
    """`inference.python`, else the one that runs us."""
    return tree.inference.python or Path(sys.executable)


def checked_plan(tree: RunTree, found: Installed) -> Plan:
    """How this vLLM delivers what the trainer declares. ConfigError with every reason why it cannot, or not as set."""
    decided = plan(found, tree.captured, all_bounded=all(source.sampling.top_k > 0 for _, source in tree.sources))
    device = tree.inference.device.partition(":")[0]
    problems = []
    if device != found.device:
        problems.append(f"inference.device = {device!r}, but {interpreter(tree)} has a vLLM for {found.device!r}")
    widest = max((s.sampling.top_k for s in tree.orchestrator.train.source if s.sampling.truncated), default=0)
    if decided.masks == "derived" and widest > tree.inference.max_logprobs:
        problems.append(
            f"sampling masks of vLLM {found.version} are read off its log-probabilities, and top_k = {widest} exceeds "
            f"inference.max_logprobs = {tree.inference.max_logprobs}: raise it to {widest}"
        )
    if problems:
        raise ConfigError(problems)
    return decided


def command(tree: RunTree, model: Path, decided: Plan) -> list[str]:
    """The server's command line, `[inference.vllm]` last."""
    engine = tree.inference
    ours: dict[str, Any] = {
        "model": model,
        "served_model_name": tree.model.name,
        "host": engine.host,
        "port": engine.port,
        "dtype": engine.dtype,
        "seed": tree.run.seed % (1 << 31),
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_logprobs": engine.max_logprobs,
        "logprobs_mode": engine.logprobs_mode,
        "generation_config": "vllm",  # else the checkpoint's penalties would shape the draw without anybody knowing
        "worker_extension_cls": EXTENSION,
        "enable_scale_out": True,
        "enable_return_routed_experts": "routing" in tree.captured,
        "return_sampling_mask": decided.masks == "native",
    }
    # `python -m`: the `vllm` script of some builds asks for a distribution of another name, and fails
    start = [str(interpreter(tree)), "-m", "vllm.entrypoints.openai.api_server"]
    off = {key for key, value in ours.items() if value is False}
    return [*start, *arguments({key: value for key, value in ours.items() if key not in off}), *arguments(engine.vllm)]


def arguments(options: dict[str, Any]) -> Iterator[str]:
    """Command-line arguments of TOML values: true and false are switches, tables JSON, lists several words.

    Example: list(arguments({"tensor_parallel_size": 2, "enforce_eager": True, "enable_prefix_caching": False})) ==
    ["--tensor-parallel-size", "2", "--enforce-eager", "--no-enable-prefix-caching"]
    """
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, dict):
            yield from (f"--{name}", json.dumps(value))
        elif isinstance(value, list):
            yield from (f"--{name}", *map(str, value))
        else:
            yield from (f"--{name}", str(value))


def environment(tree: RunTree, decided: Plan, base: dict[str, str]) -> dict[str, str]:
    """`base` with what the server needs: the routes for weight updates, our worker extension, the model runner."""
    path = ":".join([str(PLUGIN), *filter(None, [base.get("PYTHONPATH")])])
    ours = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}
    if decided.runner is not None:
        ours["VLLM_USE_V2_MODEL_RUNNER"] = str(int(decided.runner == "v2"))
    if tree.inference.device == "cpu":
        ours |= {key: base.get(key, value) for key, value in _ON_CPU.items()}
    if ":" in tree.inference.device:
        ours["CUDA_VISIBLE_DEVICES"] = tree.inference.device.partition(":")[2]
    return {**base, **ours}


def _placed(tree: RunTree, addresses: Addresses) -> RunTree:
    """With a port of this node that nobody has, the one it had before, and everyone told."""
    port = addresses.port("inference", "inference") or free(tree.inference.host)
    engine = tree.inference.model_copy(update={"port": port})
    addresses.publish("inference", "inference", engine.engine_urls[0])
    return tree.model_copy(update={"inference": engine})


def run(tree: RunTree) -> NoReturn:
    """Become the server. ConfigError when this vLLM cannot serve the run, PortInUse for a taken port."""
    found = installed(interpreter(tree))
    decided = checked_plan(tree, found)
    if tree.job is not None:
        tree = _placed(tree, Addresses(tree.job))
    require_free(tree.inference.host, tree.inference.port, "inference")
    argv = command(tree, tree.newest_weights, decided)
    log.info("vLLM %s, model runner %s, masks %s: %s", found.version, decided.runner, decided.masks, " ".join(argv))
    logging.shutdown()
    os.execve(argv[0], argv, environment(tree, decided, dict(os.environ)))
