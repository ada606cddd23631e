"""The worker processes of one env server: how many there are, which one runs what, and what becomes of their requests.

Owned by `server.py`, in the env-server process. Whatever a worker had said before its death (`process.py`) is still
read, its unfinished requests fail at once with the tail of its log, a replacement starts. Requests go to the ready
worker with the fewest; while there is none they wait. Deaths use up a budget that good replies restore. An elastic pool
begins with one worker, gets another one when nine tenths of its places are taken, and gives back those that are idle:
a worker that has a request is never ended for that. A cancelled request that does not end takes its worker with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shmrl.env.groups import Groups
from shmrl.env.link import Link
from shmrl.env.process import WorkerProcess
from shmrl.env.protocol import error_reply
from shmrl.errors import ConfigError, EnvError, ProtocolError, ServerDied, TasksetError, WorkerDied
from shmrl.types import ErrorInfo
from shmrl.wire import unpack

if TYPE_CHECKING:
    from shmrl.arena import Arena
    from shmrl.config import WorkerPool

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long workers have to end their episodes when the server stops."""
GOOD_REPLIES = 10
"""Replies after which a worker slot's deaths are forgotten."""
LAGGING_S = 2.0
SILENT_S = 5.0
"""After how long without a word a worker gets no more requests: they wait for it to be heard of again, or replaced."""
GROW_AT = 0.9
"""Share of an elastic pool's places that are taken when another worker starts."""
IDLE_S = 30.0
"""How long a worker of an elastic pool has nothing to do before it is ended."""
WATCH_S = 0.5
BEAT_S = 1.0
"""How long before a request a worker may have been heard last, though its loop turned."""


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the pool; `reply` is the worker's, or an error made here.

    on_delta: gets what the worker says before its reply. shares: an episode whose group stores its prompt once (see
    `groups.py`).

    Example: Request(17, "run_rollout", payload, tag="run/reverse-text/g3/e1")
    """

    number: int
    method: str
    payload: bytes
    tag: str = ""
    on_delta: Callable[[bytes], None] | None = None
    shares: bool = False
    cancelled: float | None = None  # when
    worker: WorkerProcess | None = None
    reply: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Pool:
    """Workers behind `submit`. `failed` gets the error that ends the server, when there is one.

    Args:
        settings: what every worker is told: env_id, env_args, split, max_turns, sandbox, python, name, arena,
            timeout_s, on_full, log.
        size: how many workers, or between how many.
        arena: what requests that failed left in it is discarded by their tags.
        hang_s: a worker whose event loop is silent for longer is aborted with a stack dump; 0 = never.
        cleanup_s: a worker that has not ended a cancelled request after this time is aborted, too.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        size: WorkerPool,
        *,
        max_concurrent: int,
        restart_budget: int,
        hang_s: float,
        cleanup_s: float,
        arena: Arena,
    ) -> None:
        self.settings, self.size, self.max_concurrent = settings, size, max_concurrent
        self.restart_budget, self.hang_s, self.cleanup_s, self._arena = restart_budget, hang_s, cleanup_s, arena
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready = asyncio.Event()
        self.facts: dict[str, Any] = {}
        self.restarts = 0
        self.counts: Counter[str] = Counter(replied=0, failed=0, cancelled=0)
        self._slots: set[int] = set()  # those that have a worker, or will have one in a moment
        self._workers: dict[int, WorkerProcess] = {}
        self._waiting: deque[Request] = deque()
        self._numbers = 0
        self._groups = Groups(arena)
        self._deaths: dict[int, int] = defaultdict(int)
        self._good: dict[int, int] = defaultdict(int)
        self._loading = asyncio.Semaphore(max(1, os.cpu_count() or 1))  # all at once starves every one of them
        self._background: set[asyncio.Task[None]] = set()
        self._buried = asyncio.Event()
        self._closing = False

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        method: str,
        payload: bytes,
        tag: str = "",
        *,
        on_delta: Callable[[bytes], None] | None = None,
        shares: bool = False,
    ) -> Request:
        """Queue a request; await its `reply`, which comes exactly once."""
        self._numbers += 1
        request = Request(self._numbers, method, payload, tag, on_delta, shares)
        if shares:
            self._groups.begin(request)
        self._waiting.append(request)
        self._dispatch()
        return request

    def cancel(self, request: Request) -> bool:
        """Ask for a request to be ended; it still replies. False if it was cancelled, or had replied, before."""
        if request.cancelled is not None or request.reply.done():
            return False
        request.cancelled = time.monotonic()
        if request.worker is not None:
            request.worker.link.send(request.number, "cancel", b"")
        else:
            self._waiting.remove(request)
            self._settle(request, error_reply(_cancelled()), failed=True)
        return True

    def unclaimed(self, tag: str) -> None:
        """The reply of this request reached nobody: free what it brought."""
        self._arena.discard(tag)
        self._groups.unclaim(tag)

    @property
    def active(self) -> int:
        """Requests that a worker runs."""
        return sum(len(worker.requests) for worker in self._workers.values())

    @property
    def workers(self) -> list[WorkerProcess]:
        """Those that have loaded their environment, by slot."""
        ready = (worker for worker in self._workers.values() if worker.ready and worker.leaving is None)
        return sorted(ready, key=lambda worker: worker.slot)

    def health(self) -> dict[str, Any]:
        """Separate facts: how many there are, how many are ready, how many are late; what they do and use."""
        now, ready = time.monotonic(), self.workers
        silent = [1000 * max(0.0, now - worker.beat) for worker in ready]
        lags = [worker.facts.get("loop_lag_ms", {}).get("max", 0.0) for worker in ready]
        deaths = max((self._deaths[slot] for slot in self._slots), default=0)
        return {
            "workers": len(self._slots),
            "max_workers": self.size.most,
            "ready": len(ready),
            "loading": sum(not worker.ready for worker in self._workers.values()),
            "lagging": sum(lag > 1000 * LAGGING_S for lag in silent),
            "worker_lag_ms": max([*silent, *lags], default=0.0),
            "rss_bytes": sum(worker.facts.get("rss_bytes", 0) for worker in ready),
            "sessions": self.active,
            "waiting": len(self._waiting),
            "restarts": self.restarts,
            "restarts_left": max(0, self.restart_budget - deaths),
            "stats": dict(self.counts),
            "pids": [worker.process.pid for worker in ready],
        }

    def _dispatch(self) -> None:
        while self._waiting and self.active < self.max_concurrent:
            worker = self._choice(self._waiting[0])
            if worker is None:
                break
            request = self._waiting.popleft()
            request.worker = worker
            worker.requests[request.number] = request
            worker.link.send(request.number, request.method, request.payload)
        self._grow()

    def _choice(self, request: Request) -> WorkerProcess | None:
        """The worker with the fewest requests, if one has a place and is heard of: what hangs would take more along.
        A task set that is an iterator is remembered by the worker that reads it: the same one is asked each time."""
        ready, most = self.workers, self.size.per_worker
        if request.method == "tasks" or not ready:
            return next(iter(ready), None)
        heard = time.monotonic() - SILENT_S
        ready = [worker for worker in ready if worker.beat > heard]
        worker = min(ready, key=lambda worker: len(worker.requests), default=None)
        return worker if worker is not None and (most is None or len(worker.requests) < most) else None

    def _settle(self, request: Request, reply: bytes, failed: bool) -> None:
        """Hand out the one reply. Blocks of a request that failed, or that nobody waits for, are freed before."""
        if request.worker is not None and request.worker.requests.pop(request.number, None) is not None:
            request.worker.busy = time.monotonic()
        if request.cancelled is not None and not failed:
            reply, failed = error_reply(_cancelled()), True
        if failed and request.tag:
            self._arena.discard(request.tag)
        if request.shares:
            self._groups.end(request, replied=not failed)
        if not request.reply.done():
            self.counts["cancelled" if request.cancelled is not None else "failed" if failed else "replied"] += 1
            request.reply.set_result(reply)

    # ----------------------------------------------------------------------------------------------------------- size

    def start(self) -> None:
        """Begin starting workers; `ready` is set by the first one that has loaded its environment."""
        for slot in range(self.size.least):
            self._fill(slot, 0.0)
        self._spawn(self._watch())

    def _fill(self, slot: int, delay_s: float) -> None:
        self._slots.add(slot)
        self._spawn(self._start(slot, delay_s))

    def _grow(self) -> None:
        """Another worker where the load asks for it and nobody is on the way."""
        per_worker, going = self.size.per_worker, self._closing or self.failed.done()
        if per_worker is None or going or len(self._slots) >= self.size.most:
            return
        load = self.active + len(self._waiting)
        if load >= GROW_AT * per_worker * len(self._slots) and len(self.workers) == len(self._slots):
            log.info("%d requests for %d workers: starting another one", load, len(self._slots))
            self._fill(min(set(range(self.size.most)) - self._slots), 0.0)

    def _shrink(self) -> None:
        """End workers that have been idle for long, but for the first, which reads the task set."""
        for worker in self._workers.values():
            if worker.leaving is not None and time.monotonic() - worker.leaving > GRACE_S:
                worker.process.kill()
        if self.size.per_worker is None or self._waiting:
            return
        for worker in self.workers[1:]:
            if not worker.requests and time.monotonic() - worker.busy > IDLE_S:
                log.info("env worker %d has been idle for %.0f s: ending it", worker.slot, IDLE_S)
                worker.leaving = time.monotonic()
                worker.process.terminate()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -------------------------------------------------------------------------------------------------------- workers

    async def _start(self, slot: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with self._loading:
            if self._closing or self.failed.done():
                return
            try:
                worker = await self._launched(slot)
            except OSError as error:  # out of descriptors, processes or memory: it may have some later
                self._replace(slot, WorkerDied(f"env worker {slot} cannot be started: {error.strerror}"))
                return
            self._workers[slot] = worker
            loaded = asyncio.Event()
            worker.reading = asyncio.create_task(self._read(worker, loaded))
            await loaded.wait()

    async def _launched(self, slot: int) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await Link.over(ours)
            try:
                return WorkerProcess.launch(slot, link, theirs, self.settings, self._on_exit)
            except OSError:
                await link.close()
                raise

    async def _read(self, worker: WorkerProcess, loaded: asyncio.Event) -> None:
        """Everything a worker says, to the end of its link."""
        try:
            while (frame := await worker.link.receive()) is not None:
                number, kind, payload = frame
                worker.beat = time.monotonic()
                if kind in ("reply", "failed"):
                    self._on_reply(worker, number, payload, kind == "failed")
                elif kind == "delta":
                    self._on_delta(worker, number, payload)
                elif kind in ("ask", "tell") and number in worker.requests:
                    self._on_shared(worker.requests[number], kind, payload)
                elif kind == "beat":
                    worker.facts = unpack(payload)
                elif kind == "ready":
                    worker.ready, worker.busy, self.facts = True, worker.beat, unpack(payload)
                    self.ready.set()
                    loaded.set()
                elif kind == "fatal":
                    self._fail(_fatal(unpack(payload)))
                self._dispatch()
        except ProtocolError as error:
            log.error("%s is killed: %s", worker.name, error)
            worker.process.kill()
        finally:
            loaded.set()

    def _on_delta(self, worker: WorkerProcess, number: int, payload: bytes) -> None:
        request = worker.requests.get(number)
        if request is not None and request.on_delta is not None and request.cancelled is None:
            request.on_delta(payload)

    def _on_reply(self, worker: WorkerProcess, number: int, payload: bytes, failed: bool) -> None:
        request = worker.requests.get(number)
        if request is None:
            return
        self._good[worker.slot] += 1
        if self._good[worker.slot] >= GOOD_REPLIES:
            self._deaths[worker.slot] = 0
        self._settle(request, payload, failed)

    def _on_shared(self, request: Request, kind: str, payload: bytes) -> None:
        if kind == "ask":
            self._groups.ask(request)
        else:
            self._groups.tell(request, payload)

    def _on_exit(self, worker: WorkerProcess) -> None:
        self._spawn(self._bury(worker))

    async def _bury(self, worker: WorkerProcess) -> None:
        """After a worker's end: its last words, its requests, its memory, its successor."""
        worker.ready = False
        code = await worker.reap()
        self._workers.pop(worker.slot, None)
        if worker.leaving is not None or self._closing:
            self._slots.discard(worker.slot)
        self._buried.set()
        if not any(other.ready for other in self._workers.values()):
            self.ready.clear()
        self._arena.sweep()  # its unfinished blocks are freed; the finished ones wait to be adopted, or discarded below
        ended = f"{worker.name} {_ended(code)}"
        error = WorkerDied(f"{ended}; its last lines:\n{worker.log_tail}" if worker.log_tail else ended)
        for request in list(worker.requests.values()):
            self._settle(request, error_reply(error), failed=True)
        self._dispatch()
        if worker.leaving is not None or self._closing or self.failed.done():
            return
        log.error("%s", ended)
        self._replace(worker.slot, error)

    def _replace(self, slot: int, error: WorkerDied) -> None:
        """Start the next worker of this slot, within the budget."""
        self._deaths[slot] += 1
        self._good[slot] = 0
        deaths = self._deaths[slot]
        if deaths > self.restart_budget:
            died = f"env worker {slot} died {deaths} times, restart_budget is {self.restart_budget}"
            self._fail(WorkerDied(f"{died}. {error}"))
            return
        self.restarts += 1
        self._fill(slot, min(2.0, 0.05 * 4 ** (deaths - 1)))

    def _fail(self, error: EnvError | ConfigError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            for request in [*self._waiting, *(r for w in self._workers.values() for r in w.requests.values())]:
                self._settle(request, error_reply(error), failed=True)
            self._waiting.clear()

    # ----------------------------------------------------------------------------------------------------------- time

    async def _watch(self) -> None:
        """Workers that will not come back, cancelled requests that do not end, workers that are not needed."""
        aborted: set[WorkerProcess] = set()
        while True:
            await asyncio.sleep(WATCH_S)
            for worker in set(self.workers) - aborted:
                if problem := self._hangs(worker) or self._keeps(worker):
                    log.error("%s %s: aborting it", worker.name, problem)
                    aborted.add(worker)
                    self._spawn(worker.abort())
            aborted &= set(self._workers.values())
            self._shrink()

    def _hangs(self, worker: WorkerProcess) -> str:
        """A loop that is silent for longer than an episode may last will not come back. Whoever asked for the episode,
        with the same deadline, is first to say that it took too long."""
        silent = time.monotonic() - worker.beat
        return f"has not turned its event loop for {silent:.0f} s" if 0 < self.hang_s < silent - BEAT_S else ""

    def _keeps(self, worker: WorkerProcess) -> str:
        oldest = time.monotonic() - self.cleanup_s
        late = [r for r in worker.requests.values() if r.cancelled is not None and r.cancelled < oldest]
        if not late:
            return ""
        return (
            f"has not ended {len(late)} cancelled requests within serve.cleanup_timeout_s = {self.cleanup_s:g} s "
            f"({', '.join(request.tag or request.method for request in late[:5])})"
        )

    async def _all_buried(self) -> None:
        while self._workers:
            self._buried.clear()
            await self._buried.wait()

    async def close(self) -> None:
        """End every worker: terminate, GRACE_S, kill, wait. Requests still open fail."""
        self._closing = True
        for worker in list(self._workers.values()):
            worker.process.terminate()
        buried = asyncio.create_task(self._all_buried())
        await asyncio.wait([buried], timeout=GRACE_S)
        for worker in list(self._workers.values()):
            worker.process.kill()
        await buried
        closed = error_reply(ServerDied("the env server is shutting down"))
        for request in self._waiting:
            self._settle(request, closed, failed=True)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self.failed.done():
            self.failed.exception()


def _fatal(told: Mapping[str, Any]) -> TasksetError | ConfigError:
    """What a worker says it cannot serve for."""
    return ConfigError(told["problems"]) if "problems" in told else TasksetError(told["raised"])


def _cancelled() -> ErrorInfo:
    return ErrorInfo("Cancelled", "the episode was cancelled")


def _ended(code: int) -> str:
    """Example: "was killed by SIGKILL" """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
