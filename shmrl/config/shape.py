"""What a Hugging Face config.json says about a model's shape: experts, MoE layers, vocabulary.

The one reading of those keys, for the launcher's preflight, the arena's budget and the env workers' `ChatFormat`; no
torch, no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmrl.config.tree import RunTree
from shmrl.errors import ConfigError

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The routers' shape and the limits of a model. A dense one has experts = top_k = 0 and no MoE layers.

    Attributes:
        layers: decoder layers in all. moe_layers: global ids of those with a router, ascending.
        max_positions: longest context; 0 where config.json does not say.

    Example: ModelShape(layers=4, moe_layers=(1, 2, 3), experts=8, top_k=2, vocab=264, max_positions=1024)
    """

    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    vocab: int
    max_positions: int


def model_shape(tree: RunTree) -> ModelShape:
    """The shape of the run's model: of `[model.tiny]`, else of the checkpoint's config.json (ConfigError)."""
    tiny = tree.model.tiny
    if tiny is not None:
        layers = tuple(range(tiny.layers))
        return ModelShape(tiny.layers, layers, tiny.experts, tiny.top_k, tiny.vocab, tiny.max_positions)
    path = Path(str(tree.model.path)) / "config.json"
    try:
        return read_shape(json.loads(path.read_text()))
    except OSError as error:
        why = f"{error.strerror}: it is a directory in Hugging Face layout"
    except (ValueError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ConfigError(f"model.path: {path} does not describe a model: {why}")


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a config.json (of its `text_config` where it has one). KeyError for a missing key."""
    config = config.get("text_config", config)
    experts = next((int(config[key]) for key in EXPERT_KEYS if config.get(key)), 0)
    top_k = next((int(config[key]) for key in TOP_K_KEYS if config.get(key)), 1) if experts else 0
    return ModelShape(
        layers=int(config["num_hidden_layers"]),
        moe_layers=moe_layers(config) if experts else (),
        experts=experts,
        top_k=top_k,
        vocab=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
    )


def moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Global ids of the layers with a router, in a config of a mixture of experts.

    `mlp_layer_types` lists them ("sparse"); older configs say it by rule: `first_k_dense_replace` and `moe_layer_freq`
    (DeepSeek, GLM), `decoder_sparse_step` and `mlp_only_layers` (Qwen). Without any of these every layer has one.

    Example: moe_layers({"num_hidden_layers": 4, "first_k_dense_replace": 1}) == (1, 2, 3)
    """
    layers = range(int(config["num_hidden_layers"]))
    if kinds := config.get("mlp_layer_types"):
        return tuple(layer for layer in layers if kinds[layer] == "sparse")
    step, every = int(config.get("decoder_sparse_step") or 1), config.get("moe_layer_freq") or 1
    dense = set(config.get("mlp_only_layers") or ()) | set(range(int(config.get("first_k_dense_replace") or 0)))

    def sparse(layer: int) -> bool:
        by_frequency = every[layer] if isinstance(every, list) else layer % every == 0
        return bool(by_frequency) and (layer + 1) % step == 0 and layer not in dense

    return tuple(filter(sparse, layers))
