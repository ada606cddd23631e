"""What the node server and `fetch` need of an arena to move blocks as they are, checksums included, between nodes.

The one place outside this package that blocks are opened up for; all of it is documented where it is implemented, in
the binding. Called in node servers and ranks.
"""

from __future__ import annotations

import os

from shmrl.arena._arena import Block, View
from shmrl.arena.arena import Arena
from shmrl.types import Handle

Behind = tuple[bytes, int, bool]
"""What lies behind a payload: tail bytes, their crc32c in the descriptor, whether it was sealed with checksums."""


def behind(view: View) -> Behind:
    """What lies behind the payload of a block. ArenaCorrupt."""
    return view._tail()


def seal_as(block: Block, tail: Behind) -> Handle:
    """Publish a reserved block as the copy of the one whose tail this is. ValueError if it does not fit."""
    return block._seal_as(*tail)


def was_freed(arena: Arena, handle: Handle) -> bool:
    """Whether the handle's block is known to be no more; False also for one that never was. ForeignArena."""
    return arena._is_freed(handle)


def spills(arena: Arena) -> bool:
    """Whether what finds no room can go to files."""
    return bool(arena._spill_dir())


class DataFiles:
    """The files that blocks are in, for sendfile(2). Owns a descriptor of the arena's data until close()."""

    def __init__(self, arena: Arena) -> None:
        self._data = arena._files.open("data", write=False)
        self._spilled = arena._spill_dir()

    def opened(self, view: View) -> tuple[int, int, bool]:
        """(descriptor, where the block's payload begins in it, whether the caller closes it)."""
        in_file, offset = view._place()
        if not in_file:
            return self._data, offset, False
        path = f"{self._spilled}/{view.handle.slot}-{view.handle.generation}"
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), offset, True

    def close(self) -> None:
        os.close(self._data)
