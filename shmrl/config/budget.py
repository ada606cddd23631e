"""How many bytes one token takes in the arena: from the model's shape and what the trainer wants captured.

Arithmetic on the configuration and the checkpoint's config.json alone. Called by the launcher's preflight (does the run
fit at all?) and by the orchestrator (how many groups fit now?).
"""

from __future__ import annotations

from shmrl.config import RunTree
from shmrl.config.shape import ModelShape

HIGH, LOW = 0.90, 0.75  # of the arena: above the one no group of episodes starts, below the other they start again


def bytes_per_token(tree: RunTree, shape: ModelShape) -> dict[str, float]:
    """Bytes of one token by column; an upper bound (sampling masks count their top_k)."""
    top_k = max((s.sampling.top_k for s in tree.orchestrator.train.source if s.sampling.truncated), default=0)
    found = {"tokens, log-probabilities, text": 12.2}
    if "routing" in tree.captured:
        found["routing"] = len(shape.moe_layers) * shape.top_k * _id_bytes(shape.experts)
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
