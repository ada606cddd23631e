"""Shares of an arena, as words: rows of statistics by source, and why a source was refused. csrc/arena_share.c decides.

Called by `Arena` in attached processes and by the inspectors of living and dead arenas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shmrl.arena.memory import human

Row = dict[str, int]


class Share(NamedTuple):
    """What a source can count on, and what it uses, in bytes. source "": all that have no share of their own.

    Example: Share("math", 4 << 30, 5 << 30) borrows 1 GiB.
    """

    source: str
    guaranteed: int
    used: int

    @property
    def borrowed(self) -> int:
        """Bytes beyond the guarantee."""
        return max(0, self.used - self.guaranteed)

    @property
    def name(self) -> str:
        """For people."""
        return f"source {self.source}" if self.source else "the sources without a share"


def annotated(rows: dict[str, Row], guarantees: Iterable[tuple[str, int, int]]) -> dict[str, Row]:
    """Rows by source, each with "share" and "borrowed" bytes of its share; as they are where there are no shares.

    A named source has a row also while it has no block. Sources without a name have one share together: each of their
    rows shows all of it. The bytes of `rows` count, not the shares' own counters, so that a row is of one moment.
    """
    shares = [Share(*share) for share in guarantees]
    if not shares:
        return rows
    named = {share.source: share for share in shares[1:]}
    rest = sum(row["bytes"] for source, row in rows.items() if source not in named)
    out = {}
    for source in {**rows, **named}:
        row = rows.get(source, {"blocks": 0, "bytes": 0})
        share = named.get(source, shares[0])._replace(used=row["bytes"] if source in named else rest)
        out[source] = {**row, "share": share.guaranteed, "borrowed": share.borrowed}
    return out


def refusal(guarantees: Iterable[tuple[str, int, int]], index: int, kept: int) -> str:
    """What share `index` has and what the others keep from it: part of ArenaFull's message."""
    shares = [Share(*share) for share in guarantees]
    mine = shares[index]
    others = [share for share in shares if share is not mine and share.used < share.guaranteed]
    names = ", ".join(share.name.removeprefix("source ") for share in others)
    return (
        f"{mine.name} has used {human(mine.used)} of its share {human(mine.guaranteed)} and borrows "
        f"{human(mine.borrowed)}; {human(kept)} are kept for {names or 'nobody'}"
    )
