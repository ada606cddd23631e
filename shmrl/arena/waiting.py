"""A reserve that found no room: grow, recover, queue, wait, spill, or say why not. One `Waiting` per such call.

The queue is first come first served across processes, with one place per process: threads share theirs. In an arena
with shares those within theirs come before those who borrow; each attempt says anew which it is.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shmrl.arena import messages
from shmrl.errors import ArenaFull, PeerDied

if TYPE_CHECKING:
    from shmrl.arena.arena import Arena

log = logging.getLogger(__name__)
TICK_S = 0.02  # a waiter looks at least this often: for the dead, and for frees that woke nobody
HOPE_S = 0.5  # how often it asks whether anybody is left who could free
PATIENCE_S = 10.0  # a wait that lasts this long is told, with who holds the space; then after twice, four times as long

_thread = threading.local()


@contextmanager
def giving_up(wanted: threading.Event) -> Iterator[None]:
    """In this thread, waits for space end with ArenaFull soon after `wanted` is cleared: what would be written is not
    needed any more, and others are next in the queue."""
    _thread.wanted = wanted
    try:
        yield
    finally:
        del _thread.wanted


class Waiting:
    """`next(code)` after each attempt that failed returns when the next one is due, or raises; then `leave()`.

    seen: the arena's space counter as read before the attempt. total: with the tail; more than `most`, all that this
    source can ever have at once, is not waited for.
    """

    def __init__(
        self, arena: Arena, nbytes: int, total: int, tag: str, on_full: str, timeout_s: float, most: int
    ) -> None:
        self.seen = 0
        self._arena, self._nbytes, self._total, self._tag = arena, nbytes, total, tag
        self._may_spill, self._spilling = on_full == "spill", False
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        if on_full == "raise" or total > most:
            self._deadline = self._began
        self._queued = self._said = self._within = False
        self._wanted: threading.Event | None = getattr(_thread, "wanted", None)
        self._asked = 0.0
        self._told_at = PATIENCE_S

    def next(self, code: int, borrows: bool) -> bool:
        """code: EXFULL wants descriptors, EMLINK pages, ENOSPC neither would help -> whether it is time to spill.
        borrows: the request goes beyond its source's share, now.

        Errors: ArenaFull, PeerDied.
        """
        arena = self._arena
        self._become(within=not borrows)
        if (code == errno.EXFULL and arena._grow_table()) or (code == errno.EMLINK and arena._grow_data(self._total)):
            return self._spilling
        if arena.sweep():
            return self._spilling
        if not self._said:
            self._said = True
            arena._note_full(self._nbytes)
        now = time.monotonic()
        if self._wanted is not None and not self._wanted.is_set():
            raise self._full(now)
        if now >= self._deadline:
            return self._spill(now)
        if now - self._began >= self._told_at:
            self._told_at *= 2
            log.warning("still waiting: %s", self._full(now))
        if not self._queued and not arena._in_queue:
            self._queued = arena._in_queue = True
            arena._queue(True)
            return False
        if now - self._asked > HOPE_S:
            self._asked = now
            if why := messages.hopeless(arena, self._nbytes, could_spill=not self._may_spill):
                if not self._may_spill:
                    raise PeerDied(why)
                return self._spill(now)
        arena._space_wait(self.seen, int(min(TICK_S, self._deadline - now) * 1e9))
        return False

    def leave(self) -> None:
        """Gives up the place in the queue; the next in line looks at once."""
        self._become(within=False)
        if self._queued:
            self._queued = self._arena._in_queue = False
            self._arena._queue(False)

    def _spill(self, now: float) -> bool:
        if not self._may_spill or self._spilling:  # already: then not even a descriptor is left
            raise self._full(now)
        self._spilling = True
        return True

    def _become(self, *, within: bool) -> None:
        if within != self._within:
            self._arena._queue_class(self._within, within)
            self._within = within

    def _full(self, now: float) -> ArenaFull:
        waited_s = now - self._began
        return messages.full(self._arena, self._nbytes, waited_s, self._tag, could_spill=not self._may_spill)
