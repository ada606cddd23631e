"""Where the positions of a micro batch go: from the packed row that was assembled to the rows that the model is fed.

`whole` feeds every token: a right-padded row per sequence, or the packed row where attention keeps sequences apart.
`part` feeds one context-parallel rank's share. Pure index arithmetic, for `inputs` and `step` in a trainer rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import RunError
from shmrl.payload import TokenRange

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """P positions read, rows x columns of them fed.

    Attributes:
        index: [rows, columns], the read position at each place; -1 where there is none.
        sequence: [P], whose position it is. starts: those at which a sequence begins.
        before: [P], how many fed tokens come before; the last of them predicts the position.
        routed: [P], fed, and its sequence goes on: a route was recorded for it.
        positions: [rows, columns] within the sequence, or None where columns are.
        foreign: read positions that another rank predicts and scores.
        ranges: what to assemble, or None for everything.
        visible: [columns, keys], what each column of the only row may attend to; None: causal, as the model does it.
    """

    index: Ints
    sequence: Ints
    starts: Ints
    before: Ints
    routed: Bools
    positions: Ints | None = None
    foreign: Ints | None = None
    ranges: list[TokenRange] | None = None
    visible: Bools | None = None

    def predictors(self, positions: Ints) -> Ints:
        """Flat index of the hidden state that predicts each of these read positions: the one before it."""
        first = np.flatnonzero(np.isin(positions, self.starts))
        if first.size:
            raise RunError(
                f"sequence {self.sequence[positions[first[0]]]} has loss on its first token, which nothing predicts"
            )
        return self.before[positions] - 1

    def spread(self, values: NDArray[Any], fill: int) -> NDArray[Any]:
        """Rows of read `values` where they are fed, [rows, columns, ...]."""
        out = np.full((*self.index.shape, *values.shape[1:]), fill, values.dtype)
        there = self.index >= 0
        out[there] = values[self.index[there]]
        return out


def whole(seq_lens: Sequence[int], packed: bool = False) -> Fold:
    """Every token of these sequences."""
    lens = np.asarray(seq_lens, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lens)])[:-1]
    sequence = np.repeat(np.arange(len(lens)), lens)
    at = np.arange(len(sequence))
    column = at - starts[sequence]
    routed = column < lens[sequence] - 1
    if packed:
        return Fold(at[None], sequence, starts, at, routed, positions=column[None])
    columns = np.arange(int(lens.max()))
    index = np.where(columns < lens[:, None], starts[:, None] + columns, -1)
    return Fold(index, sequence, starts, sequence * len(columns) + column, routed)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a sequence: fed by one rank, which also reads and scores those in [start + 1, end)."""

    sequence: int
    start: int
    stop: int
    end: int


def chunks(seq_lens: Sequence[int], size: int, rank: int) -> list[Chunk]:
    """What one of `size` ranks feeds: of 2 x size chunks of each sequence one from the front, one from the back.

    So causal attention costs every rank the same. Chunks that touch are one.

    Example: chunks([8], 2, 0) -> [Chunk(0, 0, 2, 3), Chunk(0, 6, 8, 8)]
    """
    found = []
    for sequence, length in enumerate(seq_lens):
        edges = [index * length // (2 * size) for index in range(2 * size + 1)]
        parts = [(edges[at], edges[at + 1]) for at in (rank, 2 * size - 1 - rank)]
        if rank == size - 1:
            parts = [(parts[0][0], parts[1][1])]
        found += [Chunk(sequence, a, b, min(b + 1, length)) for a, b in parts if a < b]
    return found


def part(seq_lens: Sequence[int], size: int, rank: int) -> Fold:
    """One context-parallel rank's share as one row, padded to the longest of its group.

    `visible` is [columns, size * columns]: keys lie in order of rank. Padding sees padding alone.
    """
    shares = [chunks(seq_lens, size, other) for other in range(size)]
    columns = max(sum(c.stop - c.start for c in share) for share in shares)
    mine = shares[rank]
    lengths = [c.end - c.start for c in mine]
    sequence = np.repeat(np.array([c.sequence for c in mine], np.int64), lengths)
    place = _joined(np.arange(c.start, c.end) for c in mine)
    fed = place < np.repeat(np.array([c.stop for c in mine], np.int64), lengths)
    first = place == np.repeat(np.array([c.start for c in mine], np.int64), lengths)
    index = np.full((1, columns), -1)
    index[0, : int(fed.sum())] = np.flatnonzero(fed)
    keys = [_keys(share, columns) for share in shares]
    sequences, places = (np.concatenate(arrays) for arrays in zip(*keys, strict=True))
    return Fold(
        index,
        sequence,
        starts=np.flatnonzero(first & (place == 0)),
        before=np.cumsum(fed) - fed,
        routed=fed & (place < np.asarray(seq_lens)[sequence] - 1),
        positions=keys[rank][1][None],
        foreign=np.flatnonzero(first & (place > 0)),
        ranges=[(c.sequence, c.start, c.end) for c in mine],
        visible=(keys[rank][0][:, None] == sequences) & (keys[rank][1][:, None] >= places),
    )


def _keys(share: list[Chunk], columns: int) -> tuple[Ints, Ints]:
    """(sequence, position within it) of every column; -1 and 0 on padding."""
    lengths = [c.stop - c.start for c in share]
    sequence = np.repeat(np.array([c.sequence for c in share], np.int64), lengths)
    padding = columns - len(sequence)
    place = _joined(np.arange(c.start, c.stop) for c in share)
    return np.pad(sequence, (0, padding), constant_values=-1), np.pad(place, (0, padding))


def _joined(arrays: Any) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
