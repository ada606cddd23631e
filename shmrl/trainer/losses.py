"""The losses: what one sampled token contributes, summed over a micro batch; the caller divides by the step's tokens.

r = exp(d), d = logp of the trainer - logp of the sampler, decided in log space. `icepop` drops tokens whose ratio
leaves [alpha, beta]; `ipo` those whose probability moved by more than eps; `cispo` clips the detached weight; `ppo`
clips the surrogate; `custom` is any `module:function`. Score centering (arXiv:2609.20807) subtracts the expected score
under the sampler, the ratio's weight inside the sum.
Called by `step` in a trainer rank.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shmrl.config import Loss
from shmrl.errors import ConfigError, RunError

_FLOOR = 1e-6  # a tail lighter than this is float32 rounding of 1 - sum
_MAX_LOG = 30.0  # exp() of a larger log-ratio means nothing and overflows later products


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro batch as a loss sees it. S loss tokens, in packing order.

    With trainer.context_parallel the ranks of a group get the same micro batch, and each sees a part of it: two chunks
    of every sequence (`fold.chunks`). Each loss token is seen by one rank alone, and what the ranks return is summed: a
    loss that is a sum over tokens is right as it is, one that needs a whole sequence (its mean ratio) has to add up
    over the group itself. `batch` has the positions that this rank reads, `batch.positions` their places in their
    sequences, `batch.seq_lens` how many of each sequence there are (0 too); `positions` index these. Its loss_mask is
    off where another rank scores. Advantages are per sample, so custom ones arrive as they were given.

    Attributes:
        logprobs: float32 [S] of the trainer, with gradient; over the kept set where there is one.
        sampler_logprobs, advantages, entropy: float32 [S]; advantages are the sample's advantage x weight.
        positions: int64 [S], position of each loss token in the packed row.
        head_ids: int64 [S, K]; head_logprobs: float32 [S, K] of the trainer, with gradient; sampler_head_logprobs: of
            the sampler. None without a captured head.
        batch: the assembled TensorBatch as torch tensors (tokens, positions, loss_mask, logprobs, seq_lens, routing,
            head, mask); only for `custom`, None otherwise.
        meta: one dict per sequence: its source, versions, reward, ... as the sample carries them.
        step, rank, micro_batch: which step (1-based), rank and micro batch (0-based) this is.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    entropy: Tensor
    positions: Tensor
    head_ids: Tensor | None = None
    head_logprobs: Tensor | None = None
    sampler_head_logprobs: Tensor | None = None
    batch: Any = None
    meta: tuple[dict[str, Any], ...] = ()
    step: int = 0
    rank: int = 0
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class LossOutput:
    """loss: scalar, summed over tokens, with gradient. masked: bool [S], tokens without gradient (dropped, clipped)."""

    loss: Tensor
    masked: Tensor


LossFn = Callable[[LossInputs], LossOutput]
Weigh = Callable[[Tensor, Tensor], Tensor]  # (log ratio, advantage) -> what multiplies the score of such a token


def make_loss(config: Loss) -> LossFn:
    """The configured loss. ConfigError when a custom path does not resolve to a function."""
    if config.kind == "custom":
        return _custom(config)
    if config.kind == "ipo":
        return _ipo(config)
    loss = {"icepop": _icepop, "cispo": _cispo, "ppo": _ppo}[config.kind](config)
    return _centered(loss) if config.score_centering else loss.__call__


@dataclass(frozen=True, slots=True)
class _Ratio:
    """A loss given by its surrogate and by the weight its gradient puts on a token's score."""

    surrogate: Callable[[Tensor, Tensor, Tensor], Tensor]  # (d with gradient, logp with gradient, advantage) -> [S]
    weigh: Weigh

    def __call__(self, x: LossInputs) -> LossOutput:
        d = x.logprobs - x.sampler_logprobs
        masked = self.weigh(d.detach(), x.advantages) == 0
        return LossOutput(self.surrogate(d, x.logprobs, x.advantages).sum(), masked)


def _icepop(config: Loss) -> _Ratio:
    low, high = math.log(config.alpha), math.log(config.beta)

    def weigh(d: Tensor, advantage: Tensor) -> Tensor:
        keep = (d >= low) & (d <= high)
        return torch.where(keep, torch.where(keep, d, 0.0).exp(), 0.0)

    return _Ratio(lambda d, logp, advantage: -advantage * weigh(d, advantage), weigh)


