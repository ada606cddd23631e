"""`Keeper`: what ended episodes leave in the arena, stored by a few threads of an env worker.

All of an episode's branches are stored or none. What they begin with is stored once: by the request that has several
branches, or (`lasting`) by the first of a group's episodes, each a request of its own, for those that follow.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shmrl.arena import Arena
from shmrl.arena.waiting import giving_up
from shmrl.env.groups import prompt_tag
from shmrl.env.link import Link
from shmrl.env.model import Model
from shmrl.env.threads import BESIDE, to_the_end
from shmrl.payload import SharedRows, encode, sample_from_wire, sample_to_wire
from shmrl.payload.sharing import Opening
from shmrl.types import Sample
from shmrl.wire import pack, unpack

Found = TypeVar("Found")
ENCODERS = BESIDE
"""Threads that encode. More would only queue for the two things they share, memory bandwidth and space in the arena."""


class Keeper:
    """Of one worker. `limits`: how `encode` waits for space."""

    def __init__(self, arena: Arena, link: Link, limits: Mapping[str, Any]) -> None:
        self._arena, self._link, self._limits = arena, link, limits
        self._threads = ThreadPoolExecutor(ENCODERS, "encode")
        self._asked: dict[int, asyncio.Future[bytes]] = {}

    def close(self) -> None:
        """Wait for what is being stored."""
        self._threads.shutdown()

    async def shared(self, models: Sequence[Model], tag: str) -> SharedRows:
        """What the branches of one request have in common, found in a thread: routing is compared byte for byte."""
        if sum(len(model.conversations) for model in models) < 2:
            return SharedRows(self._arena, tag, {})
        return await self._run(lambda: SharedRows(self._arena, tag, _openings(models)))

    async def shared_by_group(self, model: Model, tag: str, number: int) -> SharedRows:
        """What the branches of an episode have in common with each other and with what its siblings have stored.

        The server answers when there is something, or to the one that is to store it. `told` ends this.
        """
        openings = await self._run(lambda: _openings([model]))
        if not any(opening.is_worth_a_block for opening in openings.values()):
            return await self.shared([model], tag)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._link.send(number, "ask", b"")
        try:
            earlier = [sample_from_wire(wire) for wire in unpack(await answer)]
        finally:
            del self._asked[number]
        return await self._run(lambda: SharedRows(self._arena, prompt_tag(tag), openings, earlier, lasting=True))

    def answered(self, number: int, payload: bytes) -> None:
        """The server's answer to the request's question, unless it was cancelled meanwhile."""
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(payload)

    def tell(self, number: int, shared: SharedRows, samples: Sequence[Sample]) -> None:
        """Tell the server, before the reply, what this episode stored for its siblings and what it refers to."""
        used = {bytes(handle) for sample in samples for handle, _, _ in sample.segments[:-1]}
        self._link.send(number, "tell", pack([[sample_to_wire(sample) for sample in shared.stored], sorted(used)]))

    async def store(self, model: Model, meta: dict[str, Any], tag: str, shared: SharedRows) -> tuple[Sample, ...]:
        """Encode in a thread; a cancelled episode waits for it, so that its failure is told after its last block."""
        wanted = threading.Event()
        wanted.set()
        job = self._threads.submit(self._store, model, meta, tag, shared, wanted)

        def give_up() -> None:
            wanted.clear()  # if it waits for space, others need that more
            job.cancel()  # one that has not begun never does: those before it may wait for space

        return await to_the_end(asyncio.wrap_future(job), give_up)

    def _store(
        self, model: Model, meta: dict[str, Any], tag: str, shared: SharedRows, wanted: threading.Event
    ) -> tuple[Sample, ...]:
        """All branches or none: if one does not validate or finds no space, its siblings' own blocks are freed."""
        samples: list[Sample] = []
        try:
            with giving_up(wanted):
                for index, branch in enumerate(model.branches(meta)):
                    prefix = shared.prefix((model, index), **self._limits)
                    samples.append(encode(self._arena, branch, tag, prefix, **self._limits))
        except BaseException:
            self._arena.free([sample.segments[-1][0] for sample in samples])
            raise
        return tuple(samples)

    async def _run(self, find: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._threads, find)


def _openings(models: Sequence[Model]) -> dict[Hashable, Opening]:
    return dict(pair for model in models for pair in model.openings().items())
