"""What a peer is: a way for one process to leave a blob and for another to read it. Every peer's file builds on this.

`put` ends when another process could read the blob, `get` when this process can read every byte of it. Both are timed.
`done` and `free` are not, except where the rate of small blobs is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.peers.hosts import Host, processes

Blob = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Setup:
    """One turn. uid: unique in the machine; size: bytes of a blob; depth: blobs alive at once, at most.

    Example: Setup("b3f9a1", 6_291_456, 42)
    """

    uid: str
    size: int
    depth: int


class Producer:
    """Leaves blobs. `own_work_s`: seconds so far that were not hand-over (writing in place, for instance)."""

    own_work_s = 0.0

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def put(self, data: Blob) -> Any:
        """-> a reference that can be pickled."""
        raise NotImplementedError

    def put_many(self, blobs: Sequence[Blob]) -> list[Any]:
        """A burst -> its references."""
        put = self.put
        return [put(blob) for blob in blobs]

    def free(self, refs: Sequence[Any]) -> None:
        """Nobody needs these blobs any more."""

    def close(self) -> None:
        """Leaves nothing behind."""


class Consumer:
    """Reads blobs, in the order in which they were put."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def get(self, ref: Any) -> Blob:
        """-> the blob's bytes, uint8 [size]."""
        raise NotImplementedError

    def done(self, refs: Sequence[Any]) -> None:
        """The arrays of these are gone: the consumer lets go of the blobs."""

    def close(self) -> None:
        """Leaves nothing behind."""


@dataclass(frozen=True)
class Peer:
    """One way to do it.

    packages: distributions it needs beyond shmrl's own, whose versions the table's footer names. hot: whether its
    producer expects the reader at once. session: what runs around a turn -> where the two roles are hosted.
    """

    name: str
    producer: Callable[[Setup], Producer]
    consumer: Callable[[Setup], Consumer]
    packages: tuple[str, ...] = ()
    session: Callable[[], AbstractContextManager[type[Host]]] = processes
