"""`shmrl trainer FILE --fake-data`: how fast these ranks train, without an engine, environments or an orchestrator.

Every rank fills an arena of its own with invented episodes as long as the run allows, each with every field the run
captures, and trains on them for run.max_steps steps at a learning rate of 0. Rank 0 prints a line per step. In every
trainer rank.
"""

from __future__ import annotations

import dataclasses
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmrl.arena import Arena
from shmrl.config import RunTree, TrainSource
from shmrl.config.budget import bytes_per_token, longest_episode
from shmrl.config.shape import ModelShape, model_shape
from shmrl.inference.embedded.tiny import write_tiny
from shmrl.payload import Branch, encode, pack
from shmrl.trainer.models import prepare
from shmrl.trainer.parallel import Ranks
from shmrl.trainer.step import Stepper
from shmrl.types import MicroBatch

BLOCK_OVERHEAD, ARENA_OVERHEAD = 64 << 10, 16 << 20  # bytes: headers, and pages that blocks do not fill
KEPT = 8  # ids in each sampling mask: what top_p = 0.98 leaves on average


def main(tree: RunTree) -> int:
    """Train on invented episodes and print what it took; 0. ShmrlError as in a run."""
    torch.manual_seed(tree.run.seed)
    ranks = Ranks(tree.trainer.device)
    with model(tree, ranks) as path, episodes(tree, ranks) as (arena, micro_batches):
        policy, module = prepare(tree, ranks, path)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0, foreach=True)
        stepper = Stepper(tree, ranks, arena, policy, module, optimizer)
        took = [_step(tree, ranks, stepper, step, micro_batches) for step in range(1, tree.run.max_steps + 1)]
        if ranks.rank == 0:
            print(f"median of all steps but the first: {statistics.median(took[1:] or took):.3f} s", flush=True)
    ranks.close()
    return 0


def _step(tree: RunTree, ranks: Ranks, stepper: Stepper, step: int, micro_batches: list[MicroBatch]) -> float:
    """Seconds of one step, assembly included."""
    began = time.monotonic()
    metrics = stepper.run(step, micro_batches, lr=0.0)
    took = time.monotonic() - began
    if ranks.rank == 0:
        tokens = metrics["train/tokens_per_s"] * metrics["time/train"]
        print(
            f"step {step}: {took:.3f} s, {tokens / took:,.0f} tokens/s on {ranks.world} ranks, "
            f"{_peak_memory(ranks.device) / 2**30:.2f} GiB at most on rank 0",
            flush=True,
        )
    return took


def _peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the device, or resident where that is the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def model(tree: RunTree, ranks: Ranks) -> Iterator[Path]:
    """`model.path`, or the model of `[model.tiny]`, which rank 0 writes for as long as this is open."""
    if tree.model.tiny is None:
        yield tree.initial_weights
        return
    made = tempfile.mkdtemp(prefix="shmrl-fake-") if ranks.rank == 0 else ""
    path = Path(ranks.gather_objects(made)[0])
    try:
        if ranks.rank == 0:
            write_tiny(tree.model.tiny, path, tree.run.seed)
        ranks.gather_objects(None)
        yield path
    finally:
        if ranks.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def episodes(tree: RunTree, ranks: Ranks) -> Iterator[tuple[Arena, list[MicroBatch]]]:
    """An arena of this rank's own, and its share of one step; ranks of a context-parallel group hold the same."""
    shape, tokens = model_shape(tree), longest_episode(tree)
    batch = tree.orchestrator.batch_size or max((tree.orchestrator.token_batch_size or 0) // tokens, 1)
    count = max(batch // tree.trainer.data_ranks, 1)
    rng = np.random.default_rng(tree.run.seed + ranks.rank // tree.trainer.context_parallel)
    nbytes = sum(bytes_per_token(tree, shape).values()) * tokens + BLOCK_OVERHEAD
    arena = Arena.create(int(count * nbytes) + ARENA_OVERHEAD, backing="memfd")
    try:
        source = tree.orchestrator.train.source[0]
        branches = (_branch(tree, source, shape, tokens, rng) for _ in range(count))
        samples = [
            dataclasses.replace(encode(arena, branch, tag=f"fake/{index}"), advantage=(-1.0) ** index)
            for index, branch in enumerate(branches)
        ]
        arena.ship([handle for sample in samples for handle in sample.handles], readers=ranks.world + 1, step=1)
        (micro_batches,) = pack(samples, seq_len=tree.orchestrator.seq_len, num_ranks=1)
        yield arena, micro_batches
    finally:
        arena.unlink()
        arena.close()


def _branch(tree: RunTree, source: TrainSource, shape: ModelShape, tokens: int, rng: np.random.Generator) -> Branch:
    """An episode of `tokens` tokens, the first quarter of them a prompt, with every captured field."""
    ids = rng.integers(0, shape.vocab, tokens)
    loss_mask = np.arange(tokens) >= max(tokens // 4, 1)
    sampled = ids[loss_mask]
    given: dict[str, Any] = {}
    sampling = source.sampling
    meta = {"source": source.name, "logprobs_mode": "processed", "temperature": sampling.temperature}
    if "routing" in tree.captured:
        first = rng.integers(0, shape.experts, (tokens - 1, len(shape.moe_layers), 1))
        given["routing"] = (first + np.arange(shape.top_k)) % shape.experts
        given |= {"layers": shape.moe_layers, "num_experts": shape.experts}
    if "head" in tree.captured:
        head = (sampled[:, None] + np.arange(tree.trainer.head)) % shape.vocab
        given["head"] = (head.astype(np.int32), np.full(head.shape, -np.log(2 * tree.trainer.head), np.float32))
    if sampling.truncated:
        meta |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        width = min(KEPT, shape.vocab, sampling.top_k)
        kept = (sampled[:, None] + np.arange(width)) % shape.vocab
        given["mask"] = (kept.astype(np.int32).ravel(), np.where(loss_mask, width, 0).astype(np.int32))
    logprobs = np.where(loss_mask, -np.log(shape.vocab), 0.0).astype(np.float32)
    return Branch(ids.astype(np.int32), loss_mask, logprobs, meta=meta, **given)
