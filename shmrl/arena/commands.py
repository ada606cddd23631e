"""`shmrl arena ls | stats | gc`: plain values for --json, and their rendering for people. Called by the CLI."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shmrl.arena import inspect
from shmrl.arena.memory import human
from shmrl.errors import ConfigError

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
        if row["state"] == "unfinished":
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
    addresses = [address] if address else [row["address"] for row in inspect.list_arenas() if row["state"] == "alive"]
    try:
        return [_stats(inspect.open_readonly(one)) for one in addresses]
    except ValueError as error:
        raise ConfigError(str(error)) from None


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
