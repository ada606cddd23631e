"""The warm-up: supervised steps on the environments' own demonstrations, before version 0 is published.

The ordinary path with another model: the env worker plays its scripted one, whose tokens are packed and shipped like
any others, every weight 1 and no advantage. Runs in the orchestrator, which has its connections by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmrl.errors import RunError
from shmrl.orchestrator.episodes import Ask
from shmrl.orchestrator.sources import Source
from shmrl.orchestrator.together import together
from shmrl.types import Sample

if TYPE_CHECKING:
    from shmrl.orchestrator.loop import Orchestrator


class WarmUp:
    """`[warmup]` of an orchestrator's run; with steps = 0 there is nothing to do."""

    def __init__(self, run: Orchestrator) -> None:
        self._run, self._config = run, run.tree.warmup
        self._sources = [source for source in run.sources if source.split == "train"]

    async def run(self) -> None:
        """Every step; the next one's demonstrations are collected while one is trained."""
        training: asyncio.Task[None] | None = None
        for step in range(1, self._config.steps + 1):
            samples = await self._demonstrations(step)
            if training is not None:
                await training
            training = self._run.spawn(self._supervise(step, samples))
        if training is not None:
            await training

    async def _demonstrations(self, step: int) -> list[Sample]:
        """Samples of `warmup.batch_size` demonstrated episodes, of the train sources in turn."""
        count, sources = self._config.batch_size, self._sources
        found = await together(*[self._demonstration(sources[i % len(sources)], step, i) for i in range(count)])
        samples = [sample for samples in found for sample in samples]
        if not samples:
            why = self._run.episodes.most_failed() if self._run.episodes.failing else "see the warnings above"
            raise RunError(f"warm-up step {step}: none of {count} demonstrations could be used; {why}")
        return samples

    async def _demonstration(self, source: Source, step: int, index: int) -> tuple[Sample, ...]:
        group_id, seeds = f"{self._run.attempt}-w{step}", (source.seed("warmup", step, index),)
        ask = Ask(source, await source.next_task(), group_id, index, seeds, "warmup", version=0)
        async with self._run.episodes.permits:
            (result,) = await self._run.episodes.run(ask)
        return self._run.sink.fitted(result.samples, advantage=0.0)

    async def _supervise(self, step: int, samples: Sequence[Sample]) -> None:
        run = self._run
        run.waiting.stage("warm-up", step)
        await run.ship_warmup(step, samples)
        metrics = await run.link.report(step, "warmup")
        run.ledger.let_go(step)
        run.report.warmed_up(step, metrics)
