"""`TensorBatch` and views -> torch tensors; the one file of this room that imports torch. Called in a trainer rank.

Tensors own their memory: on the CPU they are copies, so the batch may be reused as `out=` at once; on a device the
copy is the transfer, which has ended when this returns. Ids stay narrow until they are on the device, then widen where
torch's narrow unsigned types have no kernels:

| array | numpy | torch |
|---|---|---|
| tokens, positions, seq_lens | int32 | int64 |
| loss_mask, coverage | bool | bool |
| logprobs, head_logprobs | float32 | float32 |
| routing | uint8 / uint16 / uint32 | uint8 / int32 / int64 |
| head_ids, mask_ids, mask_counts | int32 | int32 |
| registered fields | as registered | the same, with uint16 -> int32, uint32 -> int64, uint64 -> int64 |
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmrl.arena import View
from shmrl.payload.batch import NamedFields, TensorBatch

_SIGNED = {
    "u2": (np.int16, torch.int32, 0xFFFF),
    "u4": (np.int32, torch.int64, 0xFFFFFFFF),
    "u8": (np.int64, torch.int64, -1),
}


@dataclass(frozen=True, slots=True, eq=False)
class TorchBatch(NamedFields):
    """The tensors of one packed row; names and shapes as in `TensorBatch`.

    Example: assemble(arena, micro_batch).torch("cuda:0").routing -> uint8 [N, 48, 8] on the device
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    seq_lens: torch.Tensor
    fields: dict[str, Any]
    covered: dict[str, torch.Tensor]
    layers: tuple[int, ...]
    num_experts: int
    head_has_sampled: bool


def to_torch(batch: TensorBatch, device: Any = None) -> TorchBatch:
    """Tensors of a batch on `device` (default: CPU), independent of the batch's memory."""
    where = torch.device("cpu" if device is None else device)

    def convert(value: Any) -> Any:
        return tuple(_tensor(part, where) for part in value) if isinstance(value, tuple) else _tensor(value, where)

    return TorchBatch(
        tokens=_tensor(batch.tokens, where).long(),
        positions=_tensor(batch.positions, where).long(),
        loss_mask=_tensor(batch.loss_mask, where),
        logprobs=_tensor(batch.logprobs, where),
        seq_lens=_tensor(batch.seq_lens, where).long(),
        fields={name: convert(value) for name, value in batch.fields.items()},
        covered={name: _tensor(value, where) for name, value in batch.covered.items()},
        layers=batch.layers,
        num_experts=batch.num_experts,
        head_has_sampled=batch.head_has_sampled,
    )


def view_to_torch(view: View, dtype: Any = np.uint8, device: Any = None) -> torch.Tensor:
    """A view's bytes as a tensor of its own, [rows, row_nbytes // itemsize]; one dimension for a whole block.

    torch knows no read-only memory: what it made of a view without a copy could write to the arena. The copy to a
    device reads the arena itself, without a bounce where that is registered (`shmrl.arena.pinning`). dtype: NumPy's;
    unsigned types widen as in the table above. ValueError if the bytes are no whole number of elements.

    Example: view_to_torch(arena.get(handle, field="routing", rows=(0, 64)), np.uint8, "cuda:0") -> uint8 [64, 384]
    """
    array: NDArray[Any] = np.frombuffer(memoryview(view), np.dtype(dtype))
    if view.row_nbytes > 1:
        array = array.reshape(view.rows, -1)
    return _tensor(array, torch.device("cpu" if device is None else device))


def _tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of its own; unsigned types travel as signed bits and widen on the other side."""
    kind = f"{array.dtype.kind}{array.dtype.itemsize}"
    bits, wide, low = _SIGNED.get(kind, (array.dtype, None, 0))
    tensor = _borrowed(array.view(bits)).to(device, copy=True)
    return tensor if wide is None else tensor.to(wide) & low


def _borrowed(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over the array's own memory, only to be copied from: torch warns of arrays that are read-only."""
    interface = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface)))
