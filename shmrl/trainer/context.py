"""Context parallelism: a group of ranks shares every sequence; each reads, feeds and scores its part (`fold.part`).

Keys and values are gathered over the group in each attention layer, so the result is that of one rank, and no family
needs a kernel of its own; the mask is dense, columns x group columns. `step` opens a share around forward and backward.
Runs in every trainer rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shmrl.errors import RunError

ATTENTION = "shmrl_context_parallel"


class ContextParallel:
    """This rank's group: ranks [g * size, (g + 1) * size) of the trainer. Making it is a collective of all ranks.

    Attributes: size; rank: within the group.
    """

    def __init__(self, rank: int, world: int, size: int) -> None:
        self.size, self.rank = size, rank % size
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        self._group = groups[rank // size]
        self._visible: Tensor | None = None
        AttentionInterface.register(ATTENTION, self._attend)

    @contextmanager
    def share(self, visible: Tensor | None) -> Iterator[None]:
        """While open, attention spans the group and sees what `visible` says: bool [columns, size * columns].

        Stay inside through the backward pass when activations are checkpointed. None: each rank feeds whole sequences.
        """
        self._visible = visible
        try:
            yield
        finally:
            self._visible = None

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it; tensors are [rows, heads, columns, width]."""
        if self._visible is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
        keys, values = (_Gathered.apply(local, self._group) for local in (key, value))  # type: ignore[no-untyped-call]
        options["is_causal"] = False
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, keys, values, self._visible[None, None], **options
        )


def require_causal_attention(lm: Any) -> None:
    """RunError for a model that mixes tokens in another way than by causal attention over all that come before."""
    config = lm.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others or not lm._supports_sdpa:
        what = ", ".join(sorted(others)) or "attention that SDPA cannot compute"
        raise RunError(
            f"trainer.context_parallel cannot share the sequences of {type(lm).__name__}, which has {what}: set it to 1"
        )


class _Gathered(torch.autograd.Function):
    """[1, heads, columns, width] of every rank of a group side by side; gradients go back to whose columns they are."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), dim=2)[ctx.group.rank()], None
