"""multiprocessing.shared_memory: one segment per blob, as its documentation shows it."""

from __future__ import annotations

from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from benches.peers.interface import Blob, Consumer, Peer, Producer


class SegmentProducer(Producer):
    def put(self, data: Blob) -> Any:
        segment = SharedMemory(create=True, size=data.nbytes)
        np.frombuffer(segment.buf, np.uint8, data.nbytes)[:] = data
        segment.close()
        return segment.name, data.nbytes

    def free(self, refs: Any) -> None:
        for name, _ in refs:
            segment = SharedMemory(name)
            segment.close()
            segment.unlink()


class SegmentConsumer(Consumer):
    def get(self, ref: Any) -> Blob:
        name, size = ref
        segment = SharedMemory(name)
        self.open = [*getattr(self, "open", ()), segment]
        return np.frombuffer(segment.buf, np.uint8, size)

    def done(self, refs: Any) -> None:
        for segment in self.open:
            segment.close()
            _forget(segment)
        self.open = []


def _forget(segment: SharedMemory) -> None:
    """Before Python 3.13 a reader's tracker believes the segment to be its own, and warns when it is gone."""
    resource_tracker.unregister(f"/{segment.name.lstrip('/')}", "shared_memory")


PEER = Peer("SharedMemory", SegmentProducer, SegmentConsumer)
