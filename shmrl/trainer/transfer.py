"""A micro batch's arrays to the device: one copy through page-locked memory, on a stream of its own, beside compute.

There are two page-locked buffers, so that the host fills one while the other is still being copied; before a buffer is
filled again the host waits for its copy. What is launched after `send` waits for the copy on the device, so the host
goes on at once. On a CPU the arrays are the tensors. Called by `inputs` in every trainer rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[Any]]
Send = Callable[[Arrays], dict[str, Tensor]]
ALIGNMENT = 256  # bytes, of every array in the buffer: what kernels like best


def sender(device: torch.device) -> Send:
    """How arrays get to `device`: the tensors under the same names, of the same shapes and dtypes."""
    return Transfer(SideStream(device)).send if device.type == "cuda" else functools.partial(at_once, device)


def at_once(device: torch.device, arrays: Arrays) -> dict[str, Tensor]:
    """One copy per array, each ended when this returns; on a CPU none."""
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


class Event(Protocol):
    """The end of a copy. `synchronize` makes the host wait for it."""

    def synchronize(self) -> None: ...


class CopyStream(Protocol):
    """What `Transfer` needs of a device; `SideStream` is CUDA's."""

    def buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of host memory that the device can read while the host goes on."""

    def copy(self, host: Tensor) -> tuple[Tensor, Event]:
        """Starts a copy of `host` to new memory of the device."""

    def join(self, there: Tensor, arrived: Event) -> None:
        """What is launched from now on waits for `arrived`, and `there` lives until it has run."""


class SideStream:
    """A CUDA stream for copies, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, host: Tensor) -> tuple[Tensor, Event]:
        with torch.cuda.stream(self._stream):
            return host.to(self._device, non_blocking=True), self._stream.record_event()

    def join(self, there: Tensor, arrived: Event) -> None:
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(arrived)  # type: ignore[arg-type]
        there.record_stream(compute)  # it was allocated on the other stream, which must not reuse it before


@dataclass(slots=True)
class _Slot:
    memory: Tensor
    arrived: Event | None = None


class Transfer:
    """Two buffers in turn. A buffer grows to the largest micro batch that went through it."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._slots = [_Slot(torch.empty(0, dtype=torch.uint8)) for _ in range(2)]

    def send(self, arrays: Arrays) -> dict[str, Tensor]:
        """The arrays as tensors of the device; they may be overwritten when this returns."""
        self._slots.reverse()
        slot = self._slots[0]
        if slot.arrived is not None:
            slot.arrived.synchronize()
        sources = {name: torch.from_numpy(array) for name, array in arrays.items()}
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in sources.values()]
        *starts, nbytes = itertools.accumulate(sizes, initial=0)
        if len(slot.memory) < nbytes:
            slot.memory = self._stream.buffer(nbytes)
        for start, tensor in zip(starts, sources.values(), strict=True):
            _part(slot.memory, start, tensor).copy_(tensor)
        there, slot.arrived = self._stream.copy(slot.memory[:nbytes])
        self._stream.join(there, slot.arrived)
        return {
            name: _part(there, start, tensor) for start, (name, tensor) in zip(starts, sources.items(), strict=True)
        }


def _part(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of `like` over bytes of `memory`, from `start` on."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
