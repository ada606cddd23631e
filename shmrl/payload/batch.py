"""`TensorBatch`: what `assemble` returns, and the staging buffers it lives in.

Made in a trainer rank, once per micro batch; given back as `out=` it is reused where it fits, so that a step allocates
nothing after the first. Its arrays are the rank's own: none is a view of the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shmrl.errors import PayloadError

if TYPE_CHECKING:
    from shmrl.payload.torch_adapter import TorchBatch


class Staging:
    """Named byte buffers that only grow; `take` gives an array over one, its old contents undefined."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of this shape and dtype, over the buffer of that name."""
        wanted = np.dtype(dtype)
        nbytes = prod(shape) * wanted.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[name] = np.empty(max(nbytes, 64), np.uint8)
        return buffer[:nbytes].view(wanted).reshape(shape)


class NamedFields:
    """The built-in fields by name, for a batch of numpy arrays or of torch tensors; None where not captured."""

    __slots__ = ()
    fields: dict[str, Any]
    covered: dict[str, Any]

    @property
    def routing(self) -> Any:
        """Expert ids [N, L, K], narrow."""
        return self.fields.get("routing")

    @property
    def routing_covered(self) -> Any:
        """[N]: False on the last token of an uncut sample, and on padding."""
        return self.covered.get("routing")

    @property
    def head_ids(self) -> Any:
        """[N, K]; rows that are not covered hold 0."""
        return self.fields.get("head_ids")

    @property
    def head_logprobs(self) -> Any:
        """[N, K]; rows that are not covered hold -inf."""
        return self.fields.get("head_logprobs")

    @property
    def head_covered(self) -> Any:
        """[N]."""
        return self.covered.get("head_ids")

    @property
    def mask_ids(self) -> Any:
        """Kept ids of all positions, one after the other [sum(mask_counts)]."""
        return self.fields["mask"][0] if "mask" in self.fields else None

    @property
    def mask_counts(self) -> Any:
        """Kept ids per position [N]; 0 = no restriction."""
        return self.fields["mask"][1] if "mask" in self.fields else None


@dataclass(frozen=True, slots=True, eq=False)
class TensorBatch(NamedFields):
    """One packed row of N positions, padding included, in packing order.

    Attributes:
        tokens int32 [N] (0 on padding), positions int32 [N] (from 0 in each sequence and in the padding), loss_mask
        bool [N], logprobs float32 [N], seq_lens int32 [sequences] (padding not included).
        fields: every assembled array by name: [N, *row], or (values [n], counts int32 [N]) for ragged ones.
        covered: bool [N] by field name: True where the row was recorded; elsewhere the field's fill.
        layers: global ids of routing's layers; num_experts: E (0 without routing); head_has_sampled: column 0's
            meaning.
        staging: the buffers; belongs to `assemble`.

    Example: 2 samples of 37 and 24 tokens, padded to 64: routing uint8 [64, 48, 8], routing_covered with 59 set bits.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    seq_lens: NDArray[np.int32]
    fields: dict[str, Any]
    covered: dict[str, NDArray[np.bool_]]
    layers: tuple[int, ...]
    num_experts: int
    head_has_sampled: bool
    staging: Staging

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Every array by name, in one order: tokens, ..., each field, its "/counts" if it is ragged, its "/covered"."""
        found: dict[str, NDArray[Any]] = {
            name: getattr(self, name) for name in ("tokens", "positions", "loss_mask", "logprobs", "seq_lens")
        }
        for name, value in self.fields.items():
            found |= {name: value[0], f"{name}/counts": value[1]} if isinstance(value, tuple) else {name: value}
            found[f"{name}/covered"] = self.covered[name]
        return found

    def head_without_sampled(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The plain top-k head (ids, logprobs) [N, K], whichever layout is stored."""
        if self.head_ids is None or self.head_logprobs is None:
            raise PayloadError.of("head", "this batch has none")
        first = int(self.head_has_sampled)
        return self.head_ids[:, first:], self.head_logprobs[:, first:]

    def routing_signed(self, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """Routing with -1 where no route was recorded, copied into a signed type that holds both.

        dtype=None: the narrowest such type. PayloadError for a type that ids would wrap in.
        """
        if self.routing is None or self.routing_covered is None:
            raise PayloadError.of("routing", "this batch has none")
        fits = [t for t in (np.int8, np.int16, np.int32, np.int64) if np.iinfo(t).max >= self.num_experts - 1]
        wanted = np.dtype(fits[0] if dtype is None else dtype)
        if wanted.kind != "i" or wanted < np.dtype(fits[0]):
            raise PayloadError.of("routing", f"{wanted} cannot hold -1 and {self.num_experts - 1}", value=str(wanted))
        out: NDArray[Any] = self.routing.astype(wanted)
        out[~self.routing_covered] = -1
        return out

    def torch(self, device: Any = None) -> TorchBatch:
        """The same as tensors that own their memory; see `torch_adapter` for their types. Imports torch."""
        from shmrl.payload.torch_adapter import to_torch

        return to_torch(self, device)


def sequence_first(rows: NDArray[Any], seq_lens: Sequence[int], fill: Any) -> NDArray[Any]:
    """Packed rows [N, ...] as [T_max, sequences, ...]: what frameworks that flatten sequence-first expect.

    Example: rows 0, 1 | 2, 3 with lengths 2, 2 -> flattened 0, 2, 1, 3
    """
    out = np.full((max(seq_lens, default=0), len(seq_lens), *rows.shape[1:]), fill, rows.dtype)
    first = 0
    for index, length in enumerate(seq_lens):
        out[:length, index] = rows[first : first + length]
        first += length
    return out
