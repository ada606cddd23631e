"""The torch adapter: types, values, ownership."""

import numpy as np
import pytest

from shmrl.errors import ViewsAlive
from shmrl.payload import Branch, assemble, encode, torch_adapter
from shmrl.payload.torch_adapter import view_to_torch
from shmrl.types import MicroBatch
from tests.payload.branches import make

torch = pytest.importorskip("torch")
TAG = "run1/src/g/e"


def test_values_and_types(arena):
    sample = encode(arena, make(9, 3), tag=TAG)
    batch = assemble(arena, MicroBatch((sample,), padding=3))
    tensors = batch.torch()
    for name, dtype in (
        ("tokens", torch.int64), ("positions", torch.int64), ("seq_lens", torch.int64), ("loss_mask", torch.bool),
        ("logprobs", torch.float32), ("routing", torch.uint8), ("routing_covered", torch.bool),
        ("head_ids", torch.int32), ("head_logprobs", torch.float32), ("mask_ids", torch.int32),
        ("mask_counts", torch.int32),
    ):  # fmt: skip
        assert getattr(tensors, name).dtype == dtype, name
        assert np.array_equal(getattr(tensors, name).numpy(), getattr(batch, name)), name
    assert (tensors.layers, tensors.num_experts, tensors.head_has_sampled) == ((0, 1), 8, False)


@pytest.mark.parametrize(("E", "dtype"), [(512, torch.int32), (50_000, torch.int32), (65_537, torch.int64)])
def test_wide_ids_widen_to_signed_types(arena, E, dtype):
    routing = [[[E - 1, 5]], [[0, min(40_000, E - 2)]]]
    sample = encode(arena, Branch([1, 2, 3], [0] * 3, [0.0] * 3, routing=routing, num_experts=E), tag=TAG)
    batch = assemble(arena, MicroBatch((sample,), padding=3))
    tensor = batch.torch().routing
    assert tensor.dtype == dtype
    assert tensor.max().item() == E - 1
    assert np.array_equal(tensor.numpy(), batch.routing)


def test_tensors_own_their_memory(arena):
    sample = encode(arena, make(9, 3), tag=TAG)
    batch = assemble(arena, MicroBatch((sample,)))
    before = {name: batch.fields[name].copy() for name in ("routing", "head_ids")}
    tensors = batch.torch()
    tensors.routing.zero_()
    tensors.tokens.zero_()
    assert np.array_equal(batch.routing, before["routing"])
    batch.head_ids[:] = -1
    assert np.array_equal(tensors.head_ids.numpy(), before["head_ids"])


@pytest.mark.parametrize("ask", [{}, {"copy": True}, {"device": "cpu"}], ids=str)
def test_torch_never_gets_the_arena_to_write_to(arena, ask):
    """torch 2.13 ignores the read-only mark of a capsule: what it gets is a copy."""
    with arena.get(arena.put(b"abc")) as view:
        tensor = torch.from_dlpack(view, **ask)
        tensor[0] = 7
        assert bytes(view) == b"abc"
        assert tensor.tolist() == [7, 98, 99]
        with pytest.raises(BufferError, match="leave out copy=False"):
            torch.from_dlpack(view, copy=False)
        view.release()  # nothing of it is held
    arena.free(view.handle)


def test_a_copy_to_a_device_reads_the_arena_itself(arena):
    """Where that is registered with CUDA, nothing lies between; what the device copies from is gone afterwards."""
    with arena.get(arena.put(b"abc")) as view:
        array = np.frombuffer(memoryview(view), np.uint8)
        assert torch_adapter._borrowed(array).data_ptr() == array.ctypes.data
        assert view_to_torch(view, device="meta").shape == (3,)
        del array
        view.release()
    arena.free(view.handle)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(np.uint8, torch.uint8), (np.uint16, torch.int32), (np.uint32, torch.int64), (np.float32, torch.float32)],
)
def test_a_view_becomes_a_tensor_of_its_own(arena, dtype, wide):
    rows = (np.arange(40) * 6_000 % 256 ** np.dtype(dtype).itemsize).astype(dtype).reshape(10, 4)
    with arena.reserve(rows.nbytes) as block:
        block.buffer[:] = rows.tobytes()
        handle = block.seal(columns=[("rows", 0, rows.nbytes // 10, 10)])
    whole = arena.get(handle)
    assert view_to_torch(whole, dtype).tolist() == rows.ravel().tolist()
    with arena.get(handle, field="rows", rows=(3, 7)) as view:
        tensor = view_to_torch(view, dtype)
        view.release()
    assert (tensor.dtype, tensor.tolist()) == (wide, rows[3:7].tolist())
    tensor[:] = 0
    assert bytes(whole) == rows.tobytes()
    array = np.from_dlpack(whole)
    with pytest.raises(ViewsAlive):
        whole.release()
    del array
    whole.release()
    arena.free(handle)
