"""`Routing`: stitches the routed experts of one branch over turns, aborts, resumes and prefill/decode pairs.

Used by the env worker's `BranchBuilder`, or by an embedder directly. An engine returns rows for tokens it forwarded:
the last token of a turn has none, and the next turn's answer has it, because it was fed there. Rows that are covered
are never overwritten: after a weight update a newer snapshot's prefix is not what the old tokens were sampled under.
Nothing is copied here: `Stitched` knows where every row is, and `encode` has them written into the block.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmrl.arena.columns import rows_per_crc
from shmrl.errors import PayloadError
from shmrl.payload import _payload
from shmrl.payload.checks import check_ids, numbers, type_code
from shmrl.payload.forms import Encoded, not_base64
from shmrl.payload.registry import narrow_dtype


@dataclass(frozen=True, slots=True)
class _Segment:
    rows: NDArray[Any] | Encoded
    start: int | None
    valid: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows for tokens first .. last: those of `rows` from `offset` on."""

    first: int
    last: int
    rows: NDArray[Any] | Encoded
    offset: int


class Stitched:
    """The rows [R, L, K] of one branch, lying where they came from until `fill` writes them, checked and narrowed.

    numpy takes it for the array that it stands for. Attributes: shape, dtype, num_experts.
    """

    def __init__(self, pieces: Sequence[_Piece], shape: tuple[int, int, int], num_experts: int) -> None:
        self._pieces, self.shape, self.num_experts = pieces, shape, num_experts
        self.dtype = narrow_dtype(num_experts)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        out = np.empty(self.shape, self.dtype)
        self.fill(out)
        return out if dtype is None else out.astype(dtype)

    def first(self, n: int) -> Stitched:
        """The first n of the rows."""
        return Stitched(self._pieces, (n, *self.shape[1:]), self.num_experts)

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """A copy of rows start .. stop. PayloadError as in `fill`."""
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self.fill(out, start)
        return out

    def fill(self, target: NDArray[Any], start: int = 0) -> NDArray[np.uint32]:
        """Rows start .. start + len(target) into `target`, C-contiguous, of this type; their checksums, as the arena
        has them of a column that is `target`.

        PayloadError for base64 that is none, and for ids that the model does not have or that repeat in their row.
        """
        step = rows_per_crc(max(1, target.dtype.itemsize * target.shape[1] * target.shape[2]))
        crcs = np.zeros(-(-len(target) // step), np.uint32)
        for piece in self._pieces:
            low, high = max(piece.first, start), min(piece.last, start + len(target))
            if low < high:
                self._write(piece, low, target[low - start : high - start], low - start, crcs, step)
        return crcs

    def _write(
        self, piece: _Piece, low: int, target: NDArray[Any], at: int, crcs: NDArray[np.uint32], step: int
    ) -> None:
        """Rows of a piece from token `low` on into `target`, which is at row `at` of its column."""
        offset = piece.offset + low - piece.first
        rows = piece.rows
        if isinstance(rows, Encoded) and not rows.dtype.isnative:
            rows, offset = numbers(rows.rows(offset, offset + len(target)), "routing", "iu"), 0
        source, skip = (rows.text, rows.skip) if isinstance(rows, Encoded) else (np.ascontiguousarray(rows), 0)
        code, where = _payload.store_rows(
            source, skip, type_code(rows.dtype), rows.shape, self.num_experts, offset, target, target.itemsize, at,
            crcs, step,
        )  # fmt: skip
        if code == -errno.EINVAL:
            assert isinstance(rows, Encoded)
            raise not_base64(rows.text, where)
        if code:
            row = where // (rows.shape[1] * rows.shape[2])
            bad = slice(offset + row, offset + row + 1)
            check_ids("routing", rows.rows(bad.start, bad.stop) if isinstance(rows, Encoded) else rows[bad],
                      self.num_experts, low + row)  # fmt: skip


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

    def add(self, rows: ArrayLike | Encoded, start: int | None = None, *, valid: tuple[int, int] | None = None) -> None:
        """Adds rows [n, L, K] of token positions start .. start + n; earlier segments win where they overlap.

        start=None: the engine did not say; `finish` accepts the one reading (a snapshot from 0, or an append) that
        gives the expected number of rows. valid: only these token positions of the segment count (a decode server that
        never forwarded the prompt returns junk there).
        """
        array = rows if isinstance(rows, Encoded) else numbers(rows, "routing", "iu")
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
        """Rows [R, L, K] in the narrowest dtype, R = T - 1 or T; PayloadError for gap, surplus, ambiguity, bad ids."""
        return np.asarray(self.stitch(T))

    def stitch(self, T: int) -> Stitched:
        """What `finish` gives, not yet copied: for a `Branch`, whose block it is written into."""
        starts = self._resolve(T)
        k = self._segments[0].rows.shape[2] if self._segments else 0
        pieces: list[_Piece] = []
        covered = np.zeros(T, np.bool_)
        for segment, start in zip(self._segments, starts, strict=True):
            pieces += self._new(covered, segment, start)
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
        return Stitched(pieces, (R, len(self.layers), k), self.num_experts)

    def _new(self, covered: NDArray[np.bool_], segment: _Segment, start: int) -> list[_Piece]:
        """What a segment has for tokens without rows, which are covered then."""
        low, high = start, start + len(segment.rows)
        if segment.valid is not None:
            low, high = max(low, segment.valid[0]), min(high, segment.valid[1])
        if high > len(covered):
            raise PayloadError.of(
                "routing", f"rows up to token {high} for {len(covered)} tokens", len(covered), value=high
            )
        new = [_Piece(first, last, segment.rows, first - start) for first, last in _gaps(covered, low, high)]
        covered[low:high] = True
        return new

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
