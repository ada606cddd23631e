"""The worker processes of one env server: started, watched, replaced, and the requests they run.

Owned by `server.py`, in the env-server process. A worker's death is noticed by its pidfd: whatever it had already said
is still read, its unfinished requests fail at once with the tail of its log, a replacement starts. Requests go to the
ready worker with the fewest; while there is none they wait. Deaths use up a budget that good replies restore.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shmrl.env.link import Link
from shmrl.env.protocol import error_reply
from shmrl.errors import EnvError, ProtocolError, ServerDied, TasksetError, WorkerDied
from shmrl.types import ErrorInfo
from shmrl.wire import pack, unpack

if TYPE_CHECKING:
    from shmrl.arena import Arena

log = logging.getLogger(__name__)

TAIL_BYTES = 8192
GRACE_S = 5.0
"""How long workers have to end their episodes when the server stops."""
GOOD_REPLIES = 10
"""Replies after which a worker slot's deaths are forgotten."""
LAGGING_S = 2.0


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way through the pool; `reply` is the worker's, or an error made here.

    Example: Request(17, "run_rollout", payload, tag="run/reverse-text/g3/e1")
    """

    number: int
    method: str
    payload: bytes
    tag: str = ""
    cancelled: bool = False
    worker: WorkerProcess | None = None
    reply: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One life of one worker slot."""

    slot: int
    process: subprocess.Popen[bytes]
    link: Link
    pidfd: int
    reading: asyncio.Task[None] | None = None
    ready: bool = False
    requests: dict[int, Request] = field(default_factory=dict)
    tail: bytes = b""
    beat: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def log_tail(self) -> str:
        return self.tail.decode(errors="replace")


