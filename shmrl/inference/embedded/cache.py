"""The engine's KV cache: one preallocated buffer per layer, one slot per running row, positions from the left.

A row's token i lies at column i of its slot, so rows join and leave without moving anybody else: joining writes the
next free slot, leaving moves the last slot into the hole. (A right-aligned concatenated cache has to shift every row
whenever the longest one changes.) Lengths advance only after a step has succeeded, so a failed step can be repeated.
Engine thread only.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from shmrl.errors import EngineError


class Window:
    """Which slots the forward pass in progress writes: `[lo, hi)`, at `positions`, or as a prefill from column 0."""

    lo: int = 0
    hi: int = 0
    prefill: bool = False
    slots: torch.Tensor  # int64 [hi - lo]
    positions: torch.Tensor  # int64 [hi - lo], column each decoded token is written to
    columns: int = 0  # columns attention reads in a decode
    capacity: tuple[int, int] = (0, 0)  # slots, columns every layer must have room for


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, each [slots, kv_heads, columns, head_dim]; grows by doubling, never shrinks."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self._window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new states; return what attention reads: themselves in a prefill, the window's in a decode."""
        at = self._window
        self.keys = _with_room(self.keys, key_states, at.capacity)
        self.values = _with_room(self.values, value_states, at.capacity)
        if at.prefill:
            width = key_states.shape[2]
            self.keys[at.lo : at.hi, :, :width] = key_states
            self.values[at.lo : at.hi, :, :width] = value_states
            return key_states, value_states
        self.keys[at.slots, :, at.positions] = key_states[:, :, 0]
        self.values[at.slots, :, at.positions] = value_states[:, :, 0]
        return self.keys[at.lo : at.hi, :, : at.columns], self.values[at.lo : at.hi, :, : at.columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Only asked in a prefill, where the queries see each other and nothing older."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Zero: positions are always passed to the model, never derived from the cache."""
        return 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of slot `source` over slot `target`."""
        if self.keys is not None and self.values is not None:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]


class SlotCache(Cache):  # type: ignore[misc]
    """One `SlotLayer` per layer of the model. EngineError for models whose cache is not plain full attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer}
        if kinds:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise EngineError(
                f"the embedded engine serves models with full attention in every layer, but {model.config.model_type} "
                f"needs {names}: serve it with vLLM"
            )
        self.window = Window()
        super().__init__(
            layers=[SlotLayer(self.window) for _ in range(model.config.get_text_config().num_hidden_layers)]
        )

    def begin_prefill(self, lo: int, hi: int, width: int) -> None:
        """The next forward pass fills columns [0, width) of slots [lo, hi)."""
        self._reserve(hi, width)
        self.window.lo, self.window.hi, self.window.prefill = lo, hi, True

    def begin_decode(self, lo: int, hi: int, positions: torch.Tensor, columns: int) -> None:
        """The next forward pass adds one token to each slot of [lo, hi), at `positions` (all < columns)."""
        self._reserve(hi, columns)
        at = self.window
        at.lo, at.hi, at.prefill = lo, hi, False
        at.slots = torch.arange(lo, hi, device=positions.device)
        at.positions, at.columns = positions, columns

    def move(self, source: int, target: int, length: int) -> None:
        """Move a row of `length` cached tokens to another slot."""
        for layer in self.layers:
            layer.move(source, target, length)

    def _reserve(self, slots: int, columns: int) -> None:
        have_slots, have_columns = self.window.capacity
        self.window.capacity = (_doubled(have_slots, slots, 8), _doubled(have_columns, columns, 64))


def _doubled(have: int, need: int, least: int) -> int:
    return have if need <= have else max(least, 1 << (need - 1).bit_length())


def _with_room(buffer: torch.Tensor | None, like: torch.Tensor, capacity: tuple[int, int]) -> torch.Tensor:
    """`buffer`, or a larger copy. Zeroed: masked columns enter the sum as 0 x value, and 0 x NaN would not vanish."""
    slots, columns = capacity
    if buffer is not None and buffer.shape[0] >= slots and buffer.shape[2] >= columns:
        return buffer
    room = like.new_zeros(slots, like.shape[1], columns, like.shape[3])
    if buffer is not None:
        room[: buffer.shape[0], :, : buffer.shape[2]] = buffer
    return room
