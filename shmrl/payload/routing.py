"""`Routing`: stitches the routed experts of one branch over turns, aborts, resumes and prefill/decode pairs.

Used by the env worker's `BranchBuilder`, or by an embedder directly. An engine returns rows for tokens it forwarded:
the last token of a turn has none, and the next turn's answer has it, because it was fed there. Rows that are covered
are never
overwritten: after a weight update a newer snapshot's prefix is not what the old tokens were sampled under.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmrl.errors import PayloadError
from shmrl.payload.checks import check_ids, numbers
from shmrl.payload.registry import narrow_dtype


@dataclass(frozen=True, slots=True)
class _Segment:
    rows: NDArray[Any]
    start: int | None
    valid: tuple[int, int] | None


class Routing:
    """Collects segments; `finish(T)` gives the rows of T tokens.

    Example (two turns, 7 and 11 tokens):
        >>> routing = Routing(num_experts=8, layers=[0, 1])
        >>> routing.add(first, start=0)      # 6 rows: the 7th token was never fed
        >>> routing.add(second, start=0)     # 10 rows: only rows 6..9 are taken
        >>> routing.finish(11).shape
        (10, 2, 2)
    """

    def __init__(self, num_experts: int, layers: Sequence[int]) -> None:
        self.num_experts, self.layers = num_experts, tuple(int(layer) for layer in layers)
        self._segments: list[_Segment] = []

    def __bool__(self) -> bool:
        """Whether anything was captured."""
        return bool(self._segments)

    def add(self, rows: ArrayLike, start: int | None = None, *, valid: tuple[int, int] | None = None) -> None:
        """Adds rows [n, L, K] of token positions start .. start + n; earlier segments win where they overlap.

        start=None: the engine did not say; `finish` accepts the one reading (a snapshot from 0, or an append) that
        gives the expected number of rows. valid: only these token positions of the segment count (a decode server that
        never forwarded the prompt returns junk there).
        """
        array = numbers(rows, "routing", "iu")
        if array.ndim != 3 or array.shape[1] != len(self.layers):
            raise PayloadError.of(
                "routing", f"rows of shape {array.shape}, expected [n, {len(self.layers)}, K]", value=array.shape
            )
        if self._segments and array.shape[2] != self._segments[0].rows.shape[2]:
            raise PayloadError.of(
                "routing",
                f"top-{array.shape[2]} rows after top-{self._segments[0].rows.shape[2]} ones",
                value=array.shape,
            )
        if start is not None and start < 0:
            raise PayloadError.of("routing", f"a segment cannot start at {start}", start)
        self._segments.append(_Segment(array, start, valid))

    def finish(self, T: int) -> NDArray[Any]:
        """Rows [R, L, K] in the narrowest dtype, R = T - 1 or T; PayloadError for gap, surplus or ambiguity."""
        starts = self._resolve(T)
        k = self._segments[0].rows.shape[2] if self._segments else 0
        out = np.zeros((T, len(self.layers), k), narrow_dtype(self.num_experts))
        covered = np.zeros(T, np.bool_)
        for segment, start in zip(self._segments, starts, strict=True):
            self._place(out, covered, segment, start)
        R = T if covered.all() else T - 1
        if not covered[:R].all():
            missing = int(np.argmin(covered))
            raise PayloadError.of(
                "routing",
                f"{int(covered.sum())} rows for {T} tokens, the first missing one is token {missing}; only "
                "the last token may be without",
                missing,
                value=int(covered.sum()),
            )
        return out[:R]

    def _place(self, out: NDArray[Any], covered: NDArray[np.bool_], segment: _Segment, start: int) -> None:
        low, high = start, start + len(segment.rows)
        if segment.valid is not None:
            low, high = max(low, segment.valid[0]), min(high, segment.valid[1])
        if high > len(covered):
            raise PayloadError.of(
                "routing", f"rows up to token {high} for {len(covered)} tokens", len(covered), value=high
            )
        for first, last in _gaps(covered, low, high):
            rows = segment.rows[first - start : last - start]
            check_ids("routing", rows, self.num_experts, first)
            out[first:last] = rows
        covered[low:high] = True

    def _resolve(self, T: int) -> list[int]:
        """The start of every segment; for those that do not say, the one reading that ends at T - 1 or T rows."""
        if all(segment.start is not None for segment in self._segments):
            return [segment.start for segment in self._segments if segment.start is not None]
        readings: dict[int, list[list[int]]] = {0: [[]]}  # covered end -> the distinct choices of starts that reach it
        for segment in self._segments:
            reached: dict[int, list[list[int]]] = {}
            for end, choices in readings.items():
                for start in sorted({0, end} if segment.start is None else {segment.start}):
                    new_end = max(end, start + len(segment.rows))
                    if new_end <= T:
                        reached.setdefault(new_end, []).extend([*choice, start] for choice in choices[:2])
            readings = reached
        fitting = [choice for end in (T - 1, T) for choice in readings.get(end, [])]
        if len(fitting) != 1:
            sizes = [len(segment.rows) for segment in self._segments]
            raise PayloadError.of(
                "routing",
                f"segments of {sizes} rows without a start have {len(fitting)} readings that give {T - 1} or "
                f"{T} rows; state where each starts",
                value=sizes,
            )
        return fitting[0]


def _gaps(covered: NDArray[np.bool_], low: int, high: int) -> list[tuple[int, int]]:
    """The uncovered ranges within [low, high)."""
    if high <= low:
        return []
    edges = np.flatnonzero(np.diff(np.concatenate(([True], covered[low:high], [True])).astype(np.int8)))
    return [(low + int(first), low + int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]
