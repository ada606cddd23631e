"""torch tensors in shared memory, passed by file descriptor as torch.multiprocessing does it."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

from benches.peers.interface import Blob, Consumer, Peer, Producer, Setup


class TensorProducer(Producer):
    """Allocates in shared memory and copies once, then pickles the tensor as a queue would."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import torch
        import torch.multiprocessing  # registers how tensors are pickled

        self.torch = torch
        torch.set_num_threads(1)
        self.kept: dict[int, Any] = {}
        self.count = 0

    def put(self, data: Blob) -> Any:
        torch = self.torch
        storage = torch.UntypedStorage._new_shared(data.nbytes)
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, data.shape)
        tensor.copy_(torch.from_numpy(data))
        self.count += 1
        self.kept[self.count] = tensor
        return self.count, bytes(ForkingPickler.dumps(tensor))

    def free(self, refs: Any) -> None:
        for key, _ in refs:
            del self.kept[key]


class TensorConsumer(Consumer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import torch.multiprocessing

        torch.set_num_threads(1)

    def get(self, ref: Any) -> Blob:
        return pickle.loads(ref[1]).numpy()  # noqa: S301 - our own producer's


PEER = Peer("torch", TensorProducer, TensorConsumer, packages=("torch",))
