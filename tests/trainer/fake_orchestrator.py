"""An orchestrator in forty lines: binds the trainer's address, greets the ranks, ships micro batches, reads answers."""

from contextlib import suppress
from pathlib import Path

import zmq

from shmrl import wire
from shmrl.payload import micro_batches_to_wire


class FakeOrchestrator:
    def __init__(self, tree, timeout_s=120):
        self.tree = tree
        tree.socket_dir.mkdir(parents=True, exist_ok=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, timeout_s * 1000)
        self._socket.bind(tree.trainer_address)
        self.hellos = {}

    def receive(self):
        """(identity, message) of the next message; zmq.Again after the timeout."""
        identity, raw = self._socket.recv_multipart()
        return identity, wire.unpack(raw)

    def greet(self):
        """Wait for every rank's hello; the messages by rank."""
        self.hellos, self._peers = {}, {}
        while len(self.hellos) < self.tree.trainer.ranks:
            identity, message = self.receive()
            if message["kind"] == "hello":  # a report to an orchestrator that is gone is not for us
                self.hellos[message["rank"]], self._peers[message["rank"]] = message, identity
        return self.hellos

    def tell(self, **message):
        for peer in self._peers.values():
            self._socket.send_multipart([peer, wire.pack(message)])

    def ship(self, kind, step, packed, **more):
        for rank, peer in self._peers.items():
            batches = micro_batches_to_wire(packed[rank])
            message = {"kind": kind, "step": step, "run_id": "test", "micro_batches": batches, "loss_tokens": 0}
            self._socket.send_multipart([peer, wire.pack(message | {"state": {}} | more)])

    def expect(self, kind):
        _, message = self.receive()
        assert message["kind"] == kind, message
        return message

    def close(self):
        self._socket.close()
        self._context.term()
        Path(self.tree.trainer_address.removeprefix("ipc://")).unlink(missing_ok=True)
        with suppress(OSError):
            self.tree.socket_dir.rmdir()
