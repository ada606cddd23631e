"""Episodes: one permit each, from the request to one of its outcomes; whatever they leave in the arena has an owner.

Used by the dispatcher (train), the evaluation and the warm-up, in the orchestrator's process. A reply is adopted by the
ledger the moment it arrives. An episode that is given up - timed out, cancelled, its group dropped - is cancelled at
its server, which frees what it kept; a reply that was on its way all the same is adopted and released here.

Every dispatched train episode ends in exactly one of OUTCOMES: `failed` and `timed_out` are decided here, the others by
whoever asked for the episode. Failures are data, those of a lost replica too; only the loss of a source's last server
(ServerDied), a task set that raises and a source from which a field that the run trains with has never come are the
run's end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shmrl.errors import LostPayload, MissingField, PayloadError, RunError, ServerDied, TasksetError
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.replicas import Replica
from shmrl.orchestrator.sources import Source
from shmrl.types import EpisodeResult, ErrorInfo, Sample, Task

log = logging.getLogger(__name__)

Outcome = Literal["shipped", "filtered", "stale", "failed", "cancelled", "timed_out"]
OUTCOMES: tuple[Outcome, ...] = ("shipped", "filtered", "stale", "failed", "cancelled", "timed_out")
REJECTED = (PayloadError.__name__, MissingField.__name__)
REPORT_S = 30.0
MOST_KINDS = 1000
"""Of failures that are counted: messages may all be different."""


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

    @property
    def shares(self) -> bool:
        """Whether the group's prompt is stored once, though each of its episodes is a request."""
        return self.keep == "train" and group_shares(self.source)

    async def send(self, tag: str, to: Replica) -> list[EpisodeResult]:
        """The request to a replica, under the group's tag."""
        common: dict[str, Any] = {
            "model": self.source.model(self.version, self.group_id, to.host),
            "group_id": self.group_id,
            "keep": self.keep,
        }
        if self.source.scores_groups and self.keep != "warmup":
            return await to.client.run_group(self.task, seeds=self.seeds, tag=tag, **common)
        (seed,) = self.seeds
        return [
            await to.client.run_rollout(self.task, seed=seed, tag=f"{tag}/{self.index}", shares=self.shares, **common)
        ]


def group_shares(source: Source) -> bool:
    """Whether a group's episodes are requests of their own that share a prompt."""
    return source.group_size > 1 and not source.scores_groups


