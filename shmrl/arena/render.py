"""What `shmrl arena ...` prints for people: `commands`' values as text, without colours, and a view that redraws.

Called by the CLI. Tables are as wide as what is in them; the live view alone cuts to the terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from shmrl.arena import table
from shmrl.arena.memory import human

Row = dict[str, Any]
ROWS = 20  # of one table of stats
_SHARES: dict[bool, tuple[str, ...]] = {False: (), True: ("SHARE", "BORROWED")}
_BLOCK = "{:>10}  {:<24} {:>6} {:>9}  {:<28} {:<44} {}"


def ls(rows: list[Row]) -> str:
    """A table, one line per arena; why, below, for those that could not be read."""
    if not rows:
        return f"no arenas of uid {os.geteuid()} in /dev/shm or open in a process"
    lines = [("ADDRESS", "STATE", "RUN", "PROCESSES", "BLOCKS", "USED", "CAPACITY", "SPILLED")]
    for row in rows:
        if "error" in row:
            lines.append((row["address"], row["state"], "", "", "", "", "", ""))
            continue
        sizes = (human(row[f"{key}_bytes"]) for key in ("used", "capacity", "spilled"))
        counts = (str(row["processes"]), str(row["blocks"]))
        lines.append((row["address"], row["state"], _plain(row["run_id"]), *counts, *sizes))
    return "\n".join([_table(lines), *(f"  {row['error']}" for row in rows if "error" in row)])


def blocks(rows: Iterable[Row], limit: int | None) -> Iterator[str]:
    """A heading and a line per block, as they come; a note if there are more than `limit`."""
    rows = iter(rows)
    first = list(islice(rows, 1))  # an error comes before the heading
    yield _BLOCK.format("BYTES", "STATE", "STEP", "AGE", "OWNER", "TAG", "HANDLE")
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
        _state(row),
        step,
        _age(row["age_s"]),
        _plain(row["owner"] or "orphan"),
        _plain(row["tag"] or "-"),
        row["handle"],
    )


def stats(rows: list[Row]) -> str:
    """Counters, who is attached, then one table per grouping, largest first."""
    return "\n\n".join(_stats(row) for row in rows) if rows else "no live arenas"


def _stats(row: Row) -> str:
    used, committed, capacity = (human(row[f"{key}_bytes"]) for key in ("used", "committed", "capacity"))
    lines = [
        f"{row['address']}  run {_plain(row['run_id'])}",
        f"  {row['blocks']} blocks, {used} used (peak {human(row['peak_bytes'])}) of {committed} committed, "
        f"{capacity} capacity",
        f"  {row['created']} created, {row['freed']} freed, {row['orphaned']} orphaned "
        f"({human(row['orphaned_bytes'])}), {row['spilled']} spilled ({human(row['spilled_bytes'])}), "
        f"{row['waits']} waits",
    ]
    lines += [f"  {_life(p):<7} {p['pid']:>8}  {_plain(p['name'])}" for p in row["attached"]]
    for by in table.BY:
        groups = sorted(row.get(f"by_{by}", {}).items(), key=lambda item: -item[1]["bytes"])
        shared = any("share" in group for _, group in groups)
        cells = [
            (_plain(name or "-"), str(group["blocks"]), human(group["bytes"]), *_shares(group, shared))
            for name, group in groups[:ROWS]
        ]
        lines += _section((by.upper(), "BLOCKS", "BYTES", *_SHARES[shared]), cells)
        lines += [f"... and {len(groups) - ROWS} more (--json has them all)"] if len(groups) > ROWS else []
    return "\n".join(lines)


def top(rows: list[Row]) -> str:
    """Per arena: totals, suspects, the groups with the most bytes, the largest and the oldest blocks."""
    return "\n\n".join(_top(row) for row in rows) if rows else "no live arenas"


def _top(row: Row) -> str:
    used, committed, capacity = (row[f"{key}_bytes"] for key in ("used", "committed", "capacity"))
    step = "" if row["newest_step"] is None else f", step {row['newest_step']}"
    spilled = f", {row['spilled']} spilled ({human(row['spilled_bytes'])})" if row["spilled"] else ""
    lines = [
        f"{row['address']}  run {_plain(row['run_id'])}  {human(used)} ({100 * used / capacity:.1f}%) of "
        f"{human(capacity)} used, {human(committed)} committed, {row['blocks']} blocks, {row['orphaned']} orphans"
        f"{spilled}{step}"
    ]
    if row["waiting"]:
        lines.append(f"  {row['waiting']} processes wait for space, the first for {_age(row['oldest_wait_s'])}")
    suspects = row["suspects"]
    lines += _section(
        (f"SUSPECTS ({suspects['blocks']})", "BYTES", "AGE", "WHY"),
        [(*_sized(one), _age(one["age_s"]), "; ".join(one["why"])) for one in suspects["rows"]],
    )
    for by in table.BY:
        shared = any("share" in one for one in row[by])
        groups = [
            (_plain(one[by] or "-"), human(one["bytes"]), str(one["blocks"]), *_shares(one, shared)) for one in row[by]
        ]
        lines += _section((by.upper(), "BYTES", "BLOCKS", *_SHARES[shared]), groups)
    for which in ("largest", "oldest"):
        found = [
            (*_sized(one), _state(one), _plain(one["owner"] or "orphan"), _age(one["age_s"])) for one in row[which]
        ]
        lines += _section((which.upper(), "BYTES", "STATE", "OWNER", "AGE"), found)
    return "\n".join(lines)


def _shares(group: Row, shared: bool) -> tuple[str, ...]:
    """The cells of a row by source, in a table of an arena with shares."""
    return tuple(human(group[key]) if key in group else "" for key in ("share", "borrowed")) if shared else ()


def _section(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table below an empty line; nothing when there are no rows."""
    return ["", _table([heading, *rows])] if rows else []


