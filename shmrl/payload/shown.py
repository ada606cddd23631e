"""What people are shown of a sample: its text, and facts of every token. Small, and plain values that travel.

Called where the blocks are: by the orchestrator, and by the node server of another node. Of a long episode only the
last TOKENS positions are read, so that neither its memory nor the answer grows with the episode.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import LostPayload, PayloadError
from shmrl.payload.assemble import assemble
from shmrl.payload.batch import TensorBatch
from shmrl.payload.header import read_text
from shmrl.types import MicroBatch, Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena

log = logging.getLogger(__name__)

TOKENS = 2048
SHOWN_FIELDS = ("routing", "mask")
NOTHING: dict[str, Any] = {"messages": None, "per_token": None}


def shown(arena: Arena, sample: Sample) -> dict[str, Any]:
    """{messages, per_token}: None without, and where the block is lost: what becomes of it is for the trainer's ranks
    to agree on."""
    batch = _window(arena, sample)
    return {"messages": _messages(arena, sample), "per_token": None if batch is None else _facts(batch, sample)}


def _messages(arena: Arena, sample: Sample) -> list[dict[str, Any]] | None:
    try:
        return read_text(arena, sample)
    except LostPayload:
        return None


def _window(arena: Arena, sample: Sample) -> TensorBatch | None:
    """The arrays of the sample's last TOKENS positions; None where they cannot be read: the ranks will say so."""
    fields = tuple(name for name in SHOWN_FIELDS if name in sample.fields)
    try:
        whole = MicroBatch((sample,), fields=fields)
        return assemble(arena, whole, None, [(0, max(0, sample.T - TOKENS), sample.T)])
    except (LostPayload, PayloadError) as error:
        log.warning("a rollout is saved without its tokens: %s", error)
        return None


def _facts(batch: TensorBatch, sample: Sample) -> dict[str, Any]:
    """Lists of one value per position, from `start` on, and expert_load: how often each layer chose each expert there.

    sampled: 1 where the policy drew the token, whose logprobs are the sampler's (0 elsewhere). mask: how many ids the
    sampler kept, 0 = all. load: of the experts that the token went to, the mean of choices per expert over the
    balanced number; 1.0 is balance. mask, load, expert_load and layers are None where nothing was captured.
    """
    counts = batch.mask_counts
    found = {
        "start": max(0, sample.T - TOKENS),
        "ids": batch.tokens.tolist(),
        "sampled": batch.loss_mask.astype(np.int8).tolist(),
        "logprobs": _rounded(batch.logprobs, 4),
        "mask": None if counts is None else counts.tolist(),
        "load": None,
        "expert_load": None,
        "layers": None,
    }
    if batch.routing is not None and batch.routing_covered.any():
        load, chosen = _expert_load(batch.routing, batch.routing_covered, batch.num_experts)
        found |= {"load": _rounded(load, 3), "expert_load": chosen.tolist(), "layers": list(batch.layers)}
    return found


def _expert_load(
    routing: NDArray[Any], covered: NDArray[np.bool_], experts: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(load [N], 0 where nothing was recorded; choices int64 [layers, experts])."""
    count, layers, top_k = routing.shape
    rows = routing[covered].astype(np.int32) + np.arange(0, layers * experts, experts, dtype=np.int32)[:, None]
    chosen = np.bincount(rows.reshape(-1), minlength=layers * experts)
    relative = chosen.astype(np.float32) * (experts / (len(rows) * top_k))
    load = np.zeros(count, np.float32)
    load[covered] = relative[rows].mean(axis=(1, 2))
    return load, chosen.reshape(layers, experts)


def _rounded(values: NDArray[Any], digits: int) -> list[float]:
    rounded: list[float] = np.round(values.astype(np.float64), digits).tolist()
    return rounded
