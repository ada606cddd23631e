"""What the model and the loss get: one micro batch's assembled arrays, checked, folded into rows and put on the device.

A micro batch stays one packed row plus lengths until here. Where attention has no varlen form (CPU) the body gets one
right-padded row per sequence without an attention mask: causality alone then keeps sequences apart, in every family.
With flash attention it gets the packed row and its restarting positions; in a context-parallel group, this rank's part
of that row. Called by `step` in a trainer rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shmrl.config import RunTree, Sampling
from shmrl.errors import RunError
from shmrl.trainer.context import ContextParallel
from shmrl.trainer.fold import Fold, part, whole
from shmrl.trainer.logprobs import KeptSets
from shmrl.trainer.replay import RouterReplay
from shmrl.trainer.transfer import sender
from shmrl.types import MicroBatch, Sample


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward pass. S loss positions, rows x columns tokens fed.

    Attributes:
        tokens: int64 [rows, columns]; position_ids: the same shape, or None where columns are positions.
        picks: int64 [S], index into the flattened rows of the hidden state that predicts each loss token.
        labels: int64 [S]; temperature: float32 [S].
        head_ids: int64 [S, K] or None. kept: the sampler's kept sets, or None.
        routes: [rows * columns, layers, top_k], as narrow a signed type as ids and -1 allow, or None (every router
            chooses for itself).
        visible: bool [columns, keys of the context-parallel group] or None (whole sequences, causal).
    """

    tokens: Tensor
    position_ids: Tensor | None
    picks: Tensor
    labels: Tensor
    temperature: Tensor
    head_ids: Tensor | None = None
    kept: KeptSets | None = None
    routes: Tensor | None = None
    visible: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossArrays:
    """What the sampler and the algorithm say about the S loss tokens.

    Attributes:
        positions: int64 [S], in the packed row. sampler_logprobs, advantages: float32 [S].
        head_ids: int64 [S, K], head_logprobs: float32 [S, K] of the sampler; None without a captured head.
    """

    positions: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    head_ids: Tensor | None = None
    head_logprobs: Tensor | None = None


