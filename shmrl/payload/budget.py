"""How many bytes one token takes in the arena: from the model's shape and what the trainer wants captured.

Arithmetic on the configuration and the checkpoint's config.json alone. Called by the launcher's preflight (does the run
fit at all?) and by the orchestrator (how many groups fit now?).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmrl.config import RunTree
from shmrl.errors import ConfigError

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


def model_shape(tree: RunTree) -> ModelShape:
    """The shape of the run's model: of `[model.tiny]`, else of the checkpoint's config.json (ConfigError)."""
    tiny = tree.model.tiny
    if tiny is not None:
        return ModelShape(tiny.layers, tiny.experts, tiny.top_k, tiny.vocab, tiny.max_positions)
    path = Path(str(tree.model.path)) / "config.json"
    try:
        return read_shape(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {path} does not describe a model: {type(error).__name__}: {error}") from error


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


def bytes_per_token(tree: RunTree, shape: ModelShape) -> dict[str, float]:
    """Bytes of one token by column; an upper bound (sampling masks count their top_k)."""
    top_k = max((s.sampling.top_k for s in tree.orchestrator.train.source if s.sampling.truncated), default=0)
    found = {"tokens, log-probabilities, text": 12.2}
    if "routing" in tree.captured:
        found["routing"] = shape.moe_layers * shape.top_k * _id_bytes(shape.experts)
    if "head" in tree.captured:
        found["head"] = 8 * tree.trainer.head
    if "mask" in tree.captured:
        found["mask"] = 4 + 4 * top_k
    return found


def longest_episode(tree: RunTree) -> int:
    """Tokens that one branch of an episode can have and be trained on."""
    return min(tree.orchestrator.seq_len, tree.inference.max_model_len)


def _id_bytes(count: int) -> int:
    """Bytes of the narrowest unsigned integer for `count` ids."""
    return 1 if count <= 1 << 8 else 2 if count <= 1 << 16 else 4
