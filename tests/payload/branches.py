"""Branches whose every value is a function of its position, so that a test can say what a row must be."""

import numpy as np

from shmrl.payload import Branch


def routes(T, L=2, K=2, E=8, salt=0):
    """Routing rows [T, L, K]: row i, layer l, column c is (i + salt + l + c) % E: distinct in a row."""
    i, layer, c = np.ogrid[:T, :L, :K]
    return (i + salt + layer + c) % E


def make(T, prompt, *, salt=0, loss=None, L=2, K=2, E=8, head=3, routing=True, mask=True, rows=None, meta=None, **more):
    """T tokens salt*1000 + i; those after `prompt` (or of `loss`) are sampled and trained.

    The head row of token t is t, t + 1, ...; its mask is t and t % 3 more ids.
    """
    tokens = salt * 1000 + np.arange(T, dtype=np.int32)
    loss = np.arange(T) >= prompt if loss is None else np.asarray(loss)
    sampled = tokens[loss]
    logprobs = np.where(loss, -(tokens % 97) / 100, 0).astype(np.float32)
    ids = sampled[:, None] + np.arange(head, dtype=np.int32)
    counts = np.where(loss, 1 + tokens % 3, 0).astype(np.int32)
    kept = np.concatenate([np.empty(0, np.int32), *(t + np.arange(1 + t % 3, dtype=np.int32) for t in sampled)])
    if routing:
        more |= {"routing": routes(T, L, K, E, salt)[: T - 1 if rows is None else rows], "num_experts": E}
    if head:
        more["head"] = (ids, -(ids % 89 / 10).astype(np.float32))
    if mask:
        more["mask"] = (kept.astype(np.int32), counts)
    return Branch(tokens, loss, logprobs, meta={"source": f"s{salt}", **(meta or {})}, **more)