class InputBuilder:
    """Turns assembled micro batches into tensors, and refuses a sample that lacks what the run declares.

    `packed` says whether the model's attention keeps packed sequences apart. `replay` is the model's, or None;
    `context` is the rank's context-parallel group, or None.
    """

    def __init__(
        self,
        tree: RunTree,
        replay: RouterReplay | None,
        device: torch.device,
        packed: bool,
        context: ContextParallel | None = None,
    ) -> None:
        self._replay, self._packed, self._context = replay, packed, context
        self._send = sender(device)
        self._sampling = {source.name: source.sampling for source in tree.orchestrator.train.source}
        self._sampling_replay = tree.trainer.sampling_replay
        self._head = bool(tree.trainer.head)

    def fold(self, micro_batch: MicroBatch) -> Fold:
        """What this rank reads and feeds of a micro batch. A dummy is fed whole, by every rank of a group."""
        if self._context is not None and micro_batch.samples:
            return part(micro_batch.seq_lens, self._context.size, self._context.rank)
        return whole(micro_batch.seq_lens or (micro_batch.num_tokens,), self._packed)

    def build(self, micro_batch: MicroBatch, batch: Any, *, supervised: bool = False) -> tuple[ModelInputs, LossArrays]:
        """Both halves of one micro batch; `supervised` (warm-up) tokens carry no captured fields.

        RunError names field and source of a sample that misses what the run declared.
        """
        at = np.flatnonzero(np.asarray(batch.loss_mask, dtype=bool)).astype(np.int64)
        fold = self.fold(micro_batch)
        owner = fold.sequence[at]
        tokens = np.asarray(batch.tokens).astype(np.int64)
        if not supervised:
            self._check(micro_batch.samples, np.bincount(owner, minlength=len(micro_batch.samples)))
        weights = [s.weight * (1.0 if supervised else s.advantage) for s in micro_batch.samples]
        host = {
            "tokens": fold.spread(tokens, 0),
            "position_ids": fold.positions,
            "visible": fold.visible,
            "picks": fold.predictors(at),
            "labels": tokens[at],
            "temperature": self._temperatures(micro_batch.samples)[owner],
            "positions": at,
            "sampler_logprobs": np.asarray(batch.logprobs)[at],
            "advantages": np.array(weights, dtype=np.float32)[owner],
        }
        if not supervised:
            host |= self._captured(micro_batch.samples, batch, fold, at, owner)
        there = self._send({name: array for name, array in host.items() if array is not None})
        inputs = ModelInputs(
            tokens=there["tokens"],
            position_ids=there.get("position_ids"),
            picks=there["picks"],
            labels=there["labels"],
            temperature=there["temperature"],
            head_ids=there.get("head_ids"),
            kept=KeptSets(there["kept_ids"], there["kept_counts"]) if "kept_ids" in there else None,
            routes=there.get("routes"),
            visible=there.get("visible"),
        )
        about = there["positions"], there["sampler_logprobs"], there["advantages"]
        return inputs, LossArrays(*about, there.get("head_ids"), there.get("head_logprobs"))

    def _sampling_of(self, sample: Sample) -> Sampling:
        name = sample.meta.get("source")
        if name not in self._sampling:
            raise RunError(
                f"a sample of source {name!r} arrived; this run trains on {', '.join(sorted(self._sampling))}"
            )
        return self._sampling[name]

    def _masked(self, sample: Sample) -> bool:
        """True when this sample's tokens were drawn from kept sets that the trainer has to see."""
        return self._sampling_replay and self._sampling_of(sample).truncated

    def _check(self, samples: tuple[Sample, ...], loss_tokens: NDArray[np.int64]) -> None:
        """Every sample with loss tokens has every declared field."""
        for sample, count in zip(samples, loss_tokens, strict=True):
            wanted = {"routing": self._replay is not None, "head": self._head, "mask": count and self._masked(sample)}
            missing = [name for name, on in wanted.items() if on and name not in sample.fields]
            if count and missing:
                raise RunError(
                    f"source {sample.meta.get('source')!r}: a sample with {count} loss tokens has no "
                    f"{', '.join(missing)}, which this run trains with; was it captured by the engine?"
                )

    def _temperatures(self, samples: tuple[Sample, ...]) -> NDArray[np.float32]:
        """Of each sequence's log-probabilities: the sampling temperature, or 1 where the engine reports raw ones."""
        return np.array(
            [
                1.0
                if sample.meta.get("logprobs_mode") == "raw"
                else sample.meta.get("temperature", self._sampling_of(sample).temperature)
                for sample in samples
            ],
            dtype=np.float32,
        )

    def _captured(
        self, samples: tuple[Sample, ...], batch: Any, fold: Fold, at: NDArray[np.int64], owner: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """What was captured of the sampler and is replayed, under the names of `ModelInputs` and `LossArrays`."""
        found: dict[str, NDArray[Any]] = {}
        if self._replay is not None and batch.routing is not None:
            covered = np.asarray(batch.routing_covered, dtype=bool)
            ids = fold.spread(self._replay.checked(np.asarray(batch.routing), covered), -1)
            found["routes"] = ids.reshape(-1, *ids.shape[-2:])
        if self._head and batch.head_ids is not None:
            self._covered("head", np.asarray(batch.head_covered)[at], samples, owner)
            head_ids, head_logprobs = batch.head_without_sampled()
            found |= {"head_ids": head_ids[at].astype(np.int64), "head_logprobs": head_logprobs[at]}
        if self._sampling_replay and batch.mask_ids is not None:
            all_counts = np.asarray(batch.mask_counts).astype(np.int64)
            counts = all_counts[at]
            restricted = np.array([self._masked(sample) for sample in samples], dtype=bool)[owner]
            self._covered("mask", (counts > 0) | ~restricted, samples, owner)
            wanted = np.zeros(len(all_counts), dtype=bool)
            wanted[at] = True
            kept = np.asarray(batch.mask_ids)[np.repeat(wanted, all_counts)]
            found |= {"kept_ids": kept.astype(np.int64), "kept_counts": counts}
        return found

    @staticmethod
    def _covered(field: str, there: NDArray[np.bool_], samples: tuple[Sample, ...], owner: NDArray[np.int64]) -> None:
        gaps = np.flatnonzero(~there)
        if gaps.size:
            source = samples[owner[gaps[0]]].meta.get("source")
            raise RunError(
                f"source {source!r}: {gaps.size} loss tokens have no {field} row, the first is token {gaps[0]}"
            )