class Pool:
    """`count` workers behind `submit`. `failed` gets the error that ends the server, when there is one.

    Args:
        settings: what every worker is told: env_id, env_args, split, max_turns, sandbox, name, arena, timeout_s,
            on_full, log_*.
        arena: what requests that failed left in it is discarded by their tags.
        hang_s: a worker whose event loop is silent for longer is aborted with a stack dump; 0 = never.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        count: int,
        *,
        max_concurrent: int,
        restart_budget: int,
        hang_s: float,
        arena: Arena,
    ) -> None:
        self.settings, self.count, self.max_concurrent = settings, count, max_concurrent
        self.restart_budget, self.hang_s, self._arena = restart_budget, hang_s, arena
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready = asyncio.Event()
        self.facts: dict[str, Any] = {}
        self.restarts = 0
        self._workers: dict[int, WorkerProcess] = {}
        self._waiting: deque[Request] = deque()
        self._numbers = 0
        self._deaths, self._good = [0] * count, [0] * count
        self._loading = asyncio.Semaphore(max(1, os.cpu_count() or 1))  # all at once starves every one of them
        self._background: set[asyncio.Task[None]] = set()
        self._buried = asyncio.Event()
        self._closing = False

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, method: str, payload: bytes, tag: str = "") -> Request:
        """Queue a request; await its `reply`, which comes exactly once."""
        self._numbers += 1
        request = Request(self._numbers, method, payload, tag)
        self._waiting.append(request)
        self._dispatch()
        return request

    def cancel(self, request: Request) -> bool:
        """Ask for a request to be ended; it still replies. False if it was cancelled, or had replied, before."""
        if request.cancelled or request.reply.done():
            return False
        request.cancelled = True
        if request.worker is not None:
            request.worker.link.send(request.number, "cancel", b"")
        else:
            self._waiting.remove(request)
            self._settle(request, error_reply(_cancelled()), failed=True)
        return True

    @property
    def active(self) -> int:
        """Requests that a worker runs."""
        return sum(len(worker.requests) for worker in self._workers.values())

    @property
    def workers(self) -> list[WorkerProcess]:
        """Those that have loaded their environment, by slot."""
        return sorted((w for w in self._workers.values() if w.ready), key=lambda worker: worker.slot)

    def health(self) -> dict[str, Any]:
        """Separate facts: how many there are, how many are ready, how many are late; what they do and use."""
        now, ready = time.monotonic(), self.workers
        lags = [1000 * max(0.0, now - worker.beat) for worker in ready]
        return {
            "workers": self.count,
            "ready": len(ready),
            "lagging": sum(lag > 1000 * LAGGING_S for lag in lags),
            "worker_lag_ms": max([*lags, *(worker.facts.get("lag_ms", 0.0) for worker in ready)], default=0.0),
            "rss_bytes": sum(worker.facts.get("rss_bytes", 0) for worker in ready),
            "sessions": self.active,
            "waiting": len(self._waiting),
            "restarts": self.restarts,
            "pids": [worker.process.pid for worker in ready],
        }

    def _dispatch(self) -> None:
        while self._waiting and (ready := self.workers) and self.active < self.max_concurrent:
            request = self._waiting.popleft()
            # A task set that is an iterator is remembered by the worker that reads it: ask the same one each time.
            worker = ready[0] if request.method == "tasks" else min(ready, key=lambda worker: len(worker.requests))
            request.worker = worker
            worker.requests[request.number] = request
            worker.link.send(request.number, request.method, request.payload)

    def _settle(self, request: Request, reply: bytes, failed: bool) -> None:
        """Hand out the one reply. Blocks of a request that failed, or that nobody waits for, are freed before."""
        if request.worker is not None:
            request.worker.requests.pop(request.number, None)
        if request.cancelled and not failed:
            reply, failed = error_reply(_cancelled()), True
        if failed and request.tag:
            self._arena.discard(request.tag)
        if not request.reply.done():
            request.reply.set_result(reply)

    # -------------------------------------------------------------------------------------------------------- workers

    def start(self) -> None:
        """Begin starting all workers; `ready` is set by the first one that has loaded its environment."""
        for slot in range(self.count):
            self._spawn(self._start(slot, 0.0))
        if self.hang_s:
            self._spawn(self._watch_for_hangs())

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _start(self, slot: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with self._loading:
            ours, theirs = socket.socketpair()
            link = await Link.over(ours)
            if self._closing or self.failed.done():
                theirs.close()
                await link.close()
                return
            worker = self._workers[slot] = self._launch(slot, link, theirs)
            loaded = asyncio.Event()
            worker.reading = asyncio.create_task(self._read(worker, loaded))
            await loaded.wait()

    def _launch(self, slot: int, link: Link, theirs: socket.socket) -> WorkerProcess:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "shmrl.env.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that its children end with it
            )
        worker = WorkerProcess(slot, process, link, os.pidfd_open(process.pid))
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.stdout.fileno(), self._relay, worker)
        loop.add_reader(worker.pidfd, self._on_exit, worker)
        link.send(0, "start", pack({**self.settings, "slot": slot}))
        return worker

    def _relay(self, worker: WorkerProcess) -> bool:
        """A worker's output goes to our log, and its end is remembered for error messages. False when there is none."""
        assert worker.process.stdout is not None
        try:
            data = os.read(worker.process.stdout.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(worker.process.stdout.fileno())
            return False
        worker.tail = (worker.tail + data)[-TAIL_BYTES:]
        sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()
        return True

    async def _read(self, worker: WorkerProcess, loaded: asyncio.Event) -> None:
        """Everything a worker says, to the end of its link."""
        try:
            while (frame := await worker.link.receive()) is not None:
                number, kind, payload = frame
                worker.beat = time.monotonic()
                if kind in ("reply", "failed"):
                    self._on_reply(worker, number, payload, kind == "failed")
                elif kind == "beat":
                    worker.facts = unpack(payload)
                elif kind == "ready":
                    worker.ready, self.facts = True, unpack(payload)
                    self.ready.set()
                    loaded.set()
                elif kind == "fatal":
                    self._fail(TasksetError(unpack(payload)["traceback"]))
                self._dispatch()
        except ProtocolError as error:
            log.error("env worker %d (pid %d) is killed: %s", worker.slot, worker.process.pid, error)
            worker.process.kill()
        finally:
            loaded.set()

    def _on_reply(self, worker: WorkerProcess, number: int, payload: bytes, failed: bool) -> None:
        request = worker.requests.get(number)
        if request is None:
            return
        self._good[worker.slot] += 1
        if self._good[worker.slot] >= GOOD_REPLIES:
            self._deaths[worker.slot] = 0
        self._settle(request, payload, failed)

    def _on_exit(self, worker: WorkerProcess) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        self._spawn(self._bury(worker))

    async def _bury(self, worker: WorkerProcess) -> None:
        """After a worker's death: its last words, its requests, its memory, its successor."""
        worker.ready = False
        code = await self._reap(worker)
        self._workers.pop(worker.slot, None)
        self._buried.set()
        if not any(other.ready for other in self._workers.values()):
            self.ready.clear()
        self._arena.sweep()  # its unfinished blocks are freed; the finished ones wait to be adopted, or discarded below
        ended = f"env worker {worker.slot} (pid {worker.process.pid}) {_ended(code)}"
        error = WorkerDied(f"{ended}; its last lines:\n{worker.log_tail}")
        for request in list(worker.requests.values()):
            self._settle(request, error_reply(error), failed=True)
        self._dispatch()
        if self._closing or self.failed.done():
            return
        log.error("%s", ended)
        self._deaths[worker.slot] += 1
        self._good[worker.slot] = 0
        deaths = self._deaths[worker.slot]
        if deaths > self.restart_budget:
            self._fail(
                WorkerDied(
                    f"env worker {worker.slot} died {deaths} times, restart_budget is {self.restart_budget}. {error}"
                )
            )
            return
        self.restarts += 1
        self._spawn(self._start(worker.slot, min(2.0, 0.05 * 4 ** (deaths - 1))))

    async def _reap(self, worker: WorkerProcess) -> int:
        """The exit code, once everything the process said has been read and its children are gone."""
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if worker.reading is not None:
            await asyncio.wait([worker.reading], timeout=1.0)
            worker.reading.cancel()
        while self._relay(worker):
            pass
        assert worker.process.stdout is not None
        asyncio.get_running_loop().remove_reader(worker.process.stdout.fileno())
        worker.process.stdout.close()
        os.close(worker.pidfd)
        await worker.link.close()
        return worker.process.wait()

    def _fail(self, error: EnvError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            for request in [*self._waiting, *(r for w in self._workers.values() for r in w.requests.values())]:
                self._settle(request, error_reply(error), failed=True)
            self._waiting.clear()

    async def _watch_for_hangs(self) -> None:
        """A loop that is silent for longer than an episode may last will not come back: its worker says where it is."""
        while True:
            await asyncio.sleep(1.0)
            for worker in self.workers:
                silent = time.monotonic() - worker.beat
                if silent > self.hang_s:
                    log.error(
                        "env worker %d has not turned its event loop for %.0f s: aborting it", worker.slot, silent
                    )
                    worker.process.send_signal(signal.SIGABRT)

    async def _all_buried(self) -> None:
        while self._workers:
            self._buried.clear()
            await self._buried.wait()

    async def close(self) -> None:
        """End every worker: terminate, GRACE_S, kill, wait. Requests still open fail."""
        self._closing = True
        workers = list(self._workers.values())
        for worker in workers:
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


def _cancelled() -> ErrorInfo:
    return ErrorInfo("Cancelled", "the episode was cancelled")


def _ended(code: int) -> str:
    """Example: "was killed by SIGKILL" """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
