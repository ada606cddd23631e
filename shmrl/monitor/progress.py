"""What a run waits for, while it waits: one line that is redrawn on a terminal, a plain line now and then elsewhere.

Drawn by the orchestrator on its standard output, beside the launcher's log on standard error: the cursor stays at the
line's beginning, so that whoever prints next overwrites it (`log.py` and `console.py` clear the rest of the line).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

CLEAR_LINE = "\x1b[2K"
PATIENCE_S = 30.0  # a wait that is shorter is never worth a line of its own
UNUSUAL = 2.0  # times the longest of the last waits


def redraws(out: TextIO) -> bool:
    """Whether lines of `out` can be drawn over."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def bar(done: float, wanted: float, width: int = 16) -> str:
    """Example: bar(3, 4, 8) == "######.." """
    filled = min(width, int(width * done / wanted)) if wanted else 0
    return "#" * filled + "." * (width - filled)


class Progress:
    """The wait that goes on. `say` prints a line for good."""

    def __init__(
        self,
        say: Callable[[str], None],
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._out, self._clock = say, out or sys.stdout, clock
        self.redraws = redraws(self._out)
        self._usual: dict[str, list[float]] = {}
        self._kind = ""
        self._since = clock()
        self._due = self._since + PATIENCE_S

    def begin(self, kind: str) -> None:
        """Another wait begins, of a kind whose last ones say how long is usual."""
        now = self._clock()
        if self._kind:
            self._usual[self._kind] = [*self._usual.get(self._kind, []), now - self._since][-5:]
        self._kind, self._since = kind, now
        self._due = now + max(PATIENCE_S, UNUSUAL * max(self._usual.get(kind, [0.0])))

    def show(self, text: str, reason: str) -> None:
        """What there is so far, and what it waits for. A line for good once it takes longer than the last ones did, and
        again after twice the time."""
        now = self._clock()
        waited = now - self._since
        if now >= self._due:
            self._due = now + waited
            unusual = ", longer than usual" if self._usual.get(self._kind) else " so far"
            self._say(f"{text}; {waited:.0f} s{unusual}{f': {reason}' if reason else ''}")
        elif self.redraws:
            columns = shutil.get_terminal_size().columns
            line = f"{text} | {waited:.0f} s" + (f" | {reason}" if reason else "")
            self._out.write(f"{CLEAR_LINE}{line[: columns - 1]}\r")
            self._out.flush()

    def clear(self) -> None:
        """Take the line away; what is printed next begins at its place."""
        if self.redraws:
            self._out.write(CLEAR_LINE)
            self._out.flush()
