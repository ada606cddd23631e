"""One training step on one rank: assemble everything, agree with the other ranks, release, train.

Assembly is the release point: after it and one all-reduce no rank needs the blocks any more, so they are done before
the first forward pass. What could not be read leaves the loss and the token count on every rank. Called by `loop`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from shmrl.arena import Arena
from shmrl.config import RunTree
from shmrl.errors import ChecksumError, LostPayload, RunError, StaleHandle
from shmrl.monitor.watchdog import progress
from shmrl.node.blocks import StepBlocks
from shmrl.node.host import read_token
from shmrl.payload import TensorBatch, assemble
from shmrl.trainer.fold import Fold
from shmrl.trainer.inputs import InputBuilder, LossArrays
from shmrl.trainer.logprobs import TokenLogprobs
from shmrl.trainer.losses import LossFn, LossInputs, LossOutput, make_loss, mismatch_kl, supervised
from shmrl.trainer.models import precision
from shmrl.trainer.parallel import Ranks, clip_gradients, gradient_sync
from shmrl.trainer.policy import Policy
from shmrl.types import MicroBatch

log = logging.getLogger(__name__)

_COMPUTED = ("loss", "kl", "entropy", "masked")  # sums over loss tokens, which stay on the device until the step ends
_SUMS = ("loss_tokens", "tokens", "bytes", "unrouted", "fetch_s", "fetches")


@dataclass(slots=True)
class _Share:
    """This rank's part of one step: micro batches with their arrays (of a dropped one: its stand-in), and sums."""

    work: list[tuple[MicroBatch, TensorBatch]] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    computed: list[torch.Tensor] = field(default_factory=list)  # per micro batch, float64 [len(_COMPUTED)]
    fetch_max_s: float = 0.0
    global_tokens: int = 0
    lost: int = 0  # over all ranks


