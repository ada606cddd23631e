"""iceoryx2: publish and subscribe over loaned slices, read in place."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from benches.peers.interface import Blob, Consumer, Peer, Producer, Setup


def _service(setup: Setup) -> tuple[Any, Any]:
    """(node, service); opened by both sides with the same bounds."""
    import iceoryx2

    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
    builder = node.service_builder(iceoryx2.ServiceName.new(setup.uid)).publish_subscribe(
        iceoryx2.Slice[ctypes.c_uint8]
    )
    depth = setup.depth
    return node, (
        builder.subscriber_max_buffer_size(depth)
        .subscriber_max_borrowed_samples(depth)
        .max_subscribers(1)
        .open_or_create()
    )


class SampleProducer(Producer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.node, self.service = _service(setup)
        self.publisher = self.service.publisher_builder().initial_max_slice_len(setup.size).create()

    def put(self, data: Blob) -> Any:
        sample = self.publisher.loan_slice_uninit(data.nbytes)
        ctypes.memmove(sample.payload_ptr, data.ctypes.data, data.nbytes)
        sample.assume_init().send()


class SampleConsumer(Consumer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.node, self.service = _service(setup)
        self.subscriber = self.service.subscriber_builder().create()
        self.borrowed: list[Any] = []

    def get(self, ref: Any) -> Blob:
        sample = None
        while sample is None:
            sample = self.subscriber.receive()
        self.borrowed.append(sample)
        return np.asarray(sample.payload().as_memory_view())

    def done(self, refs: Any) -> None:
        for sample in self.borrowed:
            sample.delete()
        self.borrowed.clear()


PEER = Peer("iceoryx2", SampleProducer, SampleConsumer, packages=("iceoryx2",))
