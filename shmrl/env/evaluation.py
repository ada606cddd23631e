"""The method `evaluate`: tasks of a split, each played several times, in one request.

In the env-server process. The server asks its own pool, a bounded number of episodes at a time, and tells each one that
ended as a delta, undecoded: neither the reply nor what the event loop touches grows with the number of episodes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from shmrl.env.pool import Pool, Request
from shmrl.env.protocol import MAX_TASKS, error_reply, expect, raise_error
from shmrl.env.threads import packed
from shmrl.errors import ProtocolError
from shmrl.types import ErrorInfo
from shmrl.wire import pack, unpack_in_turns


class Evaluation:
    """One request. payload: split, start, n, rollouts, concurrency, model, seed, tag (see `protocol.py`)."""

    def __init__(self, pool: Pool, payload: Mapping[str, Any], tell: Callable[[bytes], None]) -> None:
        expect(payload, "evaluate", split=str, start=int, n=int, rollouts=int, concurrency=int, model=dict, seed=int)
        for key in ("n", "rollouts", "concurrency"):
            if payload[key] < 1:
                raise ProtocolError(f"evaluate: {key} = {payload[key]}: at least 1")
        self.tag = str(payload["tag"])
        self._pool, self._payload, self._tell = pool, payload, tell
        self._open: set[Request] = set()
        self._cancelled = False

    async def run(self) -> bytes:
        """The reply, after the last episode's delta. TasksetError if there are no tasks."""
        tasks = await self._tasks()
        places = asyncio.Semaphore(self._payload["concurrency"])
        async with asyncio.TaskGroup() as group:
            for index, task in enumerate(tasks):
                for rollout in range(self._payload["rollouts"]):
                    await places.acquire()
                    group.create_task(self._play(places, index, task, rollout))
        if self._cancelled:
            return error_reply(ErrorInfo("Cancelled", "the evaluation was cancelled"))
        return pack({"success": True, "tasks": len(tasks), "rollouts": self._payload["rollouts"]})

    def cancel(self) -> bool:
        """End all its episodes; False if it was cancelled before."""
        before, self._cancelled = self._cancelled, True
        for request in list(self._open):
            self._pool.cancel(request)
        return not before

    async def _tasks(self) -> list[Any]:
        """As the worker put them on the wire."""
        found: list[Any] = []
        while len(found) < (n := self._payload["n"]) and not self._cancelled:
            page = {
                "split": self._payload["split"],
                "start": self._payload["start"] + len(found),
                "n": min(MAX_TASKS, n - len(found)),
            }
            reply = await unpack_in_turns(await self._ask("tasks", page, ""))
            if not reply["success"]:
                raise_error(reply)
            if not reply["tasks"]:
                break
            found += reply["tasks"]
        return found

    async def _play(self, places: asyncio.Semaphore, index: int, task: list[Any], rollout: int) -> None:
        try:
            if self._cancelled:
                return
            tag = f"{self.tag}/{index * self._payload['rollouts'] + rollout}"
            which = f"{self._payload['seed']}/{self._payload['start'] + index}/{rollout}"
            seed = int.from_bytes(hashlib.blake2s(which.encode(), digest_size=4).digest(), "little") >> 1
            asked = {"task": task, "model": self._payload["model"], "seed": seed, "keep": "eval", "tag": tag}
            reply = await self._ask("run_rollout", asked, tag)
            self._tell(pack({"task": index, "rollout": rollout, "reply": reply}))
        finally:
            places.release()

    async def _ask(self, method: str, payload: dict[str, Any], tag: str) -> bytes:
        request = self._pool.submit(method, await packed(payload), tag)
        self._open.add(request)
        try:
            return await request.reply
        finally:
            self._open.discard(request)