class Episodes:
    """Runs episodes under `permits`; `fail_limit` failures in a row, with no success between, end the run."""

    def __init__(self, ledger: Ledger, run_id: str, permits: int, fail_limit: int) -> None:
        self.permits = asyncio.Semaphore(permits)
        self.rejected = 0  # episodes whose arrays did not validate
        self.truncated = 0  # samples that were cut to orchestrator.seq_len
        self.tokens = 0  # sampled, of all episodes that came back
        self.requeued = 0  # groups that were given up for want of room in the arena, to start again later
        self._ledger, self._run_id, self._fail_limit = ledger, run_id, fail_limit
        self._counts: Counter[Outcome] = Counter()
        self._failures: Counter[str] = Counter()  # since the last success
        self._last_failure = "none"
        self._told: Counter[tuple[str, str, str]] = Counter()  # failures by source, type and place
        self._traceback: Path | None = None  # the log that has the last new one
        self._complete: set[str] = set()  # sources of which a sample came with every field
        self._in_dropped = 0  # failures in groups that were dropped, since one was kept
        self._open: dict[str, tuple[float, Ask]] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._sharing: set[str] = set()  # groups under way whose episodes store their prompt once

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
        return sorted(((tag, now - since) for tag, (since, _) in self._open.items()), key=lambda item: -item[1])

    def oldest(self) -> str:
        """Of those under way. Example: "for 40 s: code, task train-17 (ended after serve.request_timeout_s = 300)" """
        since, ask = min(self._open.values(), key=lambda item: item[0])
        limit = f"ended after serve.request_timeout_s = {ask.source.timeout_s:g}" if ask.source.timeout_s else ""
        limit = limit or "serve.request_timeout_s = 0: no limit"
        return f"for {time.monotonic() - since:.0f} s: {ask.source.name}, task {ask.task.id} ({limit})"

    # --- one request ---------------------------------------------------------------------------------------------

    async def run(self, ask: Ask) -> list[EpisodeResult]:
        """One result per seed, their blocks adopted. A failure is a result with `error`; in training it is counted.

        The caller holds the permits. Cancelling this cancels the episodes and counts nothing. Raises ServerDied,
        TasksetError; RunError when nothing but failures comes back, or a field is missing in a source's first sample.
        """
        tag = f"{self._run_id}/{ask.source.name}/{ask.group_id}"
        tags = [f"{tag}/{ask.index + i}" for i in range(len(ask.seeds))]
        replica = ask.source.replicas.take(ask.group_id, len(ask.seeds), stays=ask.shares)
        self._open[tags[0]] = time.monotonic(), ask
        if ask.shares:
            self._sharing.add(tag)
        try:
            replies = await self._replies(ask, tag, replica)
            results = await self._received(ask, replies, tag, tags)
        finally:
            del self._open[tags[0]]
            ask.source.replicas.give_back(replica, ask.group_id, len(ask.seeds))
        try:
            for result, tag in zip(results, tags, strict=True):
                if not result.success:
                    self._count_failure(ask, tag, result)
        except RunError:
            for result in results:
                self._ledger.release(result.samples)
            raise
        return results

    async def _replies(self, ask: Ask, tag: str, replica: Replica) -> list[EpisodeResult]:
        request = asyncio.ensure_future(ask.send(tag, replica))
        try:
            await asyncio.wait({request}, timeout=ask.source.timeout_s)
        except asyncio.CancelledError:
            self._abandon(request, tag)
            raise
        if not request.done():
            self._abandon(request, tag)
            return _failed(ask, ErrorInfo.timeout(ask.source.timeout_s or 0))
        try:
            return request.result()
        except TasksetError:
            raise
        except ServerDied as error:
            if not ask.source.replicas.lose(replica, error):
                raise
            self._ledger.discard(tag if len(ask.seeds) > 1 else f"{tag}/{ask.index}")  # what it kept and never told
            return _failed(ask, ErrorInfo.of(error))
        except (Exception, asyncio.CancelledError) as error:  # cancelled: the client gave the request up by itself
            return _failed(ask, ErrorInfo.of(error))

    async def _received(
        self, ask: Ask, replies: Sequence[EpisodeResult], group: str, tags: Sequence[str]
    ) -> list[EpisodeResult]:
        """Adopt what came, all of it before anything is released: siblings share their prompt's block, those under way
        too."""
        lost = await self._adopted(group, {tag: reply.samples for reply, tag in zip(replies, tags, strict=True)})
        return [self._judged(ask, reply, lost.get(tag)) for reply, tag in zip(replies, tags, strict=True)]

    async def _adopted(self, group: str, samples: Mapping[str, Sequence[Sample]]) -> dict[str, LostPayload]:
        """Adopt what came by its tags, and keep what is shared while the group is under way; what was lost."""
        lost = await self._ledger.adopt_all(samples)
        if group in self._sharing:
            self._ledger.pin(group, (sample for tag in samples.keys() - lost.keys() for sample in samples[tag]))
        return lost

    def _judged(self, ask: Ask, result: EpisodeResult, lost: LostPayload | None) -> EpisodeResult:
        """A lost block, a reward that is no number or too old a policy makes a failure of an episode."""
        if lost is not None:
            return _failed(ask, ErrorInfo.of(lost))[0]
        fault = result.error or _fault(ask, result)
        if fault is None:
            self._failures.clear()
            self.tokens += result.num_tokens
            if result.samples:
                self._complete.add(ask.source.name)
            return result
        self._ledger.release(result.samples)
        return _failed(ask, fault)[0]

    def _count_failure(self, ask: Ask, tag: str, result: EpisodeResult) -> None:
        error = result.error
        assert error is not None
        if ask.keep == "train":
            self.end("timed_out" if error.type == "Timeout" else "failed")
            self.rejected += error.type in REJECTED
            if error.type == MissingField.__name__ and ask.source.name not in self._complete:
                raise RunError(
                    f"source {ask.source.name!r}: its first sample ({tag}) lacks a field that the run trains with: "
                    f"{error.message}. The engine must return what trainer.router_replay, trainer.head and "
                    "trainer.sampling_replay ask for"
                )
        self._last_failure = str(error)
        self._failures[self._last_failure] += 1
        self._tell(ask.source, tag, error)
        total = self._failures.total()
        if total >= self._fail_limit:
            raise RunError(f"{total} episodes in a row failed (three batches of nothing else); {self.most_failed()}")

    def _tell(self, source: Source, tag: str, error: ErrorInfo) -> None:
        """The first failure of a kind is a line, and then every tenth, hundredth, thousandth."""
        kind = (source.name, error.type, error.where or error.message)
        if len(self._told) > MOST_KINDS:
            self._told.clear()
        self._told[kind] += 1
        count = self._told[kind]
        if count == 1:
            self._traceback = source.log_of(error)
            log.warning("%s failed: %s%s", tag, error, f"; traceback: {self._traceback}" if self._traceback else "")
        elif str(count).strip("0") == "1":
            log.warning("%s: %d episodes of source %r failed so by now: %s", tag, count, source.name, error)

    @property
    def failing(self) -> bool:
        """Whether something failed since the last success."""
        return bool(self._failures)

    def most_failed(self) -> str:
        """What fails most since the last success. Example: "64 of them with ValueError: no word (a.py:23, in b)" """
        text, n = self._failures.most_common(1)[0]
        seen = f"; traceback: {self._traceback}" if self._traceback else ""
        return f"{n} of them with {text}{seen}"

    def group_left(self, source: Source, group_id: str) -> None:
        """Nothing of the group is awaited any more: what its episodes share lives as long as their samples."""
        tag = f"{self._run_id}/{source.name}/{group_id}"
        self._sharing.discard(tag)
        self._ledger.unpin(tag)
        if group_shares(source):
            source.replicas.leave(group_id)

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
        late = asyncio.create_task(self._returned_late(request, tag))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    async def _returned_late(self, request: asyncio.Task[list[EpisodeResult]], tag: str) -> None:
        await asyncio.wait({request})
        if request.cancelled() or request.exception() is not None:
            return  # the server frees what it kept
        samples = {f"{tag}/{index}": result.samples for index, result in enumerate(request.result())}
        lost = await self._adopted(tag, samples)
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
