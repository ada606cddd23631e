"""Two nodes: the producer's arena behind a node server, blocks fetched over loopback into the consumer's, verified.

The counterpart of http_server.py; both keep their connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benches.peers.arena import ArenaProducer
from benches.peers.interface import Blob, Consumer, Peer, Setup
from shmrl import Arena, Handle
from shmrl.node.client import Client
from shmrl.node.server import NodeServer
from shmrl.node.transfer import fetch_one

TOKEN = "0" * 32


class NodeProducer(ArenaProducer):
    """A copy into the arena, with checksums; the node server is in threads of this process, as http_server's is."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, checksum=True)
        self.server = NodeServer(self.arena, TOKEN)
        self.address = self.server.url

    def close(self) -> None:
        self.server.close()
        super().close()


class NodeConsumer(Consumer):
    """One fetch per blob, into an arena of its own."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.arena = Arena.create(max(256 << 20, 2 * setup.depth * setup.size))
        self.client = Client(TOKEN)
        self.copies: dict[Handle, Handle] = {}

    def get(self, ref: Any) -> Blob:
        url, handle = ref
        self.copies[handle] = fetch_one(self.arena, self.client, handle, url)
        return np.frombuffer(self.arena.get(self.copies[handle]), np.uint8)

    def done(self, refs: Sequence[Any]) -> None:
        self.arena.free([self.copies.pop(handle) for _, handle in refs])

    def close(self) -> None:
        self.client.close()
        self.arena.close()
        self.arena.unlink()


PEER = Peer("shmrl, two nodes", NodeProducer, NodeConsumer)
