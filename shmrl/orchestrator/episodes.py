"""Episodes: one permit each, from the request to one of its outcomes; whatever they leave in the arena has an owner.

Used by the dispatcher (train), the evaluation and the warm-up, in the orchestrator's process. A reply is adopted by the
ledger the moment it arrives. An episode that is given up - timed out, cancelled, its group dropped - is cancelled at
its server, which frees what it kept; a reply that was on its way all the same is adopted and released here.

Every dispatched train episode ends in exactly one of OUTCOMES: `failed` and `timed_out` are decided here, the others by
whoever asked for the episode. Failures are data; only a lost server (ServerDied, TasksetError) is the run's end, and a
source from which a field that the run trains with has never come.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shmrl.errors import LostPayload, MissingField, PayloadError, RunError, ServerDied, TasksetError
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.sources import Source
from shmrl.types import EpisodeResult, ErrorInfo, Task

log = logging.getLogger(__name__)

T = TypeVar("T")
Outcome = Literal["shipped", "filtered", "stale", "failed", "cancelled", "timed_out"]
OUTCOMES: tuple[Outcome, ...] = ("shipped", "filtered", "stale", "failed", "cancelled", "timed_out")
FATAL = (ServerDied, TasksetError)
REJECTED = (PayloadError.__name__, MissingField.__name__)
REPORT_S = 30.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: an episode, or a whole group where the environment scores it; one seed per episode.

    Example: Ask(source, task, group_id="a3f1-17", index=3, seeds=(1234,), keep="train", version=4)
    """

    source: Source
    task: Task
    group_id: str
    index: int
    seeds: tuple[int, ...]
    keep: str
    version: int

    def send(self, tag: str) -> Coroutine[Any, Any, list[EpisodeResult]]:
        """The request to the server, under the group's tag."""
        return self._group(tag) if self.source.scores_groups and self.keep != "warmup" else self._one(tag)

    async def _one(self, tag: str) -> list[EpisodeResult]:
        tag, (seed,) = f"{tag}/{self.index}", self.seeds
        model = self.source.model(self.version, self.group_id)
        run = self.source.client.run_rollout
        return [await run(self.task, model=model, group_id=self.group_id, seed=seed, keep=self.keep, tag=tag)]

    async def _group(self, tag: str) -> list[EpisodeResult]:
        model = self.source.model(self.version, self.group_id)
        run = self.source.client.run_group
        return await run(self.task, model=model, group_id=self.group_id, seeds=self.seeds, keep=self.keep, tag=tag)