def _sized(row: Row) -> tuple[str, str]:
    name = row["tag"] or f"block {row['slot']} generation {row['generation']}"
    return _plain(name), human(row["span_bytes"] or row["nbytes"])


def live(frame: Callable[[], str], period_s: float = 1.0) -> None:
    """Redraws a frame on the terminal until Ctrl-C; a frame that takes long comes less often."""
    while True:
        began = time.monotonic()
        width, height = shutil.get_terminal_size()
        lines = [line[:width] for line in frame().splitlines()[: height - 1]]
        sys.stdout.write("\x1b[H\x1b[J" + "\n".join(lines) + "\n")
        sys.stdout.flush()
        time.sleep(max(period_s, 4 * (time.monotonic() - began)))


def holders(row: Row) -> str:
    """What is known of one block, one fact per line."""

    def life(name: str) -> str:
        return _plain(name) + ("" if name in row["alive"] else ", DEAD")

    done = ", ".join(map(str, row["done"])) or "none"
    where = "in a file" if "spilled" in row["flags"] else f"{human(row['span_bytes'])} of the arena"
    facts = (
        ("block", f"{row['slot']} generation {row['generation']} of {row['address']}"),
        ("state", _state(row)),
        ("tag", _plain(row["tag"] or "-")),
        ("bytes", f"{row['nbytes']} ({where})"),
        ("age", _age(row["age_s"])),
        ("owner", "nobody: an orphan" if row["owner"] is None else life(row["owner"])),
        ("read by", "; ".join(life(name) for name in row["held_by"]) or "nobody"),
        ("shipped to", f"{row['readers']} readers, step {row['step']}, done: {done}" if row["readers"] else "nobody"),
    )
    lines = [f"{name:<11} {value}" for name, value in facts]
    return "\n".join([*lines, *([""] if row["events"] else []), *(event(one) for one in row["events"])])


def leak(row: Row) -> str:
    """One line about a block that should be gone: whose it is, who has it, and who has yet to finish with it.

    Example: "run/words/g7/3: 64.2 KiB, sealed, owner orchestrator (812), read by nobody, step 5: done 0 of 3 readers"
    """
    held = ", ".join(map(_plain, row["held_by"])) or "nobody"
    facts = [human(row["nbytes"]), _state(row), f"owner {_plain(row['owner'] or 'orphan')}", f"read by {held}"]
    if row["readers"]:
        done = ", ".join(map(str, row["done"])) or "none"
        facts.append(f"step {row['step']}: done {done} of {row['readers']} readers")
    return f"{_plain(row['tag'] or '-')}: {', '.join(facts)}"


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
    return f"{when} {_plain(one['process']):<24} {name:<9} {what}  {_plain(one['tag'])}".rstrip()


def gc(result: Row) -> str:
    """What was removed, and what only the living can."""
    lines = [f"removed {address}" for address in result["removed"]]
    lines.append(f"{len(lines)} dead arenas removed, {human(result['freed_bytes'])} freed")
    lines += [
        f"left {row['address']}, which lives, with {row['orphaned']} orphans ({human(row['orphaned_bytes'])}): "
        "a process attached to it frees them by discard(tag), or by adopt() and free(); orphan_ttl_s does so by itself"
        for row in result["left"]
    ]
    return "\n".join(lines)


def _life(process: Row) -> str:
    return "STOPPED" if process["stopped"] else "alive" if process["alive"] else "DEAD"


def _plain(text: str) -> str:
    """What some process called itself or its block, on one line and harmless to a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _state(row: Row) -> str:
    return " ".join([row["state"], *row["flags"]])


def _age(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
