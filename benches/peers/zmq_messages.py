"""pyzmq over ipc, the blob inline in a msgpack message."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import zmq

from benches.peers.interface import Blob, Consumer, Peer, Producer, Setup


class MessageProducer(Producer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.sndhwm = 0
        self.socket.bind(f"ipc:///tmp/{setup.uid}")

    def put(self, data: Blob) -> Any:
        self.socket.send(msgpack.packb({"dtype": "|u1", "shape": data.shape, "data": data.data}), copy=False)

    def close(self) -> None:
        self.context.destroy(linger=0)


class MessageConsumer(Consumer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.rcvhwm = 0
        self.socket.connect(f"ipc:///tmp/{setup.uid}")

    def get(self, ref: Any) -> Blob:
        message = msgpack.unpackb(self.socket.recv(copy=False).buffer)
        return np.frombuffer(message["data"], np.uint8)

    def close(self) -> None:
        self.context.destroy(linger=0)


PEER = Peer("zmq + msgpack", MessageProducer, MessageConsumer, packages=("pyzmq", "msgpack"))
