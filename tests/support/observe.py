"""A custom loss that writes down every array a rank assembled: `trainer.loss.path = "tests.support.observe:record"`."""

import json
from pathlib import Path

import numpy as np
import torch

from shmrl.trainer.losses import LossOutput

ARRAYS = ("tokens", "positions", "loss_mask", "logprobs", "seq_lens", "routing", "routing_covered", "head_ids",
          "head_logprobs", "head_covered", "mask_ids", "mask_counts")  # fmt: skip


def record(x, directory):
    """One .npz per micro batch that has sequences; the loss is zero with a gradient path, so that nothing is learnt."""
    if x.meta:
        name = f"step{x.step}-rank{x.rank}-micro{x.micro_batch}"
        arrays = {key: getattr(x.batch, key).numpy() for key in ARRAYS if getattr(x.batch, key) is not None}
        np.savez(Path(directory) / f"{name}.npz", **arrays, meta=np.array(json.dumps(x.meta)))
    return LossOutput(0.0 * x.logprobs.sum(), torch.zeros_like(x.logprobs, dtype=torch.bool))