class Stepper:
    """Runs steps on this rank's share of micro batches.

    `module` is the wrapped `policy`; `optimizer` is replaced by the caller when the warm-up ends.
    """

    def __init__(
        self,
        tree: RunTree,
        ranks: Ranks,
        arena: Arena,
        policy: Policy,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.optimizer = optimizer
        self._tree, self._ranks, self._arena = tree, ranks, arena
        self._policy, self._module = policy, module
        self._loss: LossFn = make_loss(tree.trainer.loss)
        self._builder = InputBuilder(tree, policy.replay, ranks.device, policy.packed, policy.context)
        self._group_size = tree.trainer.context_parallel
        self._layers = None if policy.replay is None else policy.replay.layers  # what is read of the routing
        self._blocks = StepBlocks(arena, ranks.rank, tree.arena, tree.node, read_token(tree.arena))
        self._staging: dict[int, TensorBatch] = {}  # by index in the step: buffers are reused from step to step

    def run(
        self,
        step: int,
        micro_batches: list[MicroBatch],
        *,
        lr: float,
        warmup: bool = False,
        nodes: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Train one step; the metrics of all ranks, the same on each. RunError when nothing of it can be read.

        nodes: where blocks of other nodes are served, by `Handle.origin`.
        """
        began = time.monotonic()
        share = self._assemble(step, micro_batches, nodes or {})
        assembled = time.monotonic()
        self._blocks.done(micro_batches)
        for index in range(len(share.work)):
            with gradient_sync(self._module, on=index == len(share.work) - 1):
                self._accumulate(step, index, share, warmup)
        grad_norm = clip_gradients(self._module, self._tree.trainer.optimizer.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise RunError(f"step {step}: the gradient's norm is {grad_norm}; nothing was changed")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = self._metrics(share, assembled)
        return metrics | {"train/grad_norm": grad_norm, "train/lr": lr, "time/assemble": assembled - began}

    def close(self) -> None:
        """Ends what steps have begun on other nodes."""
        self._blocks.close()

    # ------------------------------------------------------------------------------------------------------ assemble

    def _assemble(self, step: int, micro_batches: list[MicroBatch], nodes: Mapping[str, str]) -> _Share:
        """Read every micro batch, then agree: which are lost anywhere, and how many loss tokens remain everywhere."""
        share = _Share()
        mine = torch.zeros(2, len(micro_batches), dtype=torch.int64)  # lost, loss tokens
        with progress(f"rank {self._ranks.rank}", f"reading step {step}", self._tree.trainer.stall_timeout_s):
            micro_batches = self._blocks.here(micro_batches, nodes)
            read = [self._read(index, micro_batch, share) for index, micro_batch in enumerate(micro_batches)]
        for index, batch in enumerate(read):
            mine[:, index] = torch.tensor([1, 0] if batch is None else [0, int(batch.loss_mask.sum())])
        everywhere = torch.zeros(self._ranks.world, *mine.shape, dtype=torch.int64)
        everywhere[self._ranks.rank] = mine
        groups = self._ranks.sum(everywhere).view(-1, self._group_size, *mine.shape)  # [groups, ranks of one, ...]
        lost = groups[:, :, 0].amax(1)
        dropped = lost[self._ranks.rank // self._group_size].tolist()
        for micro_batch, batch, gone in zip(micro_batches, read, dropped, strict=True):
            share.work.append(self._stand_in(micro_batch, read) if batch is None or gone else (micro_batch, batch))
        share.lost, share.global_tokens = int(lost.sum()), int((groups[:, :, 1].sum(1) * (1 - lost)).sum())
        if share.global_tokens == 0:
            raise RunError(f"step {step}: no loss token can be read ({share.lost} micro batches are lost)")
        return share

    def _read(self, index: int, micro_batch: MicroBatch, share: _Share) -> TensorBatch | None:
        """One micro batch into its staging buffers; None when a block of it is lost."""
        began = time.monotonic()
        fold = self._builder.fold(micro_batch)
        try:
            batch = assemble(
                self._arena,
                micro_batch,
                out=self._staging.get(index),
                tokens=fold.ranges,
                layers=self._layers,
                verify=self._tree.arena.verify,
            )
        except (LostPayload, StaleHandle, ChecksumError) as error:
            log.error("micro batch %d is dropped: %s", index, error)
            return None
        self._staging[index] = batch
        if fold.foreign is not None:
            batch.loss_mask[fold.foreign] = False
        took = time.monotonic() - began
        if micro_batch.samples:
            share.fetch_max_s = max(share.fetch_max_s, took)
            share.sums["fetch_s"] += took
            share.sums["fetches"] += 1
            share.sums["tokens"] += np.count_nonzero(fold.index >= 0)
        if self._ranks.rank % self._group_size == 0:  # the others read parts of the same blocks
            share.sums["bytes"] += sum(handle.nbytes for handle in micro_batch.handles)
        share.sums["unrouted"] += _unrouted(fold, batch)
        return batch

    def _stand_in(self, micro_batch: MicroBatch, read: Sequence[TensorBatch | None]) -> tuple[MicroBatch, TensorBatch]:
        """What is fed for a dropped micro batch, for the collectives: one token without loss. Its route is a real row
        where this rank has one, so that routers get what they always get; else a padding row, never zeros."""
        dummy = MicroBatch((), padding=1, fields=micro_batch.fields, shapes=micro_batch.shapes)
        batch = assemble(self._arena, dummy, layers=self._layers)
        routed = [other for other in read if other is not None and other.routing is not None]
        real = next((other.routing[at] for other in routed for at in np.flatnonzero(other.routing_covered)[:1]), None)
        if batch.routing is not None and real is not None:
            batch.routing[:], batch.routing_covered[:] = real, True
        return dummy, batch

    # --------------------------------------------------------------------------------------------------------- train

    def _accumulate(self, step: int, index: int, share: _Share, warmup: bool) -> None:
        """Forward and backward of one micro batch; a dummy runs both with a loss of zero, for the collectives.

        Returns when everything is launched: the next micro batch is prepared and sent while a device computes this one.
        """
        micro_batch, batch = share.work[index]
        inputs, arrays = self._builder.build(micro_batch, batch, supervised=warmup)
        with self._policy.prepared(inputs):
            with precision(self._tree, self._ranks.device):
                out: TokenLogprobs = self._module(inputs)
            result = self._apply(step, index, micro_batch, batch, out, arrays, warmup)
            (result.loss * (self._ranks.world / share.global_tokens)).backward()  # type: ignore[no-untyped-call]
        kl = out.label.new_zeros(1) if warmup else mismatch_kl(out.label, arrays.sampler_logprobs)
        found = (result.loss.detach(), kl.sum(), out.entropy.sum(), result.masked.sum())
        share.computed.append(torch.stack([value.double() for value in found]))
        share.sums["loss_tokens"] += len(out.label)

    def _apply(
        self,
        step: int,
        index: int,
        micro_batch: MicroBatch,
        batch: TensorBatch,
        out: TokenLogprobs,
        arrays: LossArrays,
        warmup: bool,
    ) -> LossOutput:
        empty = not len(out.label)
        if empty and not micro_batch.samples:
            return LossOutput(out.label.sum() + out.head.sum(), torch.zeros_like(out.label, dtype=torch.bool))
        custom = self._tree.trainer.loss.kind == "custom" and not warmup
        x = LossInputs(
            logprobs=out.label,
            sampler_logprobs=arrays.sampler_logprobs,
            advantages=arrays.advantages,
            entropy=out.entropy,
            positions=arrays.positions,
            head_ids=arrays.head_ids,
            head_logprobs=None if arrays.head_ids is None else out.head,
            sampler_head_logprobs=arrays.head_logprobs,
            batch=batch.torch(self._ranks.device) if custom else None,
            meta=tuple(sample.meta for sample in micro_batch.samples),
            step=step,
            rank=self._ranks.rank,
            micro_batch=index,
        )
        return supervised(x) if warmup else self._loss(x)

    # ------------------------------------------------------------------------------------------------------- metrics

    def _metrics(self, share: _Share, assembled: float) -> dict[str, float]:
        """Means over the loss tokens of all ranks. `fetch` is what it took to read one micro batch into staging."""
        computed = torch.stack(share.computed).sum(0).tolist()  # waits for the device: only now the step has ended
        train_s = time.monotonic() - assembled
        rows = self._ranks.gather([*computed, *share.sums.values(), share.fetch_max_s, train_s])
        total = dict(zip((*_COMPUTED, *_SUMS), rows.sum(0).tolist(), strict=False))
        train_s = float(rows[:, -1].max())
        per_token = 1.0 / total["loss_tokens"]
        return {
            "train/loss": total["loss"] * per_token,
            "train/mismatch_kl": total["kl"] * per_token,
            "train/entropy": total["entropy"] * per_token,
            "train/masked_fraction": total["masked"] * per_token,
            "train/tokens_per_s": total["tokens"] / train_s,
            "time/train": train_s,
            "time/fetch_mean": total["fetch_s"] / max(total["fetches"], 1.0),
            "time/fetch_max": float(rows[:, -2].max()),
            "payload/bytes": total["bytes"],
            "payload/dropped_micro_batches": float(share.lost),
            "payload/routing_missing_fraction": total["unrouted"] / max(total["tokens"], 1.0),
        }


def _unrouted(fold: Fold, batch: TensorBatch) -> int:
    """Fed tokens without a recorded route; a sequence's last token was never fed to the sampler and does not count."""
    covered: Any = batch.routing_covered
    return 0 if covered is None else int(np.count_nonzero(fold.routed & ~covered[: len(fold.routed)]))
