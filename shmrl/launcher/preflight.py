"""Everything that can be known to fail before a process starts: environments, model, ports, shared memory.

Called by `shmrl run` (with --dry-run too) after the configuration was validated; imports no environment and no torch
and takes well under two seconds. All faults are reported at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shmrl.config import RunTree
from shmrl.errors import ConfigError, PortInUse
from shmrl.node.host import arena_mount, available_memory, capacity_bytes, require_torch
from shmrl.node.ports import require_free

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the budget needs of a model. `experts` is 0 for a dense one. Example: ModelShape(4, 8, 2, 264, 1024)"""

    moe_layers: int
    experts: int
    top_k: int
    vocab: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The arena against what can be in flight; sizes in bytes.

    Attributes:
        per_token: bytes of one token by column; an upper bound (sampling masks count their top_k).
        in_flight: episodes x tokens that can be open at once.
    """

    per_token: dict[str, float]
    in_flight: tuple[int, int]
    capacity: int
    free: int

    @property
    def bytes_per_token(self) -> float:
        return sum(self.per_token.values())

    @property
    def needed(self) -> int:
        episodes, tokens = self.in_flight
        return int(episodes * tokens * self.bytes_per_token)


def check(tree: RunTree) -> Budget:
    """The arena's budget of a run that can start. ConfigError with every fault, or PortInUse naming the holder."""
    require_torch()
    problems = _environments(tree)
    shape = _shape(tree, problems)
    budget = arena_budget(tree, shape)
    problems += _memory(tree, budget)
    if problems:
        raise ConfigError(problems)
    _ports(tree)
    return budget


def _environments(tree: RunTree) -> list[str]:
    from shmrl.envs.registry import find

    spawned = [(split, source) for split, source in tree.sources if source.serve.address is None]
    found = [(f"orchestrator.{split}.source {source.name!r}", find(source.env.id)) for split, source in spawned]
    return [f"{where}: {problem}" for where, problem in found if problem]


# ------------------------------------------------------------------------------------------------------------ model


def _shape(tree: RunTree, problems: list[str]) -> ModelShape:
    """The model's shape; adds what cannot work with it to `problems`."""
    tiny = tree.model.tiny
    if tiny is not None:
        return ModelShape(tiny.layers, tiny.experts, tiny.top_k, tiny.vocab, tiny.max_positions)
    path = Path(str(tree.model.path)) / "config.json"
    try:
        config = json.loads(path.read_text())
        shape = read_shape(config)
    except (OSError, ValueError, KeyError) as error:
        problems.append(f"model.path: {path} does not describe a model: {type(error).__name__}: {error}")
        return ModelShape(0, 0, 0, 0, 0)
    if tree.trainer.router_replay and not shape.experts:
        problems.append(
            f"trainer.router_replay captures the field 'routing', but {path} describes a dense model (looked for "
            f"{', '.join(EXPERT_KEYS)}): set trainer.router_replay = false"
        )
    if tree.trainer.head > shape.vocab:
        problems.append(f"trainer.head = {tree.trainer.head} exceeds the vocabulary of {path}, {shape.vocab}")
    if tree.inference.max_model_len > shape.max_positions:
        problems.append(
            f"inference.max_model_len = {tree.inference.max_model_len} exceeds max_position_embeddings = "
            f"{shape.max_positions} of {path}"
        )
    return shape


def read_shape(config: dict[str, Any]) -> ModelShape:
    """The shape in a Hugging Face config.json (of its `text_config` where it has one). KeyError for a missing key."""
    config = config.get("text_config", config)
    experts = next((int(config[key]) for key in EXPERT_KEYS if config.get(key)), 0)
    top_k = next((int(config[key]) for key in TOP_K_KEYS if config.get(key)), 1) if experts else 0
    layers = int(config["num_hidden_layers"]) if experts else 0
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or []) | set(range(int(config.get("first_k_dense_replace") or 0)))
    moe_layers = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    return ModelShape(moe_layers, experts, top_k, int(config["vocab_size"]), int(config["max_position_embeddings"]))


# ----------------------------------------------------------------------------------------------------------- memory


def arena_budget(tree: RunTree, shape: ModelShape) -> Budget:
    """What one token takes in the arena, and how many can be there."""
    top_k = max((s.sampling.top_k for s in tree.orchestrator.train.source if s.sampling.truncated), default=0)
    per_token = {"tokens, log-probabilities, text": 12.2}
    if "routing" in tree.captured:
        per_token["routing"] = shape.moe_layers * shape.top_k * _id_bytes(shape.experts)
    if "head" in tree.captured:
        per_token["head"] = 8 * tree.trainer.head
    if "mask" in tree.captured:
        per_token["mask"] = 4 + 4 * top_k
    longest = min(tree.orchestrator.seq_len, tree.inference.max_model_len)
    in_flight = (tree.orchestrator.inflight, longest)
    return Budget(per_token, in_flight, capacity_bytes(tree.arena), available_memory(tree.arena))


def _id_bytes(count: int) -> int:
    """Bytes of the narrowest unsigned integer for `count` ids."""
    return 1 if count <= 1 << 8 else 2 if count <= 1 << 16 else 4


def _memory(tree: RunTree, budget: Budget) -> list[str]:
    from shmrl.arena import memory
    from shmrl.arena.placement import Pages

    config, mount = tree.arena, arena_mount(tree.arena)
    asked = f"arena.capacity = {config.capacity!r}: "
    problems = [asked + refusal for refusal in memory.refusals(mount, budget.capacity)]
    try:
        Pages.chosen(config.huge_pages, config.numa, mount)
    except ValueError as error:
        problems.append(f"arena.{error}")
    if budget.needed > budget.capacity:
        episodes, tokens = budget.in_flight
        problems.append(
            f"the arena is too small: max_inflight {episodes:,} x {tokens:,} tokens x {budget.bytes_per_token:,.1f} B "
            f"= {size(budget.needed)}, arena.capacity is {size(budget.capacity)} ({_default(tree)}): raise it, or "
            "lower orchestrator.max_inflight, orchestrator.seq_len or trainer.head"
        )
    return problems


def _default(tree: RunTree) -> str:
    return "half of what is free" if tree.arena.capacity is None else "configured"


def size(nbytes: float) -> str:
    """A size as people read it. Example: size(3 << 29) == '1.5 GiB'"""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


# ------------------------------------------------------------------------------------------------------------ ports


def _ports(tree: RunTree) -> None:
    """Every port this run would bind is free now."""
    wanted: dict[int, str] = {}
    for index, (split, source) in enumerate(tree.sources):
        if source.serve.address is None:
            _want(wanted, tree.env_address(index), f"env-server {split}/{source.name}")
    if not tree.inference.urls:
        _want(wanted, tree.inference.engine_urls[0], "inference")


def _want(wanted: dict[int, str], address: str, who: str) -> None:
    url = urlsplit(address)
    port = int(url.port or 0)
    if port in wanted:
        raise PortInUse(f"{who} and {wanted[port]} would both bind port {port}: change one of the two")
    wanted[port] = who
    require_free(str(url.hostname), port, who)
