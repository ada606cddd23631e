"""Low-rank adapters (LoRA, arXiv:2106.09685): the model is frozen, W + alpha / rank * B A is what computes.

An adapted projection stays an nn.Linear under its old names, so sharding, loading and publishing need not know; what is
published is merged, and any engine loads it. Called by `models`, `loop` and `checkpoint` in every trainer rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shmrl.config.training import Lora
from shmrl.errors import RunError


class AdaptedLinear(nn.Linear):
    """x W^T + b + scale * (x A^T) B^T, with A [rank, in] random and B [out, rank] zero at first; W and b are frozen."""

    def __init__(self, base: nn.Linear, config: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = config.alpha / config.rank
        self.lora_a = nn.Parameter(base.weight.new_empty(config.rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, config.rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.scale * low


def adapt(lm: nn.Module, config: Lora) -> None:
    """Freeze the model and adapt every nn.Linear whose last name is a target. RunError for a target without one."""
    lm.requires_grad_(False)
    found = [(name, module) for name, module in lm.named_modules() if isinstance(module, nn.Linear)]
    names = {name.rpartition(".")[2] for name, _ in found}
    missing = sorted(set(config.targets) - names)
    if missing:
        raise RunError(
            f"trainer.lora.targets: {type(lm).__name__} has no linear layer called {', '.join(missing)}; it has "
            f"{', '.join(sorted(names))}"
        )
    for name, module in found:
        owner, _, leaf = name.rpartition(".")
        if leaf in config.targets:
            setattr(lm.get_submodule(owner), leaf, AdaptedLinear(module, config))


def split(state: dict[str, Tensor], config: Lora | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights of the unadapted model with the adapters merged in, the adapters) of a whole state dict."""
    adapters = {name: value for name, value in state.items() if name.endswith((".lora_a", ".lora_b"))}
    merged = {name: value for name, value in state.items() if name not in adapters}
    for name, a in adapters.items():
        if config is not None and name.endswith(".lora_a"):
            stem = name.removesuffix("lora_a")
            update: Any = adapters[f"{stem}lora_b"] @ a
            merged[f"{stem}weight"] = torch.add(merged[f"{stem}weight"], update, alpha=config.alpha / config.rank)
    return merged, adapters
