"""The field registry: what per-token arrays exist, how they are aligned, and what fills their gaps.

Owns the table of fields that drives encode, truncate, pack, slice, pad and assemble. Routing, head and mask are its
first entries; a new kind of array is one `register_field` call in every process that encodes or assembles it (at
import time of the environment or trainer module that needs it). Runs in env workers, orchestrators and trainer ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shmrl.errors import PayloadError

Align = Literal["input", "sampled"]
Filler = Callable[[int, tuple[int, ...], int, int], NDArray[Any]]
"""(rows, row shape, num_experts, expert_parallel) -> the values of `rows` rows that no sample covers."""


class Ragged:
    """The type of `ragged`, the marker for fields whose rows differ in length."""

    def __repr__(self) -> str:
        return "ragged"


ragged = Ragged()


@dataclass(frozen=True, slots=True)
class Field:
    """One registered array.

    Attributes:
        dtype: element type; None for expert ids, stored in the narrowest unsigned type that holds num_experts - 1.
        row_shape: shape of one row, or `ragged`. None as a dimension means "as the branch has it"; "layers" marks the
            dimension that `assemble(layers=...)` selects from.
        align: "input": row i belongs to token i when it was fed (T - 1 or T rows); "sampled": one row per set
            loss-mask bit.
        fill: value (or generator of values) of positions without a row; coverage says which those are.
        group: the name users see (`head_ids` and `head_logprobs` are captured and missing together as `head`).
        cap: most elements a ragged row may have.

    Example: Field("routing", None, ("layers", None), "input", routing_padding, "routing")
    """

    name: str
    dtype: np.dtype[Any] | None
    row_shape: tuple[int | str | None, ...] | Ragged
    align: Align
    fill: float | Filler
    group: str
    cap: int | None = None

    @property
    def is_ragged(self) -> bool:
        return isinstance(self.row_shape, Ragged)

    @property
    def layer_axis(self) -> int | None:
        """Which dimension of a row counts layers, if any does."""
        return (
            None
            if isinstance(self.row_shape, Ragged) or "layers" not in self.row_shape
            else self.row_shape.index("layers")
        )

    def element(self, num_experts: int) -> np.dtype[Any]:
        """The stored element type."""
        return narrow_dtype(num_experts) if self.dtype is None else self.dtype


_FIELDS: dict[str, Field] = {}
_RESERVED = {"tokens", "loss_mask", "logprobs", "text", "positions", "seq_lens"}


def narrow_dtype(num_experts: int) -> np.dtype[Any]:
    """uint8 for up to 256 experts, uint16 for up to 65,536, uint32 beyond (ids up to num_experts - 1)."""
    for dtype in (np.uint8, np.uint16, np.uint32):
        if num_experts - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise PayloadError.of("routing", f"{num_experts} experts do not fit in 32-bit ids", value=num_experts)


def routing_padding(rows: int, row_shape: tuple[int, ...], num_experts: int, expert_parallel: int = 1) -> NDArray[Any]:
    """Expert ids [rows, L, K] for positions without a recorded route: distinct in a row, spread evenly, never zeros.

    `a = p*K + c; expert = (a % P)*(E/P) + (a//P + l) % (E/P)` for pad row p, column c, layer l and P expert-parallel
    shards: consecutive choices go to consecutive shards, then to the next expert of each, and start one further per
    layer. With all-zero padding one rank would receive every pad token.

    Example: routing_padding(16, (48, 8), 128, 8) gives each of the 8 ranks exactly 16 assignments per layer.
    """
    layers, k = row_shape
    if expert_parallel < 1 or num_experts % expert_parallel or k > num_experts:
        raise PayloadError.of(
            "routing",
            f"cannot spread top-{k} of {num_experts} experts over {expert_parallel} expert-parallel shards",
            value=expert_parallel,
        )
    shard = num_experts // expert_parallel
    choice = np.arange(rows * k).reshape(rows, 1, k)
    expert = (choice % expert_parallel) * shard + (choice // expert_parallel + np.arange(layers)[:, None]) % shard
    return expert.astype(narrow_dtype(num_experts))


def register_field(
    name: str,
    dtype: DTypeLike,
    row_shape: tuple[int | str | None, ...] | Ragged,
    align: Align,
    fill: float | Filler,
    *,
    cap: int | None = None,
) -> Field:
    """Registers a field, in every process that encodes or assembles it. Registering the same thing twice is fine.

    Args:
        row_shape: shape of one row (() for a scalar, None where the branch decides, "layers" for the layer dimension),
            or `ragged`: the branch then gives (values, counts), with counts per row ([T] when align is "sampled").
        align, fill, cap: see `Field`.

    Raises PayloadError for an element type that cannot be stored, an unknown alignment, or a name that means something
    else.

    Example: register_field("router_weights", "float16", ("layers", None), align="input", fill=0)
    """
    element = np.dtype(dtype)
    if element.kind not in "iufb":
        raise PayloadError.of(name, f"elements of type {element} cannot be stored", value=str(element))
    if align not in ("input", "sampled"):
        raise PayloadError.of(name, f"align is 'input' or 'sampled', not {align!r}", value=align)
    if not isinstance(row_shape, Ragged):
        row_shape = tuple(row_shape)
    return _register(Field(name, element, row_shape, align, fill, name, cap))


def _register(field: Field) -> Field:
    old = _FIELDS.get(field.name)
    if field.name in _RESERVED or (old is not None and old != field):
        raise PayloadError.of(field.name, f"is already registered as {old or 'a core column'}")
    _FIELDS[field.name] = field
    return field


def unregister_field(name: str) -> None:
    """Forgets a registered field; stored blocks that have it can no longer be assembled here."""
    if _FIELDS.pop(name, None) is None:
        raise PayloadError.of(name, f"no such field; registered: {', '.join(_FIELDS)}")


def set_cap(name: str, cap: int) -> None:
    """The most elements one row of a ragged field may have from now on, in this process."""
    field = get_field(name)
    if not field.is_ragged or cap < 1:
        raise PayloadError.of(name, f"has no row length to cap at {cap}", value=cap)
    _FIELDS[name] = replace(field, cap=cap)


def get_field(name: str) -> Field:
    """The field of that name; PayloadError if this process never registered it."""
    field = _FIELDS.get(name)
    if field is None:
        raise PayloadError.of(name, f"no such field in this process; registered: {', '.join(_FIELDS)}")
    return field


def all_fields() -> tuple[Field, ...]:
    """Every registered field, in registration order (the order of columns in a block)."""
    return tuple(_FIELDS.values())


def members(group: str) -> tuple[Field, ...]:
    """The fields that are captured together under one name; PayloadError for an unknown name."""
    found = tuple(field for field in _FIELDS.values() if field.group == group)
    if not found:
        get_field(group)
    return found


_register(Field("routing", None, ("layers", None), "input", routing_padding, "routing"))
_register(Field("head_ids", np.dtype(np.int32), (None,), "sampled", 0, "head"))
_register(Field("head_logprobs", np.dtype(np.float32), (None,), "sampled", float("-inf"), "head"))
_register(Field("mask", np.dtype(np.int32), ragged, "sampled", 0, "mask", cap=16_384))
