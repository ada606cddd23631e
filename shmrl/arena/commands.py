"""`shmrl arena ...`: plain values, which --json prints and `render` turns into text. Called by the CLI.

An address is what `arena ls` prints, or a directory with arenas of backing "file"; without one a command takes every
live arena of this uid, or the only one. The first eight digits of an arena's id are an address, too, if no
other's begins so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from shmrl.arena import inspect, table
from shmrl.arena.inspect import Filter
from shmrl.errors import ArenaError, ConfigError, ForeignArena
from shmrl.types import Handle

GROUPS = ("source", "step", "holder")  # of stats, unless one is asked for

LEFT = ("orphaned", "orphaned_bytes", "unswept", "unswept_bytes")  # what the dead left, in a living arena


def ls(address: str | None = None) -> list[dict[str, Any]]:
    """Every arena of this uid: address, state, run_id, age_s, directory, processes, counters; "error" for them where it
    cannot be read."""
    return inspect.list_arenas(address)


def blocks(
    address: str | None, wanted: Filter, order: str | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """The blocks of one arena as Arena.ls() has them, one at a time; owner_dead: the owner died, and nobody swept yet.
    order: size, age or tag, else by slot.

    ConfigError for a state or order that does not exist, ForeignArena.
    """
    if order is not None and order not in inspect.ORDERS:
        raise ConfigError(f"sort {order!r}: {', '.join(inspect.ORDERS)}")
    with inspect.look(only(address)) as seen:
        gone = seen.gone
        for row in seen.rows(wanted, order, limit):
            yield {**row, "owner_dead": row["owner"] in gone}


def stats(address: str | None = None, by: str | None = None) -> list[dict[str, Any]]:
    """Counters; unswept, unswept_bytes: blocks of the dead that nobody swept yet, so that they are no orphans;
    by_<key>: {name: {"blocks", "bytes"}}, whose bytes sum to used_bytes; who is attached.

    by: one of table.BY, else source, step and holder; with shares, rows by source have "share" and "borrowed" too.
    ForeignArena, ConfigError.
    """
    if by is not None and by not in table.BY:
        raise ConfigError(f"by {by!r}: {', '.join(table.BY)}")
    return [_stats(one, (by,) if by else GROUPS) for one in _addresses(address)]


def _stats(address: str, groups: tuple[str, ...]) -> dict[str, Any]:
    with inspect.look(address, fields="field" in groups) as seen:
        counters, counted = seen.counts(*groups)
        counters |= seen.unswept()
        attached = [
            {"pid": p.pid, "name": p.name, "alive": index in seen.alive, "stopped": seen.is_stopped(index)}
            for index, p in sorted(seen.processes.items())
        ]
        named = {f"by_{by}": counted[by] for by in groups}
        return {"address": seen.address, "run_id": seen.head["run_id"], **counters, "attached": attached, **named}


def top(address: str | None = None, count: int = 10) -> list[dict[str, Any]]:
    """Who has the bytes: per arena by holder, source, step, age and field; the largest and oldest blocks; suspects.

    state: alive or dead. waiting, oldest_wait_s: processes that wait for space; waiters: {"process", "waits_s",
    "wants_bytes"} of the first ones; then keeper: {"process", "bytes", "oldest_s"} of who keeps most, else None.
    stopped: names of processes that run nothing (SIGSTOP). kept: {"blocks", "bytes"} of old steps that the run retains.
    Each table has the `count` largest groups and the rest as one, so that its bytes sum to used_bytes. suspects:
    {"blocks", "bytes", "rows"}: what may leak, in all, and the oldest of it, each with "why"
    and with the readers that are "missing", as of holders().
    """
    return [_top(one, count) for one in _addresses(address)]


def _top(address: str, count: int) -> dict[str, Any]:
    with inspect.look(address, fields=True) as seen:
        counters, counted = seen.counts(*table.BY)
        newest = max((int(step) for step in counted["step"] if step), default=None)
        suspects = seen.suspects(newest, count)
        found = zip(suspects.rows, seen.missing(suspects.rows), strict=True)
        rows = [{**row, "missing": missing} for row, missing in found]
        waiting = seen.waiting()
        keeper = seen.keeper() if waiting else None
        return {
            "address": seen.address,
            "run_id": seen.head["run_id"],
            "state": "alive" if seen.is_live() else "dead",
            **counters,
            "waiting": len(waiting),
            "oldest_wait_s": waiting[0].waits_s if waiting else 0.0,
            "waiters": [one._asdict() for one in waiting[:count]],
            "keeper": keeper._asdict() if keeper else None,
            "stopped": [seen.names.process(index) for index in sorted(seen.alive) if seen.is_stopped(index)],
            "newest_step": newest,
            **{by: largest(by, counted[by], count) for by in table.BY},
            "largest": list(seen.rows(Filter(), "size", count)),
            "oldest": list(seen.rows(Filter(), "age", count)),
            "suspects": {"blocks": suspects.blocks, "bytes": suspects.nbytes, "rows": rows},
            "kept": {"blocks": suspects.kept, "bytes": suspects.kept_bytes},
        }


def largest(by: str, groups: dict[str, dict[str, int]], count: int) -> list[dict[str, Any]]:
    """[{by: name, "blocks", "bytes"}], most bytes first; what does not fit into `count` rows is the last row."""
    rows = sorted(groups.items(), key=lambda item: -item[1]["bytes"])
    out: list[dict[str, Any]] = [{by: name, **group} for name, group in rows[:count]]
    if rest := rows[count:]:
        total = {key: sum(group[key] for _, group in rest) for key in ("blocks", "bytes")}
        out.append({by: f"({len(rest)} others)", **total})
    return out


def holders(handle: str, address: str | None = None) -> dict[str, Any]:
    """Who has the block of a handle: owner, readers, done set, last events. StaleHandle, ForeignArena, ConfigError."""
    try:
        parsed = Handle.parse(handle)
    except ValueError as error:
        raise ConfigError(f"{error}; the handle comes first, then the address") from None
    return inspect.holders(parsed, address)


def fsck(address: str | None = None) -> list[dict[str, Any]]:
    """Faults of one arena, or of every whole one: address, faults, totals_checked."""
    one_of_them = address is not None and not inspect.is_directory(address)
    listed = [one.address for one in inspect.where(address)]
    return [row for one in listed if (row := _fsck(one, required=one_of_them)) is not None]


def _fsck(address: str, required: bool) -> dict[str, Any] | None:
    try:
        with inspect.look(address) as seen:
            faults, totals = seen.fsck()
    except ArenaError:  # of all arenas: not one yet, another version's, or gone meanwhile
        if required:
            raise
        return None
    return {"address": address, "faults": faults, "totals_checked": totals}


def tail(address: str | None = None, first: int = 0) -> list[dict[str, Any]]:
    """The events that are kept of one arena, from number `first` on. ForeignArena."""
    with inspect.look(only(address)) as seen:
        return seen.events(first)


def follow(address: str | None = None) -> Iterator[dict[str, Any]]:
    """Events as they happen, for ever; ForeignArena when the arena is removed."""
    address, first = only(address), 0
    while True:
        for one in tail(address, first):
            first = one["number"] + 1
            yield one
        time.sleep(0.2)


def gc(address: str | None = None) -> dict[str, Any]:
    """Removes dead arenas -> {"removed": addresses, "freed_bytes": what they had committed, "left": orphans of living
    ones, which are theirs, and blocks of the dead to be swept: [{"address", "orphaned", "orphaned_bytes", "unswept",
    "unswept_bytes"}]}."""
    before = {row["address"]: row for row in inspect.list_arenas(address)}
    removed = inspect.gc(address)
    living = [row for row in before.values() if row["address"] not in removed and row["state"] == "alive"]
    left = [row for row in living if row["orphaned"] or row["unswept"]]
    return {
        "removed": removed,
        "freed_bytes": sum(before[one].get("committed_bytes", 0) for one in removed if one in before),
        "left": [{key: row[key] for key in ("address", *LEFT)} for row in left],
    }


def only(address: str | None) -> str:
    """The address of one arena: the given one, or the only live one. ForeignArena names those there are."""
    if address is not None and not inspect.is_directory(address):
        return address
    found = _alive(address)
    if not found:
        raise ForeignArena(f"no live arena of uid {os.geteuid()} (shmrl arena ls shows the dead too)")
    if len(found) > 1:
        there = ", ".join(f"{row['address']} (run {table.plain(row['run_id'])})" for row in found)
        raise ForeignArena(f"{len(found)} live arenas, give the address of one: {there}")
    return str(found[0]["address"])


def _addresses(address: str | None) -> list[str]:
    if address is not None and not inspect.is_directory(address):
        return [address]
    return [row["address"] for row in _alive(address)]


def _alive(directory: str | None) -> list[dict[str, Any]]:
    return [row for row in inspect.list_arenas(directory) if row["state"] == "alive"]
