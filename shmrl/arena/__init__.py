"""The arena: one bounded pool of shared memory on a host, and the processes that hold blocks of it.

Every other room sees `Arena` (create, attach and everything on blocks), `unlink(address)`, `span_bytes(nbytes)`,
`crc32c(data)`, and the inspectors in `inspect`, `commands` and `doctor`, which need no process slot. Imports neither
numpy nor torch.
"""

from shmrl.arena._arena import Block, View, span_bytes
from shmrl.arena._ctl import crc32c
from shmrl.arena.arena import Arena, unlink
from shmrl.arena.columns import Column
from shmrl.types import Handle

__all__ = ["Arena", "Block", "Column", "Handle", "View", "crc32c", "span_bytes", "unlink"]
