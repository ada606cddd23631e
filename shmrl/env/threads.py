"""Work of threads, awaited on an event loop: what cannot be stopped, so that who is cancelled waits for its end; and
what is too long for a turn of the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from shmrl.wire import pack

Result = TypeVar("Result")
BESIDE = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads for one kind of work beside an event loop: more would keep the loops of this machine from its cores."""
_turns = ThreadPoolExecutor(BESIDE, "turns")
SWITCH_S = 0.001
"""How long an event loop waits for the interpreter while a thread has it: Python's own 5 ms, several threads in a row,
are what a loop is late by."""
LIGHT = 64 << 10
"""Bytes of text, and a few for every other value, that are packed at once."""


async def to_the_end(work: asyncio.Future[Result], give_up: Callable[[], object] | None = None) -> Result:
    """Its result. A cancelled task calls `give_up`, waits until the work has ended, however often it is cancelled
    meanwhile, and raises CancelledError then; what the work raised was asked for."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if give_up is not None:
            give_up()
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


def put_the_loop_first() -> None:
    """Once what stays has been loaded, in a process whose event loop has threads beside it: they give way soon, and
    what is there is not looked through for garbage again and again, all threads waiting meanwhile."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


async def in_turn(work: Callable[..., Result], *args: Any) -> Result:
    """Python's work of an episode, by few threads: each of them would take the interpreter from the loop."""
    return await asyncio.get_running_loop().run_in_executor(_turns, work, *args)


async def packed(value: Any) -> bytes:
    """`wire.pack`, by a thread where there is much of it."""
    return await in_turn(pack, value) if _is_heavy(value) else pack(value)


def _is_heavy(value: Any) -> bool:
    """Looks at no more than it takes to know."""
    weight, rest = 0, [value]
    while rest and weight < LIGHT:
        item = rest.pop()
        if isinstance(item, (str, bytes)):
            weight += len(item)
        elif isinstance(item, Mapping):
            rest += item.values()
        elif isinstance(item, (list, tuple)):
            rest += item
        weight += 16
    return weight >= LIGHT
