"""Sampling of one token per row, vectorised over rows whose parameters differ. Engine thread only.

Order of the rules, as vLLM applies them: temperature, min-p, top-k, top-p; then one draw. The draw is the arg max of
log p + Gumbel noise, and the noise is a hash of (seed, position, token id): no generator state, so a row draws the same
token whoever is batched beside it, and an interrupted step can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shmrl.inference.embedded.params import SamplingParams

_MASK32 = 0xFFFFFFFF


@dataclass(slots=True)
class Picked:
    """What one step chose for B rows, on the host.

    tokens, logprobs, ranks: B each. head_ids, head_logprobs: [B, N], best first, -inf where filtered out.
    kept: per row the ids that survived truncation, ascending int32; None for a row without truncation.
    """

    tokens: list[int]
    logprobs: list[float]
    ranks: list[int]
    head_ids: np.ndarray
    head_logprobs: np.ndarray
    kept: list[np.ndarray | None]


class Batch:
    """The rows' parameters as tensors: made when rows join or leave, used for every step between."""

    def __init__(self, params: list[SamplingParams], seeds: list[int], device: torch.device) -> None:
        self.seeds = np.array(seeds, dtype=np.uint64)
        self.num_top = max((p.logprobs or 0 for p in params), default=0)
        self.greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        self.temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device, dtype=torch.float32)[
            :, None
        ]
        cut = [i for i, p in enumerate(params) if p.truncates]
        whole = [i for i, p in enumerate(params) if not p.truncates]
        self.cut, self.whole = torch.tensor(cut, device=device), torch.tensor(whole, device=device)
        self.top_k = torch.tensor([params[i].top_k or _MASK32 for i in cut], device=device)[:, None]
        self.max_top_k = max((params[i].top_k or _MASK32 for i in cut), default=0)
        self.top_p = torch.tensor(
            [params[i].top_p if params[i].top_p < 1 else 2.0 for i in cut], device=device, dtype=torch.float32
        )[:, None]
        self.log_min_p = torch.tensor([params[i].min_p for i in cut], device=device, dtype=torch.float32)[:, None].log()


class Sampler:
    """Draws tokens and reports their log-probabilities.

    Args:
        raw: report log-probabilities of the unmodified logits (vLLM's raw_logprobs) instead of those the draw used.
    """

    def __init__(self, vocab: int, device: torch.device, *, raw: bool) -> None:
        self._token_hash = _mix32(torch.arange(vocab, device=device) * 0x9E3779B1 & _MASK32)
        self._vocab, self._device, self._raw = vocab, device, raw

    def __call__(self, logits: torch.Tensor, batch: Batch, positions: list[int], unmodified: torch.Tensor) -> Picked:
        """One token per row of `logits` [B, V] float32; `positions` are the positions the drawn tokens will have.

        `unmodified`: the logits before any were banned (what raw log-probabilities are taken from).
        """
        rows, n = logits.shape[0], min(batch.num_top, self._vocab)
        keys = torch.from_numpy(draw_keys(batch.seeds, positions)).to(self._device)[:, None]
        scaled = logits / batch.temperature
        tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
        logprobs = logits.new_empty(rows)
        ranks = torch.empty_like(tokens)
        heads = tokens.new_empty(rows, n), logits.new_empty(rows, n)
        kept: list[np.ndarray | None] = [None] * rows
        if len(batch.whole):
            at = batch.whole
            chosen = self._draw_whole(scaled[at], keys[at], batch.greedy[at])
            tokens[at], logprobs[at], ranks[at], heads[0][at], heads[1][at] = self._report(scaled[at], chosen, n)
        if len(batch.cut):
            at = batch.cut
            ids, values, counts = self._truncate(scaled[at], batch, n)
            chosen = (values + gumbel(keys[at] ^ self._token_hash[ids])).argmax(-1, keepdim=True)
            lp = values.log_softmax(-1)
            tokens[at], logprobs[at] = ids.gather(1, chosen)[:, 0], lp.gather(1, chosen)[:, 0]
            ranks[at], heads[0][at], heads[1][at] = chosen[:, 0] + 1, ids[:, :n], lp[:, :n]
            host = ids.to(torch.int32).cpu().numpy()
            for row, i, count in zip(at.tolist(), host, counts.tolist(), strict=True):
                kept[row] = np.sort(i[:count])
        if self._raw:
            _, logprobs, ranks, *heads = self._report(unmodified, tokens, n)  # type: ignore[assignment]
        return Picked(
            tokens.tolist(), logprobs.tolist(), ranks.tolist(), heads[0].cpu().numpy(), heads[1].cpu().numpy(), kept
        )

    def _draw_whole(self, scaled: torch.Tensor, keys: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
        """Token ids [b] drawn from the whole vocabulary; the arg max for greedy rows."""
        if bool(greedy.all()):
            return scaled.argmax(-1)
        return (scaled + gumbel(keys ^ self._token_hash).masked_fill(greedy[:, None], 0.0)).argmax(-1)

    @staticmethod
    def _report(logits: torch.Tensor, chosen: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        """(chosen, its log-probability, its rank from 1, ids and log-probabilities of the n best)."""
        lp = logits.log_softmax(-1)
        of_chosen = lp.gather(1, chosen[:, None])
        best, ids = lp.topk(n)
        return chosen, of_chosen[:, 0], (lp > of_chosen).sum(-1) + 1, ids, best

    def _truncate(self, scaled: torch.Tensor, batch: Batch, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, values, counts): candidates best first, [b, K]; the first counts[i] of row i are kept, the rest -inf.

        Every rule keeps a prefix of the sorted candidates, so a count says it all.
        """
        width = min(max(batch.max_top_k, n), self._vocab)
        values, ids = scaled.topk(width)
        column = torch.arange(width, device=self._device)
        keep = (column < batch.top_k) & (values - values[:, :1] >= batch.log_min_p)
        values = values.masked_fill(~keep, -torch.inf)
        probs = values.softmax(-1)
        keep &= probs.cumsum(-1) - probs < batch.top_p
        return ids, values.masked_fill(~keep, -torch.inf), keep.sum(-1)


def draw_keys(seeds: np.ndarray, positions: list[int]) -> np.ndarray:
    """A 32-bit key per row from its 64-bit seed and the position it draws for (splitmix64), as int64 [B]."""
    with np.errstate(over="ignore"):
        x = seeds + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: np.ndarray = ((x ^ (x >> np.uint64(31))) & np.uint64(_MASK32)).astype(np.int64)
    return keys


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, one per 32-bit integer (held in int64) of `bits`."""
    uniform = ((_mix32(bits) >> 9).to(torch.float32) + 0.5) * 2.0**-23  # exact, in (0, 1)
    return -(-uniform.log()).log()


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """A bijective 32-bit finaliser (xor-shift-multiply, the constants of Wellons' lowbias32) on int64 values < 2^32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
