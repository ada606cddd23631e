"""`EnvClient`: an env server as the orchestrator sees it. One connection, one reader task, one future per request.

Runs in the orchestrator's event loop (or an embedder's). Cancelling the awaiting task cancels the episode on the
server. A server that exits or freezes is noticed by its connection's end: every open request fails, nothing waits for
ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from shmrl.env.protocol import (
    delta_from_wire,
    episode_from_wire,
    notice_silence,
    raise_error,
    task_from_wire,
    task_to_wire,
)
from shmrl.env.threads import packed
from shmrl.errors import ProtocolError, ServerDied, TasksetError
from shmrl.types import Delta, EpisodeResult, Task
from shmrl.wire import MAX_MESSAGE, unpack, unpack_in_turns

log = logging.getLogger(__name__)
RECONNECT_MS = 100
DRAIN_S = 0.2
"""After a connection's end: how long what the server said before may still take to be read."""
CANCEL_S = 2.0
"""At close: how long the server may take to confirm cancels. A client that hung up earlier would leave it guessing."""
CALL_S = 600.0
"""How long a server may take to answer anything but an episode: its worker may have to load the environment again."""
OnDelta = Callable[[Delta], None]


class EnvClient:
    """A client of one server. `address` as the server binds it; `token` is the run's.

    Example:
        client = EnvClient("tcp://127.0.0.1:5000", token)
        await client.connect(); (task,) = await client.tasks("train", 0, 1)
        result = await client.run_rollout(task, model=model, group_id="0", seed=1, keep="train", tag="run/text/0/0")
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address, self.token = address, token
        self._context: zmq.asyncio.Context | None = None
        self._open: dict[bytes, asyncio.Future[bytes]] = {}
        self._deltas: dict[bytes, Callable[[dict[str, Any]], None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._cancels: set[asyncio.Task[Any]] = set()
        self._lost: str | None = "not connected: call connect() first"
        self._count = int.from_bytes(os.urandom(4), "little") << 32

    async def connect(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Wait until the server answers and one of its workers has loaded the environment; its health.

        Raises TasksetError or WorkerDied as the server says it, ConfigError where it says that the configuration
        cannot work, ProtocolError for a wrong token, ServerDied when it exits while awaited or is not ready in time.
        """
        await self.close()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        notice_silence(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lost = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        self._socket.connect(self.address)
        try:
            async with asyncio.timeout(timeout_s):
                await self._call("hello", {"token": self.token}, timeout_s)
                return await self._call("health", {"wait": True}, timeout_s)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise ServerDied(f"env server {self.address} was not ready after {timeout_s:.0f} s") from None
            raise

    async def close(self) -> None:
        """Close the connection, after the server has confirmed what was cancelled."""
        if self._context is None:
            return
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=CANCEL_S)
        self._give_up("the client was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()  # first: an event that nobody can receive any more blocks zmq's thread for ever
        self._monitor.close(linger=0)
        self._socket.close(linger=1000)
        self._context.term()
        self._context = None

    async def __aenter__(self) -> EnvClient:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -------------------------------------------------------------------------------------------------------- methods

    async def health(self) -> dict[str, Any]:
        """Facts now, each by itself: alive; workers, max_workers, ready, loading, lagging (how many are late);
        restarts, restarts_left (of the slot that died most); sessions, waiting (requests); stats (replied, failed,
        cancelled since the start); loop_lag_ms {p50, p99, max} of the server's event loop in the last minute,
        worker_lag_ms (the worst); rss_bytes; arena {blocks, used_bytes, capacity_bytes}; pids."""
        return await self._call("health", {})

    async def info(self) -> dict[str, Any]:
        """name, env_id, split, arena (address), fields, demonstrates, scores_groups, max_concurrent, workers; origin
        and node: what `Handle.origin` says of its blocks, and the url they can be fetched from (None: nowhere)."""
        return await self._call("info", {})

    async def take_over(self, run: str) -> int:
        """End what clients before this one asked for under the tag `run`: how many episodes that were. Their blocks, as
        far as they are there, are nobody else's afterwards. The server ends a worker that does not let go of them,
        after its `serve.cleanup_timeout_s`."""
        return int((await self._call("take_over", {"run": run}))["ended"])

    async def tasks(self, split: str, start: int, n: int) -> list[Task]:
        """Tasks start .. start + n of a split; fewer only at the end of a finite set. TasksetError if it raised."""
        reply = await self._call("tasks", {"split": split, "start": start, "n": n})
        return [task_from_wire(task) for task in reply["tasks"]]

    async def run_rollout(
        self,
        task: Task,
        *,
        model: Mapping[str, Any],
        group_id: str,
        seed: int,
        keep: str,
        tag: str,
        shares: bool = False,
        on_delta: OnDelta | None = None,
    ) -> EpisodeResult:
        """One episode. Its own failure (its worker's death included) is a result with `error`, not an exception.

        Args:
            model: see `shmrl.env.model.ModelSpec`. keep: "train", "eval" (nothing is captured, messages come back) or
                "warmup" (demonstrations). tag: "run/source/group/episode", unique among the episodes that run.
            shares: the group's episodes have their prompt in common, stored once; whoever awaits them keeps what a
                sample's first segments refer to until the group's last reply is in.
            on_delta: called in the event loop with how the episode gets on, turn by turn; in an evaluation with its new
                messages.
        Raises ServerDied, TasksetError; ProtocolError for a value that cannot be sent.
        """
        payload = {
            "task": task_to_wire(task),
            "model": model,
            "group_id": group_id,
            "seed": seed,
            "keep": keep,
            "tag": tag,
            "shares": shares,
        }
        reply, nbytes = await self._exchange("run_rollout", payload, _of_episodes(on_delta))
        return episode_from_wire(_unless_fatal(reply), nbytes)

    async def run_group(
        self,
        task: Task,
        *,
        model: Mapping[str, Any],
        group_id: str,
        seeds: Sequence[int],
        keep: str,
        tag: str,
        on_delta: OnDelta | None = None,
    ) -> list[EpisodeResult]:
        """One episode per seed, scored together by the environment's `score_group`; tags are tag/0, tag/1, ...; a delta
        says of which `episode` it is."""
        payload = {"task": task_to_wire(task), "model": model, "group_id": group_id, "keep": keep, "tag": tag}
        payload["seeds"] = list(seeds)
        reply, nbytes = await self._exchange("run_group", payload, _of_episodes(on_delta))
        if not reply["success"]:
            return [episode_from_wire(_unless_fatal(reply), nbytes)] * len(seeds)
        return [episode_from_wire(episode, nbytes // len(seeds)) for episode in reply["episodes"]]

    async def evaluate(
        self,
        *,
        model: Mapping[str, Any],
        n: int,
        rollouts: int = 1,
        split: str = "eval",
        start: int = 0,
        concurrency: int = 64,
        seed: int = 0,
        tag: str = "",
        on_episode: Callable[[int, int, EpisodeResult], None] | None = None,
    ) -> list[list[EpisodeResult]]:
        """Tasks start .. start + n of a split (fewer at its end), `rollouts` episodes of each, `concurrency` at a time:
        one list per task. Nothing is captured, messages come back; an episode's own failure is a result with `error`.

        Args: tag: "run/source/group", a name of its own by default. on_episode: called in the event loop with (task,
        rollout, result) as each one ends. Raises TasksetError, ServerDied, EnvError (cancelled by somebody else).

        Example: results = await client.evaluate(model=model, n=5, rollouts=3)
        """
        found: dict[tuple[int, int], EpisodeResult] = {}

        def ended(delta: dict[str, Any]) -> None:
            at, raw = (delta["task"], delta["rollout"]), delta["reply"]
            found[at] = episode_from_wire(unpack(raw), len(raw))
            if on_episode is not None:
                on_episode(*at, found[at])

        asked = {"split": split, "start": start, "n": n, "rollouts": rollouts, "concurrency": concurrency}
        tag = tag or f"evaluation/{split}/{os.urandom(4).hex()}"
        reply, _ = await self._exchange("evaluate", {**asked, "model": model, "seed": seed, "tag": tag}, ended)
        if not reply["success"]:
            raise_error(reply)
        return [[found[task, rollout] for rollout in range(rollouts)] for task in range(reply["tasks"])]

    # ----------------------------------------------------------------------------------------------------- connection

    async def _call(self, method: str, payload: Mapping[str, Any], timeout_s: float = CALL_S) -> dict[str, Any]:
        """The reply of a request that succeeded; its error otherwise. ServerDied if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                reply, _ = await self._exchange(method, payload)
        except TimeoutError:
            silent = f"no answer to {method!r} within {timeout_s:g} s, though the connection is there"
            raise ServerDied(f"env server {self.address}: {silent}") from None
        if not reply["success"]:
            raise_error(reply)
        return reply

    async def _exchange(
        self,
        method: str,
        payload: Mapping[str, Any],
        on_delta: Callable[[dict[str, Any]], None] | None = None,
    ) -> tuple[dict[str, Any], int]:
        """(reply, its size in bytes). Cancellation is passed on to the server, which frees what the episode kept."""
        raw = await packed({**payload, "deltas": True} if on_delta else payload)
        if self._lost is not None:
            raise ServerDied(f"env server {self.address}: {self._lost}")
        self._count += 1
        number = self._count.to_bytes(8, "little")
        future = self._open[number] = asyncio.get_running_loop().create_future()
        if on_delta is not None:
            self._deltas[number] = on_delta
        try:
            await self._socket.send_multipart([number, method.encode(), raw])
            reply = await future
            decoded = await unpack_in_turns(reply)
        except asyncio.CancelledError:
            self._send_cancel(number, method, payload)
            raise
        finally:
            self._open.pop(number, None)
            self._deltas.pop(number, None)
        if not isinstance(decoded, dict) or "success" not in decoded:
            raise ProtocolError(f"env server {self.address}: a reply that is none: {reply[:64]!r}")
        return decoded, len(reply)

    def _send_cancel(self, number: bytes, method: str, payload: Mapping[str, Any]) -> None:
        if self._lost is not None or method not in ("run_rollout", "run_group", "evaluate"):
            return
        task = asyncio.ensure_future(self._exchange("cancel", {"request_id": number, "tag": payload["tag"]}))
        self._cancels.add(task)
        task.add_done_callback(self._cancel_sent)

    def _cancel_sent(self, task: asyncio.Task[Any]) -> None:
        self._cancels.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a cancel was not confirmed: %s", task.exception())  # the server is gone, and its arena swept

    async def _read(self) -> None:
        """Hands every reply to its future; replies that nobody awaits any more are dropped."""
        while True:
            await self._socket.poll()
            frames = await self._socket.recv_multipart()
            if len(frames) == 3 and frames[1] == b"delta":
                await self._tell(frames[0], frames[2])
                continue
            future = self._open.get(frames[0])
            if future is not None and not future.done() and len(frames) == 2:
                future.set_result(frames[1])

    async def _tell(self, number: bytes, raw: bytes) -> None:
        """Deltas for who asked for them. What a callback raises is its own affair: replies go on to be read."""
        if (on_delta := self._deltas.get(number)) is None:
            return
        try:
            on_delta(await unpack_in_turns(raw))
        except Exception:
            log.exception("the callback of a delta raised")

    async def _watch(self) -> None:
        """Waits for the connection's end (a server that is not there yet never had one), and for further ones."""
        while True:
            parse_monitor_message(await self._monitor.recv_multipart())
            await asyncio.sleep(DRAIN_S)
            self._give_up("the server exited, was silent for too long, or its connection broke")

    def _give_up(self, why: str) -> None:
        self._lost = why
        for future in self._open.values():
            if not future.done():
                future.set_exception(ServerDied(f"env server {self.address}: {why}"))


def _of_episodes(on_delta: OnDelta | None) -> Callable[[dict[str, Any]], None] | None:
    return None if on_delta is None else lambda raw: on_delta(delta_from_wire(raw))


def _unless_fatal(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply, unless it says that the server cannot go on."""
    if not reply["success"] and reply.get("error", {}).get("type") in (TasksetError.__name__, ServerDied.__name__):
        raise_error(reply)
    return reply
