"""TransferQueue with its SimpleStorage, over the Ray cluster that it needs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benches.peers.hosts import Host
from benches.peers.interface import Blob, Consumer, Peer, Producer, Setup
from benches.peers.ray_store import cluster, patience

PARTITION = "bench"


class QueueProducer(Producer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import torch
        import transfer_queue

        self.torch, self.queue = torch, transfer_queue
        transfer_queue.init()
        self.count = 0

    def put(self, data: Blob) -> Any:
        self.count += 1
        key = f"blob{self.count}"
        self.queue.kv_put(key, PARTITION, {"x": self.torch.from_numpy(data)})
        return key

    def free(self, refs: Any) -> None:
        for key in refs:
            self.queue.kv_clear(key, PARTITION)


class QueueConsumer(Consumer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import transfer_queue

        self.queue = transfer_queue
        transfer_queue.init()

    def get(self, ref: Any) -> Blob:
        return self.queue.kv_batch_get(ref, PARTITION)["x"][0].numpy()


@contextmanager
def storage() -> Iterator[type[Host]]:
    """A cluster with the queue's controller and storage units."""
    import transfer_queue

    with cluster() as host:
        try:
            with patience("transfer_queue.init"):
                transfer_queue.init()
            yield host
        finally:
            with warnings.catch_warnings(), patience("transfer_queue.close"):
                warnings.simplefilter("ignore")
                transfer_queue.close()


PEER = Peer("TransferQueue", QueueProducer, QueueConsumer, packages=("TransferQueue", "torch", "ray"), session=storage)
