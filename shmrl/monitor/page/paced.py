"""How often the page's process does what takes time: the walk of the arena, the process table, the scan of /proc.

At most once per period however many browsers look, and less often when it takes long, so that being watched costs the
run at most 1 / PATIENCE of one core for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE = 100  # what took t seconds of CPU is not done again for PATIENCE * t


class Paced(Generic[T]):
    """What `make` returns, made anew at most every `period_s`, and less often if it takes long."""

    def __init__(self, make: Callable[[], T], period_s: float) -> None:
        self._make, self._period_s, self._until = make, period_s, 0.0
        self._found: T | None = None

    def get(self) -> T:
        now = time.monotonic()
        if self._found is None or now >= self._until:
            used = time.thread_time()
            self._found = self._make()
            self._until = now + max(self._period_s, PATIENCE * (time.thread_time() - used))
        return self._found
