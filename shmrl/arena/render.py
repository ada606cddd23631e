"""What `shmrl arena ...` prints for people: `commands`' values as text, without colours; `overview` has `top`.

Called by the CLI. Tables are as wide as what is in them, but for the list of arenas on a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from shmrl.arena import printed, readers, table
from shmrl.arena.memory import human

Row = dict[str, Any]
ROWS = 20  # of one table of stats
SWEEP = "whoever attaches or waits for space sweeps, and what was sealed is an orphan then"
_BLOCK = "{:>10}  {:<24} {:>6} {:>9}  {:<28} {:<28} {:<44} {}"


def ls(rows: list[Row], width: int | None = None) -> str:
    """A table, one line per arena; why, below, for those that could not be read. width: of a terminal."""
    if not rows:
        return f"no arenas of uid {os.geteuid()} in /dev/shm or open in a process"
    addresses = [row["address"] for row in rows]
    text = printed.columns(_arenas(rows, addresses))
    if width is not None and max(map(len, text.splitlines())) > width:
        text = printed.columns(_arenas(rows, printed.short(addresses).values()), width)
    return "\n".join([text, *(f"  {row['error']}" for row in rows if "error" in row), *_may_go(rows)])


def _arenas(rows: list[Row], addresses: Iterable[str]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    lines.append(("ADDRESS", "STATE", "AGE", "RUN", "PROCESSES", "BLOCKS", "USED", "CAPACITY", "SPILLED", "DIRECTORY"))
    for row, address in zip(rows, addresses, strict=True):
        if "error" in row:
            lines.append((address, row["state"], *[""] * 8))
            continue
        old = "-" if row["age_s"] is None else printed.age(row["age_s"])
        sizes = (human(row[f"{key}_bytes"]) for key in ("used", "capacity", "spilled"))
        counts = (str(row["processes"]), str(row["blocks"]))
        directory = table.plain(row["directory"] or "-")
        lines.append((address, row["state"], old, table.plain(row["run_id"]), *counts, *sizes, directory))
    return lines


def _may_go(rows: list[Row]) -> list[str]:
    """What of these arenas may be deleted, and what keeps blocks that nobody alive owns."""
    dead = [row for row in rows if row["state"] == "dead"]
    living = [row for row in rows if row["state"] == "alive"]
    notes = []
    if dead:
        held = human(sum(row.get("committed_bytes", 0) for row in dead))
        notes.append(f"{len(dead)} dead, holding {held}: no process is attached, `shmrl arena gc` removes them")
    notes += [
        f"{row['address']} lives and keeps {row['orphaned']} orphans ({human(row['orphaned_bytes'])}), blocks of the "
        "dead: its processes may still adopt them, and orphan_ttl_s frees them"
        for row in living
        if row["orphaned"]
    ]
    notes += [f"{row['address']} lives and keeps {printed.unswept(row)}: {SWEEP}" for row in living if row["unswept"]]
    if not notes and len(living) == len(rows):
        notes.append("all of them live: each goes with its run; nothing is to be deleted")
    return ["", *notes] if notes else []


def blocks(rows: Iterable[Row], limit: int | None) -> Iterator[str]:
    """A heading and a line per block, as they come; a note if there are more than `limit`."""
    rows = iter(rows)
    first = list(islice(rows, 1))  # an error comes before the heading
    yield _BLOCK.format("BYTES", "STATE", "STEP", "AGE", "OWNER", "READ BY", "TAG", "HANDLE")
    for n, row in enumerate(chain(first, rows)):
        if n == limit:
            yield f"... and more: --limit {2 * n}, or --source, --step, --holder, --state"
            return
        yield _block(row)


def _block(row: Row) -> str:
    step = "-" if row["step"] is None else str(row["step"])
    nbytes = human(row["span_bytes"] or row["nbytes"])
    return _BLOCK.format(
        nbytes,
        printed.state(row),
        step,
        printed.age(row["age_s"]),
        table.plain(row["owner"] or "orphan") + (", DEAD" if row.get("owner_dead") else ""),
        printed.among(row["held_by"]) or "-",
        table.plain(row["tag"] or "-"),
        row["handle"],
    )


def stats(rows: list[Row]) -> str:
    """Counters, who is attached, then one table per grouping, largest first."""
    return "\n\n".join(_stats(row) for row in rows) if rows else printed.NONE


def _stats(row: Row) -> str:
    used, committed, capacity = (human(row[f"{key}_bytes"]) for key in ("used", "committed", "capacity"))
    lines = [
        f"{row['address']}  run {table.plain(row['run_id'])}",
        f"  {row['blocks']} blocks, {used} used (peak {human(row['peak_bytes'])}) of {committed} committed, "
        f"{capacity} capacity",
        f"  {row['created']} created, {row['freed']} freed, {row['orphaned']} orphaned "
        f"({human(row['orphaned_bytes'])}), {row['spilled']} spilled ({human(row['spilled_bytes'])}), "
        f"{row['waits']} waits",
    ]
    lines += [f"  {printed.unswept(row)}"] if row["unswept"] else []
    lines += [f"  {_life(p):<7} {p['pid']:>8}  {table.plain(p['name'])}" for p in row["attached"]]
    for by in table.BY:
        groups = sorted(row.get(f"by_{by}", {}).items(), key=lambda item: -item[1]["bytes"])
        shared = any("share" in group for _, group in groups)
        cells = [
            (table.label(by, name), str(group["blocks"]), human(group["bytes"]), *printed.shares(group, shared))
            for name, group in groups[:ROWS]
        ]
        lines += printed.section((by.upper(), "BLOCKS", "BYTES", *printed.shares_heading(shared)), cells)
        lines += [f"... and {len(groups) - ROWS} more (--json has them all)"] if len(groups) > ROWS else []
    return "\n".join(lines)


def holders(row: Row) -> str:
    """What is known of one block, one fact per line."""

    def life(name: str) -> str:
        return table.plain(name) + ("" if name in row["alive"] else ", DEAD")

    where = "in a file" if "spilled" in row["flags"] else f"{human(row['span_bytes'])} of the arena"
    facts = (
        (
            "block",
            f"{row['slot']} generation {row['generation']} of {row['address']} (run {table.plain(row['run_id'])})",
        ),
        ("state", printed.state(row)),
        ("tag", table.plain(row["tag"] or "-")),
        ("bytes", f"{row['nbytes']} ({where})"),
        ("age", printed.age(row["age_s"])),
        ("owner", "nobody: an orphan" if row["owner"] is None else life(row["owner"])),
        ("read by", "; ".join(life(name) for name in row["held_by"]) or "nobody"),
        ("shipped to", _shipped(row)),
    )
    lines = [f"{name:<11} {value}" for name, value in facts]
    return "\n".join([*lines, *([""] if row["events"] else []), *(event(one) for one in row["events"])])


def _shipped(row: Row) -> str:
    """Example: "2 readers, step 7, done: reader 0, missing: reader 1 = trainer:1 (812)" """
    if not row["readers"]:
        return "nobody"
    done = ", ".join(f"reader {index}" for index in row["done"]) or "none"
    missing = f", missing: {readers.told(row['missing'], row['alive'])}" if row["missing"]["count"] else ""
    return f"{row['readers']} readers, step {row['step']}, done: {done}{missing}"


def leak(row: Row) -> str:
    """One line about a block that should be gone: whose it is, who has it, and who has yet to finish with it.

    Example: "run/words/g7/3: 64.2 KiB, sealed, owner orchestrator (812), read by nobody, step 5: done 0 of 3 readers"
    """
    held = ", ".join(map(table.plain, row["held_by"])) or "nobody"
    facts = [
        human(row["nbytes"]),
        printed.state(row),
        f"owner {table.plain(row['owner'] or 'orphan')}",
        f"read by {held}",
    ]
    if row["readers"]:
        done = ", ".join(map(str, row["done"])) or "none"
        facts.append(f"step {row['step']}: done {done} of {row['readers']} readers")
    return f"{table.plain(row['tag'] or '-')}: {', '.join(facts)}"


def fsck(rows: list[Row]) -> str:
    """How many faults, and every one on a line of its own."""
    lines = []
    for row in rows:
        note = "" if row["totals_checked"] else " (too busy to add up the allocator's totals)"
        lines.append(f"{row['address']}: {len(row['faults']) or 'no'} faults{note}")
        lines += [f"  {fault}" for fault in row["faults"]]
    return "\n".join(lines) if lines else f"no arenas of uid {os.geteuid()} in /dev/shm or open in a process"


def event(one: Row) -> str:
    """One event on a line."""
    name, detail = one["event"], one["detail"]
    block = f"block {one['slot']} generation {one['generation']}"
    what = {
        "ship": f"{block} to {detail} readers",
        "done": f"{block} by reader {detail}",
        "adopt": f"{block} from process {detail}",
        "sweep": f"process {one['slot']}",
        "take over": f"the lock of process {one['slot']}",
        "full": f"no room for {human(detail)}",
    }.get(name, f"{block} {human(detail)}")
    when = f"{one['number']:>8}  -{one['age_s']:<9.3f}"
    return f"{when} {table.plain(one['process']):<24} {name:<9} {what}  {table.plain(one['tag'])}".rstrip()


def gc(result: Row) -> str:
    """What was removed, and what only the living can."""
    lines = [f"removed {address}" for address in result["removed"]]
    lines.append(f"{len(lines)} dead arenas removed, {human(result['freed_bytes'])} freed")
    lines += [
        f"left {row['address']}, which lives, with {row['orphaned']} orphans ({human(row['orphaned_bytes'])}): "
        "a process attached to it frees them by discard(tag), or by adopt() and free(); orphan_ttl_s does so by itself"
        for row in result["left"]
        if row["orphaned"]
    ]
    lines += [
        f"left {row['address']}, which lives, with {printed.unswept(row)}: {SWEEP}"
        for row in result["left"]
        if row["unswept"]
    ]
    return "\n".join(lines)


def _life(process: Row) -> str:
    return "STOPPED" if process["stopped"] else "alive" if process["alive"] else "DEAD"
