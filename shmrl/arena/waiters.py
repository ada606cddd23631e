"""Who waits for space in an arena, and who keeps most of it: what an operator asks of one that is full.

Called by `inspect` over a mapped ctl, without its lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shmrl.arena import table

if TYPE_CHECKING:
    from shmrl.arena._ctl import Ctl

FULL = 11  # csrc/arena_layout.h: SRL_DID_FILL
REFUSED_NS = 1_000_000_000  # a process waits within this time after it was refused


class Waiter(NamedTuple):
    """A living process that waits for space: since when, and for how many bytes, if the event of it is still kept.

    Example: Waiter("orchestrator (812)", 672.0, 5 << 20)
    """

    process: str
    waits_s: float
    wants_bytes: int | None


class Keeper(NamedTuple):
    """A process with its part of used_bytes, and for how long it has had the oldest of its blocks."""

    process: str
    bytes: int
    oldest_s: float


def waiting(ctl: Ctl, living: dict[int, table.Process], names: table.Names) -> list[Waiter]:
    """Of the living, the first of them first."""
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    since = sorted((one.waits_since_ns, index) for index, one in living.items() if one.waits_since_ns)
    refused = [event for event in ctl.events(0) if event[1] == FULL] if since else []
    return [Waiter(names.process(index), max(0, now - at) / 1e9, _wanted(refused, index, at)) for at, index in since]


def _wanted(refused: Sequence[tuple[int, ...]], process: int, since_ns: int) -> int | None:
    """What a process that waits since then was refused just before."""
    found = (one[-1] for one in reversed(refused) if one[2] == process and 0 <= since_ns - one[3] < REFUSED_NS)
    return next(found, None)


def keeper(ctl: Ctl, names: table.Names) -> Keeper | None:
    """Who keeps most of it; None of an empty arena."""
    held = ctl.count("holder")[1]["holder"]
    if not held:
        return None
    index, (_, nbytes) = max(held.items(), key=lambda item: item[1][1])
    births, slots = ctl.select("age", processes=None if index is None else 1 << index)
    name = table.ORPHAN if index is None else names.process(index)
    rows = ctl.rows(names, [slot for _, slot in sorted(zip(births, slots, strict=True))])
    return Keeper(name, nbytes, next((row["age_s"] for row in rows if table.keepers(row)[:1] == [name]), 0.0))
