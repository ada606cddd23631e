"""How far an evaluation is, while it runs: a line of standard error that is redrawn on a terminal, elsewhere a line of
the log every ten seconds.

Owned by `evaluate.py`, in its process, which says what begins and what ends.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from shmrl.monitor.progress import CLEAR_LINE, bar, redraws

log = logging.getLogger(__name__)
REDRAWN_S, LOGGED_S = 0.5, 10.0


@dataclass(slots=True)
class _Count:
    """Of one environment."""

    total: int
    done: int = 0
    failed: int = 0
    reward: float = 0.0


class Meter:
    """Rollouts by environment, and those that run. `awaits` says what comes before them.

    Example: meter = Meter(); meter.expect("echo", 6); with meter.running("echo", "eval-0", 300.0): ...
    """

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out or sys.stderr, clock
        self.redraws = redraws(self._out)
        self._awaited, self._over = "", False
        self._counts: dict[str, _Count] = {}
        self._running: dict[int, tuple[float, str, str, float]] = {}  # since when, source, task, limit
        self._numbers = 0

    def awaits(self, what: str) -> None:
        """Nothing runs yet: what has to answer first."""
        self._awaited = what

    def expect(self, source: str, total: int) -> None:
        self._awaited = ""
        self._counts[source] = _Count(total)

    def ended(self, source: str, reward: float | None) -> None:
        """One rollout is done; without a reward it failed."""
        count = self._counts[source]
        count.done += 1
        count.failed += reward is None
        count.reward += reward or 0.0

    @contextmanager
    def running(self, source: str, task: str, limit_s: float) -> Iterator[None]:
        """A rollout, for as long as the block takes."""
        self._numbers += 1
        number = self._numbers
        self._running[number] = self._clock(), source, task, limit_s
        try:
            yield
        finally:
            del self._running[number]

    def line(self) -> str:
        """Example: "3 of 8 rollouts done, mean reward 0.750; 2 run, the oldest for 40 s: echo, task eval-1 (...)" """
        if not self._counts:
            return f"waiting for {self._awaited}"
        counts = self._counts.values()
        done, failed = self._sum("done"), self._sum("failed")
        text = f"{self.progress()} rollouts done"
        if len(self._counts) > 1:
            text += f" ({', '.join(f'{name} {one.done} of {one.total}' for name, one in self._counts.items())})"
        text += f", {failed} failed" if failed else ""
        text += f", mean reward {sum(count.reward for count in counts) / done:.3f}" if done else ""
        return f"{text}; {self._oldest()}"

    def progress(self) -> str:
        """Example: "3 of 8" """
        return f"{self._sum('done')} of {self._sum('total')}"

    def interrupted(self, path: Path) -> str:
        """What an interruption ends, and what it leaves. Nothing more is shown."""
        self._over = True
        if not self._counts:
            return f"it was waiting for {self._awaited}; nothing was run"
        if not self._sum("done"):
            return f"none of {self._sum('total')} rollouts is done; {self._oldest()}"
        done = f"{self.progress()} rollouts are done and kept in {path}: the same command goes on with them"
        return f"{done}; {self._oldest()}"

    def _sum(self, key: str) -> int:
        return sum(getattr(count, key) for count in self._counts.values())

    def _oldest(self) -> str:
        if not self._running:
            return "none runs"
        since, source, task, limit_s = min(self._running.values())
        limit = (
            f"ended after serve.request_timeout_s = {limit_s:g}" if limit_s else "serve.request_timeout_s = 0: no limit"
        )
        return (
            f"{len(self._running)} run, the oldest for {self._clock() - since:.0f} s: {source}, task {task} ({limit})"
        )

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Shows the line until the block is left."""
        showing = asyncio.create_task(self._show())
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            if self.redraws:
                self._write("")

    async def _show(self) -> None:
        while not self._over:
            if self.redraws:
                self.redraw()
            await asyncio.sleep(REDRAWN_S if self.redraws else LOGGED_S)
            if not self.redraws and not self._over:
                log.info("%s", self.line())

    def redraw(self) -> None:
        """The line, over what stands there; the cursor stays at its beginning."""
        done, total = self._sum("done"), self._sum("total")
        text = f"[{bar(done, total)}] {self.line()}" if total else self.line()
        self._write(f"{text[: shutil.get_terminal_size().columns - 1]}\r")

    def _write(self, text: str) -> None:
        self._out.write(CLEAR_LINE + text)
        self._out.flush()
