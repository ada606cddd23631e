"""The episodes of one server while they run: a place, a deadline, one run per id, and every close however they end.

An episode runs in tasks of its own, never in the one that waits for its answer. Who asks again for an id whose episode
runs joins it; who asks again soon after its end gets the same answer. When nobody has waited for `ABANDONED_S`, it is
cancelled. Whatever was registered to be closed is closed in reverse order, together within `cleanup_timeout_seconds`,
and only then is its place free and its answer given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any

from shmrl.config.gym import Limits
from shmrl.env.episodes.telemetry import Counted
from shmrl.env.episodes.wire import EpisodeFailed, Failure, Stage
from shmrl.errors import told

log = logging.getLogger(__name__)
ABANDONED_S = 2.0
"""How long an episode goes on without anybody who waits: a collector whose connection broke asks again after 0.5 s."""
RECEIPT_S = 300.0
"""How long an answer is kept that could not be handed over."""
HANDED_OVER_S = 10.0
"""How long one is kept that was. Ids are a run's own (`0-0`): the next run of a collector must not get old answers."""
SHUTDOWN = Failure.of("the server is shutting down", terminal=False, failure_kind="shutdown")
Close = Callable[[], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Closing:
    """Something that has to be closed. `close()` does it once: after a failure it can be tried again."""

    name: str
    _close: Close
    _done: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def close(self) -> None:
        async with self._turn:
            if not self._done:
                await self._close()
                self._done = True


@dataclass(slots=True, eq=False)
class Course:
    """What a protocol is handed for one episode. It says where it stands (`stage`), and what to close at the end.

    capture_key: of the episode, for the routes of other servers.
    """

    capture_key: str
    stage: Stage = "admission"
    _closings: list[Closing] = field(default_factory=list)

    def closes(self, name: str, close: Close) -> Closing:
        """To be called before that which is to be closed is opened: an answer that is lost opens it too."""
        closing = Closing(name, close)
        self._closings.append(closing)
        return closing

    async def unwind(self, timeout_s: float) -> list[str]:
        """Close what is open, the last opened first; the names of what could not be, and why. Neither a failure nor one
        that takes too long keeps the others from being closed: what time is left is shared by those that are left."""
        left, failed = list(self._closings), []
        end = time.monotonic() + timeout_s
        while left:
            last, share_s = left[-1], (end - time.monotonic()) / len(left)
            try:
                async with asyncio.timeout(share_s):
                    await last.close()
            except TimeoutError:
                failed.append(f"{last.name} (not within {share_s:.3g} s)")
            except Exception as error:
                failed.append(f"{last.name} ({told(error)})")
            left.pop()
        return failed


Work = Callable[[Course], Awaitable[Any]]
"""An episode: from its course to its answer. EpisodeFailed is an answer too."""


@dataclass(slots=True, eq=False)
class Running:
    """An episode from its request until its answer is forgotten."""

    course: Course
    waiting: int = 0
    body: asyncio.Task[Any] | None = None
    whole: asyncio.Task[Any] | None = None
    cancelled: Failure | None = None
    handed_over: bool = False
    forgetting: asyncio.TimerHandle | None = None

    @property
    def ending(self) -> bool:
        """Whether it was cancelled, and is not closed yet."""
        return self.cancelled is not None and self.whole is not None and not self.whole.done()


class Episodes:
    """All episodes of one server. failed: the answer of an episode that failed, from its failure.

    Example:
        answer = await episodes.run("0-0", "0-0", work, lambda failure: failed(request, failure))
    """

    def __init__(self, limits: Limits, counted: Counted) -> None:
        self._limits, self._counted = limits, counted
        most = limits.max_concurrent_episodes
        self._places = asyncio.Semaphore(most) if most is not None else None
        self._running: dict[Hashable, Running] = {}
        self._closing = False

    async def run(self, key: Hashable, capture_key: str, work: Work, failed: Callable[[Failure], Any]) -> Any:
        """The answer of the episode `key`, which is run, joined, or over already. Cancelling the caller leaves it."""
        if self._closing:
            return failed(SHUTDOWN)
        while (running := self._running.get(key)) is not None and running.ending:
            assert running.whole is not None
            await asyncio.wait([running.whole])  # it leaves; who asks once more means another run
        if running is None:
            running = self._running[key] = Running(Course(capture_key))
            running.whole = asyncio.create_task(self._whole(key, running, work, failed))
        else:
            log.info("episode %s was asked for once more: it is not run again", capture_key)
        assert running.whole is not None
        running.waiting += 1
        try:
            return await asyncio.shield(running.whole)
        finally:
            running.waiting -= 1
            if not running.waiting and not running.whole.done():
                asyncio.get_running_loop().call_later(ABANDONED_S, self._abandon, running)

    def handed_over(self, key: Hashable) -> None:
        """The answer was written to who asked."""
        running = self._running.get(key)
        if running is not None and running.forgetting is not None and not running.handed_over:
            running.handed_over = True  # once: who asks again and again must not keep an old answer alive
            self._forget(key, running, HANDED_OVER_S)

    async def close(self) -> None:
        """End every episode, with the failure `shutdown`; returns when all of them are closed."""
        self._closing = True
        for running in list(self._running.values()):
            self._cancel(running, SHUTDOWN)
        await asyncio.gather(*(running.whole for running in self._running.values() if running.whole is not None))
        for running in self._running.values():
            if running.forgetting is not None:
                running.forgetting.cancel()
        self._running.clear()

    # ---------------------------------------------------------------------------------------------------- one episode

    async def _whole(self, key: Hashable, running: Running, work: Work, failed: Callable[[Failure], Any]) -> Any:
        """From admission to the last close. Nobody cancels this task; what can be cancelled is its body."""
        course = running.course
        with self._counted.episode() as seen:
            failure = await self._stopped_in(running, self._place())
            placed = failure is None and self._places is not None
            if failure is None:
                failure = await self._stopped_in(running, self._body(course, work))
                unclosed = await course.unwind(self._limits.cleanup_timeout_seconds)
                if unclosed:
                    log.error("episode %s: not closed: %s", course.capture_key, "; ".join(unclosed))
                    self._counted.unclosed(len(unclosed))
            if placed:
                assert self._places is not None
                self._places.release()
            seen.ended(failure)
        if failure is not None and (failure.stage == "admission" or failure.failure_kind in ("cancelled", "shutdown")):
            self._running.pop(key, None)
        else:
            self._forget(key, running, RECEIPT_S)
        assert running.body is not None
        return running.body.result() if failure is None else failed(failure)

    async def _stopped_in(self, running: Running, part: Coroutine[Any, Any, Any]) -> Failure | None:
        """Run a part of an episode as what `_cancel` cancels; why it ended, None if it succeeded."""
        running.body = asyncio.create_task(part)
        if running.cancelled is not None:
            running.body.cancel()
        await asyncio.wait([running.body])
        return self._failure(running, running.body)

    async def _place(self) -> None:
        """Wait for one of the places. EpisodeFailed when there is none in time."""
        if self._places is None:
            return
        limits = self._limits
        try:
            async with asyncio.timeout(limits.queue_timeout_seconds):
                await self._places.acquire()
        except TimeoutError:
            reason = (
                f"no place within queue_timeout_seconds = {limits.queue_timeout_seconds:g}: all of "
                f"max_concurrent_episodes = {limits.max_concurrent_episodes} are taken"
            )
            raise EpisodeFailed(Failure.of(reason, terminal=False, stage="admission")) from None

    async def _body(self, course: Course, work: Work) -> Any:
        limit_s = self._limits.default_episode_timeout_seconds
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await work(course)
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"no result within default_episode_timeout_seconds = {limit_s:g}"
            kind = "agent_timeout" if course.stage == "agent" else "transport_timeout"
            failure = Failure.of(reason, terminal=False, stage=course.stage, failure_kind=kind)
            raise EpisodeFailed(failure) from None

    def _failure(self, running: Running, body: asyncio.Task[Any]) -> Failure | None:
        """Why a task of this episode, which has ended, failed."""
        stage = running.course.stage
        error = asyncio.CancelledError() if body.cancelled() else body.exception()
        if error is None:
            return None
        if running.cancelled is not None:
            return running.cancelled.model_copy(update={"stage": stage})
        if isinstance(error, EpisodeFailed):
            return error.failure
        log.error("episode %s failed", running.course.capture_key, exc_info=error)
        return Failure.of(told(error), terminal=True, stage=stage)

    def _abandon(self, running: Running) -> None:
        if not running.waiting:
            reason = f"nobody has waited for it for {ABANDONED_S:g} s"
            self._cancel(running, Failure.of(reason, terminal=False, failure_kind="cancelled"))

    def _cancel(self, running: Running, why: Failure) -> None:
        if running.cancelled is None and running.whole is not None and not running.whole.done():
            log.info("episode %s is cancelled: %s", running.course.capture_key, why.failure_reason)
            running.cancelled = why
            if running.body is not None:
                running.body.cancel()

    def _forget(self, key: Hashable, running: Running, after_s: float) -> None:
        if running.forgetting is not None:
            running.forgetting.cancel()
        if self._closing:
            return
        loop = asyncio.get_running_loop()
        running.forgetting = loop.call_later(after_s, lambda: self._running.pop(key, None))
