"""Log-probabilities of chosen tokens, of a captured head, and the entropy, without ever holding [tokens, vocab].

One autograd.Function walks the tokens in chunks; its backward recomputes a chunk's logits and forms the gradient by
hand. Over a kept set (sampling replay) logp(a) = logit_a - logsumexp(logits over the set). Called by `policy.Policy`,
inside the root's forward, where FSDP has gathered the head's weight. Runs in a trainer rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """What the policy says about S sampled tokens.

    Attributes:
        label: float32 [S], log-probability of the sampled token (over its kept set, where it has one).
        head: float32 [S, K], of the captured head's ids; -inf outside the kept set. K is 0 without a head.
        entropy: float32 [S], over the full vocabulary at the sampling temperature; carries no gradient.
    """

    label: Tensor
    head: Tensor
    entropy: Tensor


class KeptSets(NamedTuple):
    """Which ids the sampler kept: `ids` int64 [sum(counts)], `counts` int64 [S]; a count of 0 means no restriction."""

    ids: Tensor
    counts: Tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    head_ids: Tensor | None = None,
    kept: KeptSets | None = None,
    temperature: Tensor | None = None,
    chunk: int = 256,
) -> TokenLogprobs:
    """Log-probabilities at `labels` (and `head_ids`) of softmax(hidden @ weight.T / temperature).

    hidden [S, D] and weight [V, D] in any floating dtype, labels int64 [S], head_ids int64 [S, K], temperature float32
    [S] (1 when absent). Sums and the weight's gradient are float32. S may be 0: the gradients are then zeros.
    """
    picks = labels[:, None] if head_ids is None else torch.cat([labels[:, None], head_ids], dim=1)
    counts = labels.new_zeros(labels.shape[0]) if kept is None else kept.counts
    ids = labels.new_zeros(0) if kept is None else kept.ids
    scale = torch.ones_like(labels, dtype=torch.float32) if temperature is None else 1.0 / temperature.float()
    out, entropy = _Chunked.apply(hidden, weight, picks, ids, counts, scale, chunk)  # type: ignore[no-untyped-call]
    return TokenLogprobs(out[:, 0], out[:, 1:], entropy)


def _restrict(logits: Tensor, ids: Tensor, counts: Tensor) -> None:
    """Set logits [c, V] outside each row's kept ids to -inf, in place; a row with count 0 stays whole.

    By a mask, so that an id that is listed twice counts once.
    """
    if not len(ids):
        return
    excluded = (counts > 0)[:, None].expand(-1, logits.shape[1]).clone()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(ids))
    excluded[rows, ids] = False
    logits.masked_fill_(excluded, -torch.inf)


class _Chunked(torch.autograd.Function):
    """(logp [S, P] at `picks`, entropy [S]); saves only its inputs and one norm per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        picks: Tensor,
        kept_ids: Tensor,
        kept_counts: Tensor,
        scale: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        ends = [0, *kept_counts.cumsum(0).tolist()] if len(kept_ids) else [0] * (tokens + 1)
        out = torch.empty(picks.shape, dtype=torch.float32, device=hidden.device)
        norm = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(norm)
        ctx.chunk, ctx.ends = chunk, ends
        for a in range(0, tokens, chunk):
            b = min(a + chunk, tokens)
            logits = _logits(hidden[a:b], weight, scale[a:b])
            entropy[a:b], norm[a:b] = _entropy(logits)
            if ends[b] > ends[a]:
                _restrict(logits, kept_ids[ends[a] : ends[b]], kept_counts[a:b])
                norm[a:b] = logits.logsumexp(-1)
            out[a:b] = logits.gather(1, picks[a:b]) - norm[a:b, None]
        ctx.save_for_backward(hidden, weight, picks, kept_ids, kept_counts, scale, norm, out == -torch.inf)
        ctx.mark_non_differentiable(entropy)
        return out, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, picks, kept_ids, kept_counts, scale, norm, excluded = ctx.saved_tensors
        grad_out = grads[0].masked_fill(excluded, 0.0)  # an excluded id has probability 0: it moves nothing
        grad_hidden = torch.empty_like(hidden)
        trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros(weight.shape if trained else (), dtype=torch.float32, device=weight.device)
        ends = ctx.ends
        for a in range(0, hidden.shape[0], ctx.chunk):
            b = min(a + ctx.chunk, hidden.shape[0])
            logits = _logits(hidden[a:b], weight, scale[a:b])
            _restrict(logits, kept_ids[ends[a] : ends[b]], kept_counts[a:b])
            probs = logits.sub_(norm[a:b, None]).exp_()
            d = probs.mul_(-grad_out[a:b].sum(1, keepdim=True))
            d.scatter_add_(1, picks[a:b], grad_out[a:b])
            d.mul_(scale[a:b, None])
            grad_hidden[a:b] = d.to(hidden.dtype) @ weight.to(hidden.dtype)
            if trained:
                grad_weight += d.t() @ hidden[a:b].float()
        return grad_hidden, grad_weight.to(weight.dtype) if trained else None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [c, V]; the product runs in the hidden states' dtype, as the model's own head would."""
    with torch.autocast(hidden.device.type, enabled=False):
        return (hidden @ weight.to(hidden.dtype).t()).float().mul_(scale[:, None])


def _entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(entropy [c], logsumexp [c]) over the full vocabulary."""
    norm = logits.logsumexp(-1)
    logp = logits - norm[:, None]
    return -(logp.exp() * logp).sum(-1), norm