async def together(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """All results in order; at the first error the others are cancelled and it is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def reach(peers: Mapping[str, Coroutine[Any, Any, None]], remind_s: float = 10.0) -> None:
    """Await all of these peers' greetings, like `together`; a log line says now and then who is still missing."""
    missing = dict.fromkeys(peers)

    async def greet(name: str, greeting: Coroutine[Any, Any, None]) -> None:
        await greeting
        del missing[name]

    async def remind() -> None:
        while True:
            await asyncio.sleep(remind_s)
            log.info("waiting for %s", ", ".join(missing))

    reminder = asyncio.create_task(remind())
    try:
        await together(*[greet(name, greeting) for name, greeting in peers.items()])
    finally:
        reminder.cancel()


class Episodes:
    """Runs episodes under `permits`; `fail_limit` failures in a row, with no success between, end the run."""

    def __init__(self, ledger: Ledger, run_id: str, permits: int, fail_limit: int) -> None:
        self.permits = asyncio.Semaphore(permits)
        self.rejected = 0  # episodes whose arrays did not validate
        self.requeued = 0  # groups that were given up for want of room in the arena, to start again later
        self._ledger, self._run_id, self._fail_limit = ledger, run_id, fail_limit
        self._counts: Counter[Outcome] = Counter()
        self._failures: Counter[str] = Counter()  # since the last success
        self._last_failure = "none"
        self._complete: set[str] = set()  # sources of which a sample came with every field
        self._in_dropped = 0  # failures in groups that were dropped, since one was kept
        self._open: dict[str, float] = {}
        self._late: set[asyncio.Task[list[EpisodeResult]]] = set()

    # --- outcomes ------------------------------------------------------------------------------------------------

    def end(self, outcome: Outcome, count: int = 1) -> None:
        """Record the one outcome of `count` episodes."""
        self._counts[outcome] += count

    def take_counts(self) -> dict[Outcome, int]:
        """Outcomes since the last call, every one of them named."""
        taken, self._counts = self._counts, Counter()
        return {outcome: taken[outcome] for outcome in OUTCOMES}

    def open(self) -> list[tuple[str, float]]:
        """(tag, seconds) of every request under way - a group's first tag - the oldest first."""
        now = time.monotonic()
        return sorted(((tag, now - since) for tag, since in self._open.items()), key=lambda item: -item[1])

    # --- one request ---------------------------------------------------------------------------------------------

    async def run(self, ask: Ask) -> list[EpisodeResult]:
        """One result per seed, their blocks adopted. A failure is a result with `error`; in training it is counted.

        The caller holds the permits. Cancelling this cancels the episodes and counts nothing. Raises FATAL, and
        RunError when nothing but failures comes back, or a field is missing in a source's first sample.
        """
        tag = f"{self._run_id}/{ask.source.name}/{ask.group_id}"
        tags = [f"{tag}/{ask.index + i}" for i in range(len(ask.seeds))]
        self._open[tags[0]] = time.monotonic()
        try:
            replies = await self._replies(ask, tag)
        finally:
            del self._open[tags[0]]
        results = self._received(ask, replies, tags)
        try:
            for result, tag in zip(results, tags, strict=True):
                if not result.success:
                    self._count_failure(ask, tag, result)
        except RunError:
            for result in results:
                self._ledger.release(result.samples)
            raise
        return results

    async def _replies(self, ask: Ask, tag: str) -> list[EpisodeResult]:
        request = asyncio.ensure_future(ask.send(tag))
        try:
            await asyncio.wait({request}, timeout=ask.source.timeout_s)
        except asyncio.CancelledError:
            self._abandon(request, tag)
            raise
        if not request.done():
            self._abandon(request, tag)
            return _failed(ask, ErrorInfo("TimeoutError", f"no reply within {ask.source.timeout_s:g} s"))
        try:
            return request.result()
        except FATAL:
            raise
        except (Exception, asyncio.CancelledError) as error:  # cancelled: the client gave the request up by itself
            return _failed(ask, ErrorInfo.of(error))

    def _received(self, ask: Ask, replies: Sequence[EpisodeResult], tags: Sequence[str]) -> list[EpisodeResult]:
        """Adopt what came, all of it before anything is released: siblings share their prompt's block."""
        lost = self._ledger.adopt_all({tag: reply.samples for reply, tag in zip(replies, tags, strict=True)})
        return [self._judged(ask, reply, lost.get(tag)) for reply, tag in zip(replies, tags, strict=True)]

    def _judged(self, ask: Ask, result: EpisodeResult, lost: LostPayload | None) -> EpisodeResult:
        """A lost block, a reward that is no number or too old a policy makes a failure of an episode."""
        if lost is not None:
            return _failed(ask, ErrorInfo.of(lost))[0]
        fault = result.error or _fault(ask, result)
        if fault is None:
            self._failures.clear()
            if result.samples:
                self._complete.add(ask.source.name)
            return result
        self._ledger.release(result.samples)
        return _failed(ask, fault)[0]

    def _count_failure(self, ask: Ask, tag: str, result: EpisodeResult) -> None:
        error = result.error
        assert error is not None
        if ask.keep == "train":
            self.end("timed_out" if error.type == "TimeoutError" else "failed")
            self.rejected += error.type in REJECTED
            if error.type == MissingField.__name__ and ask.source.name not in self._complete:
                raise RunError(
                    f"source {ask.source.name!r}: its first sample ({tag}) lacks a field that the run trains with: "
                    f"{error.message}. The engine must return what trainer.router_replay, trainer.head and "
                    "trainer.sampling_replay ask for"
                )
        self._last_failure = f"{error.type}: {error.message}"
        self._failures[self._last_failure] += 1
        log.warning("%s failed: %s: %s", tag, error.type, error.message)
        total = self._failures.total()
        if total >= self._fail_limit:
            text, n = self._failures.most_common(1)[0]
            raise RunError(f"{total} episodes in a row failed (three batches of nothing else); {n} of them with {text}")

    def group_ended(self, failed: int, *, kept: bool) -> None:
        """RunError when `fail_limit` episodes failed in dropped groups with none kept between: a success here and there
        (room for one episode, in an arena that is too small for a batch) would hide for ever that nothing gets on."""
        self._in_dropped = 0 if kept else self._in_dropped + failed
        if self._in_dropped >= self._fail_limit:
            raise RunError(
                f"{self._in_dropped} episodes failed, and every group was dropped because too few of it succeeded; the "
                f"last failure: {self._last_failure}"
            )

    # --- given up ------------------------------------------------------------------------------------------------

    def _abandon(self, request: asyncio.Task[list[EpisodeResult]], tag: str) -> None:
        request.cancel()
        self._late.add(request)
        request.add_done_callback(lambda done: self._returned_late(done, tag))

    def _returned_late(self, request: asyncio.Task[list[EpisodeResult]], tag: str) -> None:
        self._late.discard(request)
        if request.cancelled() or request.exception() is not None:
            return  # the server frees what it kept
        samples = {f"{tag}/{index}": result.samples for index, result in enumerate(request.result())}
        lost = self._ledger.adopt_all(samples)
        self._ledger.release(sample for tag in samples.keys() - lost.keys() for sample in samples[tag])
        log.info("%s returned after it was given up; released", tag)

    async def watch(self) -> None:
        """Every 30 s, say which episodes have been open for longer than that."""
        while True:
            await asyncio.sleep(REPORT_S)
            slow = [f"{tag} for {seconds:.0f} s" for tag, seconds in self.open() if seconds > REPORT_S]
            if slow:
                log.warning(
                    "%d episodes are open for over %.0f s, the oldest: %s", len(slow), REPORT_S, ", ".join(slow[:5])
                )

    async def close(self, timeout_s: float = 10.0) -> None:
        """Wait for the replies of abandoned episodes, so that none of their blocks is missed."""
        if self._late:
            await asyncio.wait(set(self._late), timeout=timeout_s)


def _fault(ask: Ask, result: EpisodeResult) -> ErrorInfo | None:
    """Why an episode that its server calls a success is none."""
    if not math.isfinite(result.reward):
        return ErrorInfo("RewardError", f"the reward is {result.reward}")
    if result.version_start < ask.version:
        return ErrorInfo(
            "EngineError",
            f"the engine says that it generated with version {result.version_start}, but every engine had taken up "
            f"version {ask.version} before the episode began",
        )
    return None


def _failed(ask: Ask, error: ErrorInfo) -> list[EpisodeResult]:
    """The same failure for every episode of a request."""
    return [EpisodeResult(success=False, task_id=ask.task.id, error=error)] * len(ask.seeds)
