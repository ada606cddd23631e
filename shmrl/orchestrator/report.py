"""What one step says of itself: the pinned metrics, to metrics.jsonl and the console, and rollouts/.

Called by the orchestrator's loop at a step's begin (while the blocks are there) and end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shmrl.config import RunTree
from shmrl.config.rundir import write_atomic
from shmrl.monitor import console
from shmrl.monitor.metrics import LoopLag, MetricsFile, last_step, rss_bytes
from shmrl.monitor.rollouts import write_rollouts
from shmrl.monitor.trackers import Trackers
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.episodes import Episodes
from shmrl.orchestrator.sinks import Batch, Scored
from shmrl.orchestrator.sources import Source

log = logging.getLogger(__name__)

WARMUP_LINES = 10
ARENA_METRICS = ("used_bytes", "peak_bytes", "blocks", "created", "freed", "orphaned", "waits")
SPILL_METRICS = ("spilled", "spilled_bytes")


class StepReport:
    """Collects and writes the records of the run's steps; `open` it before the first."""

    def __init__(
        self, tree: RunTree, arenas: Arenas, episodes: Episodes, sources: Sequence[Source], lag: LoopLag
    ) -> None:
        self._tree, self._arenas, self._episodes, self._sources, self._lag = tree, arenas, episodes, sources, lag
        self._last = time.monotonic()
        self._record: dict[str, Any] = {}
        self.latest: Mapping[str, Any] = {}  # written last
        self._trackers: Trackers | None = None
        self._path = tree.run.output_dir / "metrics.jsonl"
        self.last = last_step(self._path)  # that has a line, written by an orchestrator before this one

    def open(self, completed: int | None) -> None:
        """Start metrics.jsonl behind the steps that are completed already; what lies beyond them is cut off. None: an
        empty file."""
        self._last = time.monotonic()
        if completed is None:
            self.last = None
        self._file = MetricsFile(self._path, completed)
        self._trackers = Trackers(self._tree, completed)

    async def begin(self, batch: Batch, collect_s: float, sent_bytes: int) -> dict[str, Any]:
        """Before the step is sent: what is known of it now, and a few rollouts with their text."""
        stats = self._arenas.stats()  # what is in files: now, for the step's blocks are gone at its end
        self._record = {
            "step": batch.step,
            "time/collect": collect_s,
            "orchestrator/bytes_per_sample": bytes_per_sample(batch, sent_bytes),
            "episodes/shipped": len(batch.kept),
            **batch_metrics(batch),
            **{f"arena/{name}": stats[name] for name in SPILL_METRICS},
        }
        tree = self._tree
        if tree.monitor.rollouts:
            chosen = spread(batch.kept, tree.monitor.rollouts)
            seen = await asyncio.gather(*[self._arenas.shown(item.samples[0]) for item in chosen])
            rows = [
                (item.source, item.result, item.advantage, item.samples[0], one)
                for item, one in zip(chosen, seen, strict=True)
            ]
            try:
                write_rollouts(tree.run.output_dir / "rollouts", batch.step, rows)
            except OSError as error:
                log.warning("rollouts of step %d are not saved: %s", batch.step, error)
        return self._record

    @property
    def underway(self) -> int:
        """The step that was begun last."""
        return int(self._record.get("step", 0))

    def resume(self, record: Mapping[str, Any]) -> None:
        """Instead of `begin`, for a step that an orchestrator before this one shipped: what that one knew of it."""
        self._record = dict(record)
        self._episodes.end("shipped", record["episodes/shipped"])

    async def end(self, trainer: Mapping[str, float]) -> None:
        """After the step is durable: add the trainer's share and the state of arena, processes and episodes; write."""
        record = {**self._record, **trainer, "time/step": time.monotonic() - self._last}
        await self._arenas.look()
        record |= self._outcomes() | self._room() | self._process()
        self.write(record | await self._servers())

    def write(self, record: Mapping[str, Any]) -> None:
        """One line to the file, one to the console."""
        self._file.write(record)
        if self._trackers is not None:
            self._trackers.write(record)
        self.latest = dict(record)
        self._last = time.monotonic()
        if self._tree.monitor.console:
            line = console.step_line(record, self._tree.run.max_steps, console.width())
            console.show(line, as_json=self._tree.log.json_lines, metrics=record)

    def close(self) -> None:
        """Let the trackers finish."""
        if self._trackers is not None:
            self._trackers.close()

    def warmed_up(self, step: int, trainer: Mapping[str, float]) -> None:
        """A warm-up step: every tenth of the warm-up a line on the console, and how far it is into warmup.json, for the
        page. There is no policy to mismatch."""
        self._last = time.monotonic()
        steps = self._tree.warmup.steps
        if step != 1 and step % max(1, steps // WARMUP_LINES):
            return
        try:
            write_atomic(self._tree.run.output_dir / "warmup.json", json.dumps({"step": step, "steps": steps}) + "\n")
        except OSError as error:
            log.warning("warmup.json is not written: %s", error)
        if self._tree.monitor.console:
            line = console.step_line({"step": step, **trainer, "train/mismatch_kl": None}, steps)
            console.show(f"warm-up {line}", as_json=self._tree.log.json_lines)

    # --- shares --------------------------------------------------------------------------------------------------

    def _outcomes(self) -> dict[str, float]:
        episodes = self._episodes
        counts = episodes.take_counts()
        rejected, episodes.rejected = episodes.rejected, 0
        requeued, episodes.requeued = episodes.requeued, 0
        truncated, episodes.truncated = episodes.truncated, 0
        found: dict[str, float] = {f"episodes/{outcome}": count for outcome, count in counts.items()}
        return found | {
            "off_policy/dropped": counts["stale"],
            "payload/rejected_branches": rejected,
            "payload/truncated_samples": truncated,
            "orchestrator/requeued_groups": requeued,
        }

    def _room(self) -> dict[str, float]:
        """Of all arenas together; of nodes, their servers' memory."""
        stats = self._arenas.stats()
        found: dict[str, float] = {f"arena/{name}": stats[name] for name in ARENA_METRICS}
        found |= {f"node/{name}/rss_bytes": nbytes for name, nbytes in self._arenas.rss_bytes().items()}
        return found | {"arena/used_fraction": stats["used_bytes"] / stats["capacity_bytes"]}

    def _process(self) -> dict[str, float]:
        """Memory and loop lag."""
        resident, anonymous = rss_bytes()
        return {
            "orchestrator/rss_bytes": resident,
            "orchestrator/rss_anon_bytes": anonymous,
            "orchestrator/loop_lag_p99_ms": self._lag.take_p99_ms(),
        }

    async def _servers(self) -> dict[str, float]:
        """`env/<source>/rss_bytes`; a server that does not answer now is left out (an episode will say so)."""
        found: dict[str, float] = {}

        async def ask(source: Source) -> None:
            if (nbytes := await source.rss_bytes()) is not None:
                found[f"env/{source.name}/rss_bytes"] = nbytes

        await asyncio.gather(*map(ask, self._sources))
        return found


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards over every scored episode; lag (step - 1 - version at its first token) over those that ship."""
    by_source: dict[str, list[float]] = {}
    for episode in batch.episodes:
        by_source.setdefault(episode.source, []).append(episode.result.reward)
    rewards = [reward for values in by_source.values() for reward in values]
    lags = [batch.step - 1 - episode.result.version_start for episode in batch.kept]
    return {
        "train/reward": mean(rewards),
        **{f"train/reward/{name}": mean(values) for name, values in by_source.items()},
        "off_policy/mean": mean(lags),
        "off_policy/max": max(lags),
    }


def bytes_per_sample(batch: Batch, sent_bytes: int) -> float:
    """On the sockets: its reply plus its share of the step's messages."""
    replies = [episode.result for episode in batch.episodes if episode.result.samples]
    received = sum(reply.wire_bytes for reply in replies) / sum(len(reply.samples) for reply in replies)
    return received + sent_bytes / len(batch.samples)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def spread(episodes: Sequence[Scored], count: int) -> list[Scored]:
    """At most `count` of the episodes, evenly over the batch."""
    count = min(count, len(episodes))
    return [episodes[index * len(episodes) // count] for index in range(count)]
