"""Awaiting many at once, in the orchestrator: all or the first error, and who is still missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


async def together(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """All results in order; at the first error the others are cancelled and it is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def reach(
    peers: Mapping[str, Coroutine[Any, Any, object]],
    remind_s: float = 10.0,
    awaits: Callable[[Mapping[str, Any]], None] = lambda missing: None,
) -> None:
    """Await all of these peers' greetings, like `together`; a log line says now and then who is still missing.
    awaits: gets those at the start, as what shrinks."""
    missing = dict.fromkeys(peers)
    awaits(missing)

    async def greet(name: str, greeting: Coroutine[Any, Any, object]) -> None:
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
