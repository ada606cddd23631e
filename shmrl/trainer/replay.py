"""Router replay: the forward pass takes its experts from the recorded routing, the gate weights from its own router.

Every supported router is a module that returns (logits [N, E], weights [N, K], ids [N, K]); one forward hook answers
(logits, gate(logits, chosen), chosen) instead, so gradients still reach the router and nothing else of the model
changes. `ROUTERS` is the one place to extend: a class name and how that class turns logits and ids into weights.
Used by `policy.Policy` in a trainer rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shmrl.errors import RunError

Gate = Callable[[Any, Tensor, Tensor], Tensor]


def _softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Softmax over all experts, renormalised over the chosen where the model does, in the logits' dtype."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _mixtral(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """As `_softmax`, always renormalised, and left in float32."""
    weights = torch.softmax(logits.float(), dim=-1).gather(1, ids)
    return weights / weights.sum(-1, keepdim=True)


def _chosen_softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """gpt-oss: softmax over the chosen logits alone."""
    return torch.softmax(logits.gather(1, ids), dim=-1)


def _sigmoid(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V3: groups and the correction bias only choose ids; weights are the plain sigmoids."""
    weights = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * float(router.routed_scaling_factor)


ROUTERS: dict[str, Gate] = {
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen3NextTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": _mixtral,
    "GptOssTopKRouter": _chosen_softmax,
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}


class RouterReplay:
    """The hooks on one model's routers.

    Attributes:
        layers: global indices of the decoder layers that have a router, ascending: the columns of `routes`.
        num_experts, top_k: the same in every layer.

    Raises RunError for a model without routers, for a router class that is not in `ROUTERS`, and for one whose own
    weights the table does not reproduce.
    """

    def __init__(self, model: nn.Module) -> None:
        found = dict(_routers(model))
        if not found:
            raise RunError(
                f"trainer.router_replay = true, but {type(model).__name__} has no router: set it to false when dense"
            )
        self.layers = tuple(sorted(found))
        first = found[self.layers[0]]
        self.num_experts, self.top_k = int(first.num_experts), int(first.top_k)
        self._routes: Tensor | None = None
        self._consumed: dict[int, int] = {}
        for column, layer in enumerate(self.layers):
            _check(layer, found[layer])
            found[layer].register_forward_hook(self._hook(column, layer))

    def _hook(self, column: int, layer: int) -> Any:
        def replay(
            router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor] | None:
            if self._routes is None:
                return None
            logits, _, own = output
            if len(self._routes) != len(own):
                raise RunError(f"layer {layer} routed {len(own)} tokens, {len(self._routes)} rows were recorded")
            recorded = self._routes[:, column]
            chosen = torch.where(recorded < 0, own, recorded)
            self._consumed[layer] = self._consumed.get(layer, 0) + len(own)
            return logits, ROUTERS[type(router).__name__](router, logits, chosen), chosen

        return replay

    @contextmanager
    def routes(self, ids: Tensor | None) -> Iterator[None]:
        """While open, forward passes take their experts from `ids`: signed [rows, layers, K], -1 where nothing is.

        Stay inside through the backward pass when activations are checkpointed: the hooks run again there. None leaves
        every router its own choice. RunError when a layer has consumed no row by the end.
        """
        self._routes, self._consumed = ids, {}
        try:
            yield
        finally:
            self._routes = None
        idle = [layer for layer in self.layers if not self._consumed.get(layer)]
        if ids is not None and idle:
            raise RunError(f"router replay: layers {idle} consumed none of the {len(ids)} recorded rows")

    def checked(self, routing: NDArray[Any], covered: NDArray[np.bool_]) -> NDArray[Any]:
        """[N, L, K] ids with -1 in uncovered rows, in the narrowest signed type; RunError for an id that is no expert.

        On the host, before the device sees them: there a bad id is an assert without a message.
        """
        if routing.shape[1:] != (len(self.layers), self.top_k):
            raise RunError(
                f"recorded routing is [layers, top_k] = {list(routing.shape[1:])}, the model has "
                f"[{len(self.layers)}, {self.top_k}]"
            )
        if routing.size and routing.max() >= self.num_experts:
            self._require_experts(np.where(covered[:, None, None], routing, 0))
        ids = routing.astype(np.min_scalar_type(-self.num_experts))
        ids[~covered] = -1
        return ids

    def _require_experts(self, ids: NDArray[Any]) -> None:
        """RunError when one of these is no expert; what stands in rows that are not covered does not matter."""
        row, column, _ = np.unravel_index(int(ids.argmax()), ids.shape)
        if ids.max() >= self.num_experts:
            raise RunError(
                f"recorded expert {ids.max()} at position {row}, layer {self.layers[column]}: the model has "
                f"{self.num_experts} experts"
            )


def _routers(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """(decoder layer, router) of every router; RunError names a class that is not in the table."""
    for name, module in model.named_modules():
        where = re.search(r"\blayers\.(\d+)\.", name)
        kind = type(module).__name__
        if where is None or not kind.lower().endswith("router"):
            continue
        if kind not in ROUTERS:
            raise RunError(
                f"no router replay for {kind} ({name}); known: {', '.join(sorted(ROUTERS))}. Add it to "
                "shmrl.trainer.replay.ROUTERS, or set trainer.router_replay = false"
            )
        yield int(where[1]), module


@torch.no_grad()
def _check(layer: int, router: Any) -> None:
    """The router's own choice through the table must give the router's own weights, or the class has changed.

    One without memory yet (device meta) is a copy of one that rank 0 has checked.
    """
    if router.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(layer)
    weight = router.weight
    hidden = torch.randn(16, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    out = router(hidden)
    who = f"{type(router).__name__} of layer {layer}"
    expected = [[16, int(router.num_experts)], *[[16, int(router.top_k)]] * 2]
    shapes = [list(part.shape) for part in out]
    if shapes != expected:
        got = "{}, {} and {}".format(*shapes) if len(shapes) == 3 else f"{len(shapes)} results"
        raise RunError(f"{who} returns {got}, expected (logits {expected[0]}, weights and ids {expected[1]})")
    logits, weights, ids = out
    gate = ROUTERS[type(router).__name__](router, logits, ids)
    worst = float((gate - weights).abs().max())
    if not worst <= 1e-6:
        raise RunError(f"{who} weighs its experts in another way (off by {worst:.2e})")
