"""`shmrl arena ...`: plain values for --json, and their rendering for people. Called by the CLI."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shmrl.arena import inspect
from shmrl.arena.memory import human
from shmrl.errors import ConfigError, ForeignArena
from shmrl.types import Handle

_GROUPS = ("source", "step", "holder")


def ls() -> list[dict[str, Any]]:
    """Every arena of this uid: address, state, run_id, processes, counters."""
    return inspect.list_arenas()


def render_ls(rows: list[dict[str, Any]]) -> str:
    """A table, one line per arena."""
    if not rows:
        return f"no arenas of uid {os.geteuid()} in /dev/shm"
    lines = [("ADDRESS", "STATE", "RUN", "PROCESSES", "BLOCKS", "USED", "CAPACITY")]
    for row in rows:
        if "error" in row:
            lines.append((row["address"], row["state"], "", "", "", "", ""))
            continue
        used, capacity = human(row["used_bytes"]), human(row["capacity_bytes"])
        lines.append(
            (row["address"], row["state"], row["run_id"], str(row["processes"]), str(row["blocks"]), used, capacity)
        )
    return _table(lines)


def stats(address: str | None = None) -> list[dict[str, Any]]:
    """Counters of one arena, or of every live one; blocks and bytes by source, step and holder; who is attached.

    ForeignArena if the address is not on this host, ConfigError if it is no address.
    """
    return [_stats(inspect.open_readonly(one)) for one in _addresses(address)]


def _stats(seen: inspect.Snapshot) -> dict[str, Any]:
    attached = [
        {"pid": p.pid, "name": p.name, "alive": index in seen.alive} for index, p in sorted(seen.processes.items())
    ]
    groups = {f"by_{by}": seen.grouped(by) for by in _GROUPS}
    return {"address": seen.address, "run_id": seen.head["run_id"], **seen.stats, "attached": attached, **groups}


def render_stats(rows: list[dict[str, Any]]) -> str:
    """Counters, then one table per grouping, largest first."""
    return "\n\n".join(_render_one(row) for row in rows) if rows else "no live arenas"


def _render_one(row: dict[str, Any]) -> str:
    used, committed, capacity = (human(row[f"{key}_bytes"]) for key in ("used", "committed", "capacity"))
    lines = [
        f"{row['address']}  run {row['run_id']}",
        f"  {row['blocks']} blocks, {used} used (peak {human(row['peak_bytes'])}) of {committed} committed, "
        f"{capacity} capacity",
        f"  {row['created']} created, {row['freed']} freed, {row['orphaned']} orphaned, "
        f"{row['spilled']} spilled, {row['waits']} waits",
    ]
    lines += [f"  {'alive' if p['alive'] else 'DEAD '} {p['pid']:>8}  {p['name']}" for p in row["attached"]]
    for by in _GROUPS:
        groups = sorted(row[f"by_{by}"].items(), key=lambda item: -item[1]["bytes"])
        table = [(by.upper(), "BLOCKS", "BYTES"), *((k or "-", str(g["blocks"]), human(g["bytes"])) for k, g in groups)]
        lines += ["", _table(table)] if groups else []
    return "\n".join(lines)


def top(address: str | None = None, count: int = 10) -> list[dict[str, Any]]:
    """Who has the most bytes of one arena, or of every live one: by holder, source and step, and the largest blocks."""
    return [_top(inspect.open_readonly(one), count) for one in _addresses(address)]


def _top(seen: inspect.Snapshot, count: int) -> dict[str, Any]:
    groups = {by: sorted(seen.grouped(by).items(), key=lambda item: -item[1]["bytes"])[:count] for by in _GROUPS}
    largest = sorted(seen.rows(), key=lambda row: (-row["span_bytes"], -row["age_s"]))[:count]
    usage = {key: seen.stats[key] for key in ("blocks", "used_bytes", "committed_bytes", "capacity_bytes", "orphaned")}
    tables = {by: [{by: key, **group} for key, group in rows] for by, rows in groups.items()}
    return {"address": seen.address, "run_id": seen.head["run_id"], **usage, **tables, "largest": largest}


def render_top(rows: list[dict[str, Any]]) -> str:
    """Per arena: a line of totals, then the groups and the blocks with the most bytes."""
    return "\n\n".join(_render_top(row) for row in rows) if rows else "no live arenas"


def _render_top(row: dict[str, Any]) -> str:
    used, committed, capacity = (row[f"{key}_bytes"] for key in ("used", "committed", "capacity"))
    share = 100 * used / capacity
    lines = [
        f"{row['address']}  run {row['run_id']}  {human(used)} ({share:.1f}%) of {human(capacity)} used, "
        f"{human(committed)} committed, {row['blocks']} blocks, {row['orphaned']} orphans"
    ]
    for by in _GROUPS:
        cells = [(one[by] or "-", human(one["bytes"]), str(one["blocks"])) for one in row[by]]
        lines += ["", _table([(by.upper(), "BYTES", "BLOCKS"), *cells])] if cells else []
    blocks = [
        (one["tag"] or "-", human(one["span_bytes"]), one["state"], one["owner"] or "orphan", f"{one['age_s']:.1f} s")
        for one in row["largest"]
    ]
    lines += ["", _table([("LARGEST", "BYTES", "STATE", "OWNER", "AGE"), *blocks])] if blocks else []
    return "\n".join(lines)


def holders(handle: str, address: str | None = None) -> dict[str, Any]:
    """Who has the block of a handle: owner, readers, done set, last events. StaleHandle, ForeignArena, ConfigError."""
    try:
        return inspect.holders(Handle.parse(handle), address)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def render_holders(row: dict[str, Any]) -> str:
    """What is known of one block, one fact per line."""

    def life(name: str) -> str:
        return name if name in row["alive"] else f"{name}, DEAD"

    done = ", ".join(map(str, row["done"])) or "none"
    facts = (
        ("block", f"{row['slot']} generation {row['generation']} of {row['address']}"),
        ("state", " ".join([row["state"], *row["flags"]])),
        ("tag", row["tag"] or "-"),
        ("bytes", f"{row['nbytes']} ({human(row['span_bytes'])} of the arena)"),
        ("age", f"{row['age_s']:.1f} s"),
        ("owner", "nobody: an orphan" if row["owner"] is None else life(row["owner"])),
        ("read by", "; ".join(life(name) for name in row["held_by"]) or "nobody"),
        ("shipped to", f"{row['readers']} readers, step {row['step']}, done: {done}" if row["readers"] else "nobody"),
    )
    lines = [f"{name:<11} {value}" for name, value in facts]
    return "\n".join([*lines, *([""] if row["events"] else []), *(_event_line(one) for one in row["events"])])


def fsck(address: str | None = None) -> list[dict[str, Any]]:
    """Faults of one arena, or of every whole one of this uid: address, faults, totals_checked."""
    listed = [row["address"] for row in inspect.list_arenas() if "error" not in row]
    out = []
    for one in [address] if address else listed:
        faults, totals = inspect.fsck(one)
        out.append({"address": one, "faults": faults, "totals_checked": totals})
    return out


def render_fsck(rows: list[dict[str, Any]]) -> str:
    """ "clean", or every fault on a line of its own."""
    lines = []
    for row in rows:
        note = "" if row["totals_checked"] else " (too busy to add up the allocator's totals)"
        lines.append(f"{row['address']}: {len(row['faults']) or 'no'} faults{note}")
        lines += [f"  {fault}" for fault in row["faults"]]
    return "\n".join(lines) if lines else f"no arenas of uid {os.geteuid()} in /dev/shm"


def tail(address: str | None = None, first: int = 0) -> list[dict[str, Any]]:
    """The events that are kept of one arena, or of the only live one, from number `first` on. ForeignArena."""
    addresses = _addresses(address)
    if len(addresses) != 1:
        raise ForeignArena(f"{len(addresses)} live arenas: give the address of one (shmrl arena ls)")
    return inspect.events(addresses[0], first)


def follow(address: str | None = None) -> Iterator[dict[str, Any]]:
    """Events as they happen, for ever; ForeignArena when the arena is removed."""
    first = 0
    while True:
        for one in tail(address, first):
            first = one["number"] + 1
            yield one
        time.sleep(0.2)


def render_tail(rows: list[dict[str, Any]]) -> str:
    """A line per event, oldest first."""
    return "\n".join(_event_line(one) for one in rows)


def _event_line(one: dict[str, Any]) -> str:
    event, detail = one["event"], one["detail"]
    block = f"block {one['slot']} generation {one['generation']}"
    what = {
        "ship": f"{block} to {detail} readers",
        "done": f"{block} by reader {detail}",
        "adopt": f"{block} from process {detail}",
        "sweep": f"process {one['slot']}",
        "take over": f"the lock of process {one['slot']}",
        "full": f"no room for {human(detail)}",
    }.get(event, f"{block} {human(detail)}")
    when = f"{one['number']:>8}  -{one['age_s']:<9.3f}"
    return f"{when} {one['process']:<24} {event:<9} {what}  {one['tag']}".rstrip()


def _addresses(address: str | None) -> list[str]:
    return [address] if address else [row["address"] for row in inspect.list_arenas() if row["state"] == "alive"]


def gc() -> dict[str, Any]:
    """Removes dead arenas -> {"removed": addresses, "freed_bytes": what they had committed}."""
    before = {row["address"]: row.get("committed_bytes", 0) for row in inspect.list_arenas()}
    removed = inspect.gc()
    return {"removed": removed, "freed_bytes": sum(before.get(address, 0) for address in removed)}


def render_gc(result: dict[str, Any]) -> str:
    """What was removed."""
    lines = [f"removed {address}" for address in result["removed"]]
    return "\n".join([*lines, f"{len(lines)} dead arenas removed, {human(result['freed_bytes'])} freed"])


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
