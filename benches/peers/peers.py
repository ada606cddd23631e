"""Who takes part. Imported in every process of the comparison; a peer's own packages are imported when it is used."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from benches.peers import (
    arena,
    http_server,
    iceoryx,
    node,
    ray_store,
    segments,
    tensors,
    transfer_queue,
    zmq_messages,
)
from benches.peers.interface import Peer

PEERS: list[Peer] = [
    *arena.PEERS,
    iceoryx.PEER,
    segments.PEER,
    tensors.PEER,
    zmq_messages.PEER,
    *http_server.PEERS,
    node.PEER,
    ray_store.PEER,
    transfer_queue.PEER,
]


def find(name: str) -> Peer:
    """The peer of this name."""
    return next(peer for peer in PEERS if peer.name == name)


def versions(peer: Peer) -> dict[str, str | None]:
    """Its packages' versions; None for one that is not installed."""
    return {package: _version(package) for package in peer.packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
