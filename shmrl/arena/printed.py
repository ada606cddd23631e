"""Text in columns for what `shmrl arena ...` prints: as wide as it is, or as a terminal allows. Called by `render` and
`overview`, in the CLI.

Where a terminal is narrow, long cells lose their middle: a process keeps its pid and a tag its end, and numbers, which
are short, stay whole.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from shmrl.arena import table
from shmrl.arena.memory import human

Row = dict[str, Any]
NONE = "no live arenas (shmrl arena ls shows the dead too)"
SHORTEST = 10  # characters that a cell keeps
_ID = re.compile(r"[0-9a-f]{32}$")
READERS = 2  # of a block that are named
_SHARES: dict[bool, tuple[str, ...]] = {False: (), True: ("SHARE", "BORROWED")}


def columns(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table; `width` None: as wide as its cells."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = None if width is None else width - 2 * (len(widths) - 1)
    while room is not None and sum(widths) > room and max(widths) > SHORTEST:
        widths[widths.index(max(widths))] -= 1
    return "\n".join(
        "  ".join(elided(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def section(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int | None = None) -> list[str]:
    """A table below an empty line; nothing when there are no rows."""
    return ["", columns([heading, *rows], width)] if rows else []


def elided(text: str, width: int) -> str:
    """Example: elided("run/words/g7/3", 10) == "run/...7/3" """
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return text[: width - 3 - tail] + "..." + text[len(text) - tail :]


def wrapped(line: str, width: int | None) -> str:
    """A line of words, over as many lines as it takes."""
    if width is None:
        return line
    return "\n".join(textwrap.wrap(line, max(20, width), subsequent_indent="    ", break_on_hyphens=False))


def short(addresses: Iterable[str]) -> dict[str, str]:
    """The first digits of each arena's id, as many as tell all of them apart: the commands take them as addresses."""
    given = list(addresses)
    ids = {address: found[0] for address in given if (found := _ID.findall(address))}
    length = next(n for n in range(8, 33) if n == 32 or len({one[:n] for one in ids.values()}) == len(ids))
    return {address: ids[address][:length] if address in ids else address for address in given}


def shares_heading(shared: bool) -> tuple[str, ...]:
    """Of a table by source, in an arena with shares."""
    return _SHARES[shared]


def shares(group: Row, shared: bool) -> tuple[str, ...]:
    """The cells of a row by source, in a table of an arena with shares."""
    return tuple(human(group[key]) if key in group else "" for key in ("share", "borrowed")) if shared else ()


def state(row: Row) -> str:
    """Of a block, with its flags."""
    return " ".join([row["state"], *row["flags"]])


def unswept(row: Row) -> str:
    """What the dead have in an arena. Example: "40 blocks of the dead (42.5 MiB), not swept yet" """
    return f"{row['unswept']} blocks of the dead ({human(row['unswept_bytes'])}), not swept yet"


def age(seconds: float) -> str:
    """Example: age(672.0) == "11.2 min" """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def held_by(row: Row) -> str:
    """Whoever keeps a block in the arena: its readers, and its owner unless that is done with it."""
    return among(table.keepers(row)) or "nobody"


def among(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - READERS} more" if len(names) > READERS else ""
    return ", ".join(map(table.plain, names[:READERS])) + more
