"""What `shmrl arena top` prints: where to look first, then who has the bytes; and a view that redraws. For the CLI.

On a terminal what does not fit is left out from the end, so the arena that somebody waits in comes first, addresses are
as short as tells them apart, and words are wrapped. Into a pipe goes all of it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from shmrl.arena import printed, readers, table
from shmrl.arena.memory import human
from shmrl.arena.printed import Row, age


def top(rows: list[Row], width: int | None = None, height: int | None = None) -> str:
    """One line per arena if there are several, the worst first; then of each totals, suspects, the groups with the most
    bytes, the largest and the oldest blocks. width, height: of a terminal."""
    if not rows:
        return printed.NONE
    rows = sorted(rows, key=_trouble)
    addresses = [row["address"] for row in rows]
    names = dict(zip(addresses, addresses, strict=True)) if width is None else printed.short(addresses)
    told = [printed.columns(_summary(rows, names, height), width)] if len(rows) > 1 else []
    return "\n\n".join(told + [_detail(row, names, width) for row in rows])


def _trouble(row: Row) -> tuple[float, ...]:
    """Sorts the worst first: where somebody waits, the longest; then by suspects; then the fullest."""
    return (-row["oldest_wait_s"], not row["suspects"]["blocks"], -row["used_bytes"] / row["capacity_bytes"])


def _summary(rows: list[Row], names: dict[str, str], height: int | None) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("ARENA", "USED", "OF", "WAITING", "SUSPECTS", "RUN")]
    room = len(rows) if height is None else max(2, height // 2 - 2)
    for row in rows[:room]:
        waiting = f"{row['waiting']} for {age(row['oldest_wait_s'])}" if row["waiting"] else "-"
        used = f"{100 * row['used_bytes'] / row['capacity_bytes']:.1f}%"
        suspects = human(row["suspects"]["bytes"]) if row["suspects"]["blocks"] else "-"
        run, address = table.plain(row["run_id"]), names[row["address"]]
        lines.append((address, used, human(row["capacity_bytes"]), waiting, suspects, run))
    return lines + ([(f"{len(rows) - room} more", *[""] * 5)] if len(rows) > room else [])


def _detail(row: Row, names: dict[str, str], width: int | None) -> str:
    words = [_head(row, names), *_waiting(row), *_stopped(row), f"  memory: {_most(row)}"]
    if row["state"] != "dead":
        words.append(f"  leaks: {_verdict(row)}")
    if kept := row["kept"]["blocks"]:
        size = human(row["kept"]["bytes"])
        words.append(f"  kept: {kept} blocks of old steps, {size}: every rank is done, arena.retain_steps")
    return "\n".join([*(printed.wrapped(line, width) for line in words), *_tables(row, width)])


def _head(row: Row, names: dict[str, str]) -> str:
    used, committed, capacity = (row[f"{key}_bytes"] for key in ("used", "committed", "capacity"))
    step = "" if row["newest_step"] is None else f", step {row['newest_step']}"
    spilled = f", {row['spilled']} spilled ({human(row['spilled_bytes'])})" if row["spilled"] else ""
    facts = (
        f"{names[row['address']]}  run {table.plain(row['run_id'])}  {human(used)} ({100 * used / capacity:.1f}%) of "
        f"{human(capacity)} used, {human(committed)} committed, {row['blocks']} blocks, {row['orphaned']} orphans"
        f"{spilled}{step}"
    )
    if row["state"] != "dead":
        return facts
    held = human(committed)
    return f"DEAD, holds {held}: no process is attached, `shmrl arena gc` removes it; as it was left:\n{facts}"


def _waiting(row: Row) -> list[str]:
    if not row["waiting"]:
        return []
    named = [
        f"{table.plain(one['process'])} for {age(one['waits_s'])}"
        + ("" if one["wants_bytes"] is None else f", wants {human(one['wants_bytes'])}")
        for one in row["waiters"]
    ]
    more = f" and {row['waiting'] - len(named)} more" if row["waiting"] > len(named) else ""
    return [f"  waiting for space: {'; '.join(named)}{more}"]


def _stopped(row: Row) -> list[str]:
    """Who goes on with nothing until SIGCONT."""
    return [f"  STOPPED: {', '.join(map(table.plain, row['stopped']))}"] if row["stopped"] else []


def _most(row: Row) -> str:
    """Who has the most of it, by source and by holder."""
    if not row["used_bytes"]:
        return "nothing is in it"
    largest = ((by, row[by][0]) for by in ("source", "holder") if row[by])
    shares = [f"{by} {table.label(by, one[by])} {100 * one['bytes'] / row['used_bytes']:.0f}%" for by, one in largest]
    return f"most is of {', and of '.join(shares)}"


def _verdict(row: Row) -> str:
    """What may leak; while somebody waits also who keeps most of what it waits for."""
    suspects = row["suspects"]
    blind = row["blocks"] and row["newest_step"] is None
    note = "; no block has a step, so whether one is old for its step cannot be judged" if blind else ""
    if suspects["blocks"]:
        shown = len(suspects["rows"])
        which = "below" if shown == suspects["blocks"] else f"below the oldest {shown}"
        told = f"{suspects['blocks']} blocks are suspects, {human(suspects['bytes'])}: {which}, with why"
        return told + (f"; {_keeper(row)}" if row["waiting"] else "")
    if row["waiting"]:
        return f"none by rule, but somebody waits: {_keeper(row)}{note}"
    young = "" if blind else ", and none is old for its step"
    return f"none suspected: every block has a living owner{young}{note}"


def _keeper(row: Row) -> str:
    """Example: "leak.py (16205) keeps 100% of what is used, the oldest of its blocks for 11.0 min" """
    if (one := row["keeper"]) is None or not row["used_bytes"]:
        return "nobody keeps anything now"
    share = 100 * one["bytes"] / row["used_bytes"]
    return (
        f"{table.plain(one['process'])} keeps {share:.0f}% of what is used, the oldest of its blocks for "
        f"{age(one['oldest_s'])}"
    )


def _tables(row: Row, width: int | None) -> list[str]:
    suspects: Row = {"blocks": 0, "rows": []} if row["state"] == "dead" else row["suspects"]
    lines = printed.section(
        (f"SUSPECTS ({suspects['blocks']})", "BYTES", "AGE", "HELD BY", "WHY"),
        [(*_sized(one), age(one["age_s"]), printed.held_by(one), "; ".join(_why(one))) for one in suspects["rows"]],
        width,
    )
    for by in table.BY:
        shared = any("share" in one for one in row[by])
        groups = [
            (table.label(by, one[by]), human(one["bytes"]), str(one["blocks"]), *printed.shares(one, shared))
            for one in row[by]
        ]
        lines += printed.section((by.upper(), "BYTES", "BLOCKS", *printed.shares_heading(shared)), groups, width)
    for which in ("largest", "oldest"):
        found = [(*_sized(one), printed.state(one), printed.held_by(one), age(one["age_s"])) for one in row[which]]
        lines += printed.section((which.upper(), "BYTES", "STATE", "HELD BY", "AGE"), found, width)
    return lines


def _why(row: Row) -> list[str]:
    return [*row["why"], *([f"waits for {readers.told(row['missing'])}"] if row["missing"]["count"] else [])]


def _sized(row: Row) -> tuple[str, str]:
    name = row["tag"] or f"block {row['slot']} generation {row['generation']}"
    return table.plain(name), human(row["span_bytes"] or row["nbytes"])


def live(frame: Callable[[int, int], str], period_s: float = 1.0) -> None:
    """Redraws a frame, of a width and a height, on the terminal until Ctrl-C; one that takes long comes less often."""
    while True:
        began = time.monotonic()
        width, height = shutil.get_terminal_size()
        sys.stdout.write("\x1b[H\x1b[J" + screen(frame(width, height), width, height) + "\n")
        sys.stdout.flush()
        time.sleep(max(period_s, 4 * (time.monotonic() - began)))


def screen(text: str, width: int, height: int) -> str:
    """What fits on a terminal, less the line for the cursor; the last line says how many do not."""
    lines = [line[:width] for line in text.splitlines()]
    if (left := len(lines) - (height - 2)) > 1:
        lines[height - 2 :] = [f"... {left} more lines: a taller terminal, or `shmrl arena top ADDRESS | less`"[:width]]
    return "\n".join(lines)
