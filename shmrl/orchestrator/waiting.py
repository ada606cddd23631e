"""What the orchestrator waits for, twice a second, for the terminal: how much is collected, by source, how fast, and
why it takes as long as it does. Reads what the parts know; decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shmrl.config import RunTree
from shmrl.monitor import console
from shmrl.monitor.progress import Progress, bar

if TYPE_CHECKING:
    from shmrl.orchestrator.arenas import Arenas
    from shmrl.orchestrator.dispatcher import Dispatcher
    from shmrl.orchestrator.episodes import Episodes
    from shmrl.orchestrator.sinks import TrainSink

PERIOD_S = 0.5
SETTLING_S = 2.0  # how old the older of two counts is that a rate is between


class Waiting:
    """`stage` says what goes on; `run` shows it until it is cancelled."""

    def __init__(
        self, tree: RunTree, arenas: Arenas, episodes: Episodes, sink: TrainSink, dispatcher: Dispatcher
    ) -> None:
        self._tree, self._arenas = tree, arenas
        self._episodes, self._sink, self._dispatcher = episodes, sink, dispatcher
        self._progress = Progress(lambda line: console.show(line, as_json=tree.log.json_lines))
        self._enabled = tree.monitor.console
        self._stage, self._step = "start", 0
        self._progress.begin("start")
        self._missing: Mapping[str, Any] = {}
        self._counted = self._before = (time.monotonic(), 0)

    def awaits(self, missing: Mapping[str, Any]) -> None:
        """The start: who has not answered yet; entries leave it as they do."""
        self._missing = missing

    def stage(self, name: str, step: int) -> None:
        """start, warm-up, collect, train or evaluate."""
        self._stage, self._step = name, step
        self._progress.begin(name)

    @contextmanager
    def meanwhile(self, name: str, step: int) -> Iterator[None]:
        """What holds up the stage that goes on."""
        before = self._stage, self._step
        self.stage(name, step)
        try:
            yield
        finally:
            self.stage(*before)

    async def run(self) -> None:
        if not self._enabled:
            return
        try:
            while True:
                self._progress.show(*self.line())
                await asyncio.sleep(PERIOD_S)
        finally:
            self._progress.clear()

    def line(self) -> tuple[str, str]:
        """(how far it is, what it waits for)"""
        last = self._tree.run.max_steps
        if self._stage == "start":
            return "starting", f"waiting for {', '.join(self._missing)}" if self._missing else ""
        if self._stage == "warm-up":
            return f"warm-up step {self._step}/{self._tree.warmup.steps}", "demonstrations and the ranks"
        if self._stage == "evaluate":
            return f"step {self._step}/{last}: evaluating", self._open()
        if self._stage == "train":
            return f"step {self._step}/{last}: training", "the ranks"
        return self._collected(), self._why()

    def _collected(self) -> str:
        sink = self._sink
        unit = "tokens" if self._tree.orchestrator.batch_size is None else "episodes"
        sources = _by_source(sink.by_source())
        return (
            f"step {self._step}/{self._tree.run.max_steps}: [{bar(sink.pending, sink.batch)}] "
            f"{min(sink.pending, sink.batch):,} of {sink.batch:,} {unit}{sources}, {self._rate():,.0f} tokens/s"
        )

    def _rate(self) -> float:
        """Sampled tokens of episodes that came back, per second, over the last seconds."""
        now, total = time.monotonic(), self._episodes.tokens
        if now - self._counted[0] >= SETTLING_S:
            self._before, self._counted = self._counted, (now, total)
        since, tokens = self._before
        return (total - tokens) / (now - since) if now > since else 0.0

    def _why(self) -> str:
        """The first thing that holds the batch back."""
        pressure = self._arenas.pressure()
        if pressure["waiting"]:
            return f"{pressure['waiting']} writers wait for room in the arena, for {pressure['oldest_wait_s']:.0f} s"
        return ", ".join(filter(None, [self._dispatcher.held_back(), self._open()])) or "no episode runs"

    def _open(self) -> str:
        running = self._episodes.open()
        if not running:
            return ""
        by_source = Counter(tag.split("/")[1] for tag, _ in running)
        sources = (
            f" ({', '.join(f'{name} {count}' for name, count in by_source.items())})" if len(by_source) > 1 else ""
        )
        return f"{len(running)} episodes run{sources}, the oldest {self._episodes.oldest()}"


def _by_source(counts: Mapping[str, int]) -> str:
    """How many of each, where there are several. Example: " (math 60, code 36)" """
    return f" ({', '.join(f'{name} {count:,}' for name, count in counts.items())})" if len(counts) > 1 else ""