def _ipo(config: Loss) -> LossFn:
    def ipo(x: LossInputs) -> LossOutput:
        moved = x.logprobs.detach().exp() - x.sampler_logprobs.exp()
        masked = moved.abs() > config.eps
        d = torch.where(masked, 0.0, x.logprobs - x.sampler_logprobs).clamp(max=_MAX_LOG)
        return LossOutput((-x.advantages * torch.where(masked, 0.0, d.exp())).sum(), masked)

    return ipo


def _cispo(config: Loss) -> _Ratio:
    low, high = 1 - config.clip_low, 1 + config.clip_high

    def weigh(d: Tensor, advantage: Tensor) -> Tensor:
        return d.clamp(max=_MAX_LOG).exp().clamp(low, high)

    return _Ratio(lambda d, logp, advantage: -advantage * weigh(d.detach(), advantage) * logp, weigh)


def _ppo(config: Loss) -> _Ratio:
    low, high = 1 - config.clip_low, 1 + config.clip_high

    def surrogate(d: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        ratio = d.clamp(max=_MAX_LOG).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)

    def weigh(d: Tensor, advantage: Tensor) -> Tensor:
        ratio = d.clamp(max=_MAX_LOG).exp()
        flat = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        return torch.where(flat, 0.0, ratio)

    return _Ratio(surrogate, weigh)


def _centered(loss: _Ratio) -> LossFn:
    def centered(x: LossInputs) -> LossOutput:
        out = loss(x)
        return LossOutput(out.loss + center(x, loss.weigh), out.masked)

    return centered


def center(x: LossInputs, weigh: Weigh) -> Tensor:
    """A scalar of value 0 whose gradient takes the expected weighted score out of every token's term.

    sum over the head of c_v * grad log p_v with c_v = w(p_v/q_v) q_v - w(p_T/q_T) (q_T/p_T) p_v: the tail is taken
    proportional to the trainer's, and sum over all v of p_v grad log p_v is 0.
    """
    if not len(x.logprobs):
        return x.logprobs.sum()
    if x.head_ids is None or x.head_logprobs is None or x.sampler_head_logprobs is None:
        raise RunError(f"score centering: a micro batch with {len(x.logprobs)} loss tokens has no head")
    once = ~_repeated(x.head_ids)
    log_p, log_q = x.head_logprobs.detach(), x.sampler_head_logprobs
    p, q = log_p.exp() * once, log_q.exp() * once
    advantage = x.advantages[:, None]
    p_tail, q_tail = (1 - p.sum(1, keepdim=True)).clamp(min=0), (1 - q.sum(1, keepdim=True)).clamp(min=0)
    tail = (p_tail > _FLOOR) & (q_tail > _FLOOR)
    lift = torch.where(tail, q_tail / p_tail, 0.0)
    lift = lift * weigh(torch.where(tail, p_tail / q_tail, 1.0).log(), advantage)
    d = torch.where(q > 0, log_p - log_q, 0.0)
    c = torch.where(q > 0, weigh(d, advantage) * q, 0.0) - lift * p
    finite = x.head_logprobs.isfinite()
    score = torch.where(finite, x.head_logprobs, 0.0)
    return (advantage * c * (score - score.detach())).sum()


def _repeated(ids: Tensor) -> Tensor:
    """bool [S, K]: True where an earlier column of the row holds the same id."""
    ordered, column = ids.sort(dim=1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter(1, column, again)


def supervised(x: LossInputs) -> LossOutput:
    """Cross-entropy of the demonstrated tokens (warm-up)."""
    return LossOutput(-(x.logprobs * x.advantages).sum(), torch.zeros_like(x.logprobs, dtype=torch.bool))


def mismatch_kl(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """r - log r - 1 per token, float64 [S]: the k3 estimate of KL(sampler || trainer), exact near r = 1."""
    d = logprobs.detach().double() - sampler_logprobs.double()
    return torch.expm1(d) - d


def _custom(config: Loss) -> LossFn:
    module, _, name = (config.path or "").partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"trainer.loss.path = {config.path!r}: {error}") from error

    def custom(x: LossInputs) -> LossOutput:
        out = function(x, **config.args)
        if not isinstance(out, LossOutput) or out.loss.ndim or out.masked.shape != x.logprobs.shape:
            raise RunError(f"{config.path} must return LossOutput(scalar loss, masked bool [{len(x.logprobs)}])")
        return out

    return custom
