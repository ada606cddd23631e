"""The places of a session server: never more taken than there are. Used on its event loop.

Example, with one place: `take()` is True; a second one False; but after `leave()`, while the first session's process
is being ended, it waits, and is True as soon as `free()` was called.
"""

from __future__ import annotations

import asyncio


class Slots:
    """`taken` of `most`; of those, `_leaving` will be free in a moment."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._leaving = 0
        self._changed = asyncio.Event()

    async def take(self) -> bool:
        """Take a place; False if none is free or about to be: a client that reconnects at once is not refused."""
        while self.taken >= self.most:
            if not self._leaving:
                return False
            await self._changed.wait()
        self.taken += 1  # nothing was awaited since the check
        return True

    def leave(self) -> None:
        """Whoever calls this will call `free` in a moment."""
        self._leaving += 1
        self._wake()

    def free(self) -> None:
        """Give the place back; `leave` was called before."""
        self._leaving -= 1
        self.taken -= 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
