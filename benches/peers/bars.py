"""The ratios that shmrl promises, each the median over rounds of a ratio within one round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benches.peers.runner import Turn

PLAIN, CHECKED, HOT = "shmrl", "shmrl, checksums", "shmrl, hot"
IN_PLACE, ENCODE, HTTP = "shmrl, in place", "shmrl, encode", "HTTP, http.client"

GROUPED = (IN_PLACE, HTTP)  # peers whose groups are timed

TIMES_SHMRL = {HTTP: 10, "HTTP, requests": 30, "Ray": 9, "TransferQueue": 30, "iceoryx2": 1.5, "SharedMemory": 9}
"""put + get of a peer over shmrl's, consumer behind, no checksums; with them at least three quarters of each."""

Round = dict[str, Turn]


@dataclass(frozen=True, slots=True)
class Bar:
    """Example: Bar("iceoryx2 / shmrl", 1.62, 1.5)"""

    what: str
    ratio: float
    at_least: float

    @property
    def held(self) -> bool:
        return self.ratio >= self.at_least


def ratio(rounds: Sequence[Round], above: str, below: str, value: Callable[[Turn], float]) -> float | None:
    """Median over rounds of above's value over below's; None where either did not take part."""
    ratios = [value(turns[above]) / value(turns[below]) for turns in rounds if above in turns and below in turns]
    return statistics.median(ratios) if ratios else None


def behind(turn: Turn) -> float:
    """put + get with the consumer behind, seconds."""
    return turn.behind.hand_over


def at_once(turn: Turn) -> float:
    """put + get + read in lockstep, seconds: what is left in the caches counts."""
    return turn.lockstep.total


def in_groups(turn: Turn) -> float:
    """put + get per blob of a group that is put, and then taken, at once, seconds."""
    return turn.group_s


HOW = {at_once: " in lockstep", in_groups: ", groups of 16"}


def of_blobs(rounds: Sequence[Round]) -> list[Bar]:
    """Every bar for one size."""
    wanted = [(peer, PLAIN, behind, bar) for peer, bar in TIMES_SHMRL.items()]
    wanted += [(peer, CHECKED, behind, 0.75 * bar) for peer, bar in TIMES_SHMRL.items()]
    wanted += [("iceoryx2", HOT, at_once, 1), (HTTP, IN_PLACE, in_groups, 1000), (HTTP, ENCODE, behind, 4)]
    return [
        Bar(f"{above} / {below}" + HOW.get(value, ""), found, bar)
        for above, below, value, bar in wanted
        if (found := ratio(rounds, above, below, value)) is not None
    ]


def of_rates(rounds: Sequence[dict[str, float]]) -> list[Bar]:
    """4 KiB blobs per second: shmrl's over a peer's."""
    found = []
    for peer, bar in (("iceoryx2", 5), ("Ray", 400)):
        ratios = [rates[PLAIN] / rates[peer] for rates in rounds if peer in rates and PLAIN in rates]
        if ratios:
            found.append(Bar(f"4 KiB put + get + free per second, shmrl / {peer}", statistics.median(ratios), bar))
    return found
