"""The tail behind a block's payload: columns table and checksums. Making it at seal, reading and verifying by it.

Called by `Arena` when a block is sealed with columns and when a field is read or verified; in any attached process.

Layout (little endian, at the first multiple of 8 behind the payload):
    header    16 B: magic, number of columns, number of checksums, crc32c of the bytes in no column
    column    64 B each: name (31 bytes at most), offset, rows, row_nbytes, first checksum, rows per checksum
    checksums  4 B each: crc32c of every row block, column by column; without columns of every 64 KiB of the payload
A row block has at most 64 KiB and at most 512 rows (a single row may be larger). The descriptor has the tail's own
crc32c, or the payload's, where a payload of at most 64 KiB has no columns and therefore no tail.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shmrl.arena._arena import View
from shmrl.arena._ctl import crc32c, crc_blocks
from shmrl.errors import ArenaCorrupt, ChecksumError
from shmrl.types import Handle

HEADER = struct.Struct("<IIII")
COLUMN = struct.Struct("<32sQQQII")
MAGIC = 0x4C494154  # "TAIL"
BLOCK_NBYTES = 65536
BLOCK_ROWS = 512
NAME_MAX = 31


@dataclass(frozen=True, slots=True)
class Column:
    """Rows of one field inside a block.

    Example: Column("routing", offset=1024, rows=36, row_nbytes=384, first=0, rows_per_crc=170)
    """

    name: str
    offset: int
    rows: int
    row_nbytes: int
    first: int
    rows_per_crc: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_nbytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def step(self) -> int:
        """Bytes under one checksum."""
        return self.rows_per_crc * self.row_nbytes


@dataclass(frozen=True, slots=True)
class Tail:
    """A parsed tail: columns by offset, checksums as raw little-endian uint32, the crc of the bytes in no column."""

    columns: tuple[Column, ...] = ()
    crcs: bytes = b""
    rest_crc: int = 0


# ----------------------------------------------------------------------------------------------------------- making it


def rows_per_crc(row_nbytes: int) -> int:
    """Rows of a column under one checksum."""
    return max(1, min(BLOCK_ROWS, BLOCK_NBYTES // row_nbytes))


def make(
    payload: memoryview,
    columns: Iterable[tuple[str, int, int, int]],
    checksum: bool,
    taken: Mapping[str, bytes] | None = None,
) -> bytes:
    """The tail's bytes for (field, offset, row_nbytes, rows) in any order. taken: checksums that whoever wrote a column
    has taken on the way.

    ValueError names the column: outside the payload, overlapping another, a name twice or too long, row_nbytes < 1.
    """
    table = plan(columns, payload.nbytes)
    crcs, rest = b"", 0
    if checksum:
        known = taken or {}
        crcs = b"".join(known.get(c.name) or crc_blocks(payload[c.offset : c.end], c.step) for c in table)
        rest = _rest_crc(payload, table)
    rows = (COLUMN.pack(c.name.encode(), c.offset, c.rows, c.row_nbytes, c.first, c.rows_per_crc) for c in table)
    return HEADER.pack(MAGIC, len(table), len(crcs) // 4, rest) + b"".join(rows) + crcs


def plan(columns: Iterable[tuple[str, int, int, int]], nbytes: int) -> tuple[Column, ...]:
    """Checked columns by offset, with their place among the checksums."""
    out: list[Column] = []
    first, end, names = 0, 0, set[str]()
    for name, offset, row_nbytes, rows in sorted(map(_numbers, columns), key=lambda c: (c[1], c[2] * c[3])):
        if not 0 < len(name.encode()) <= NAME_MAX or name in names:
            raise ValueError(f"column name {name!r}: 1 to {NAME_MAX} bytes, each once")
        if not 1 <= row_nbytes < 1 << 48 or rows < 0 or offset < 0 or offset + row_nbytes * rows > nbytes:
            raise ValueError(
                f"column {name!r}: {rows} rows of {row_nbytes} bytes at offset {offset}, in a payload of {nbytes} bytes"
            )
        if rows and offset < end:
            raise ValueError(f"column {name!r} at offset {offset} overlaps the column that ends at {end}")
        column = Column(name, offset, rows, row_nbytes, first, rows_per_crc(row_nbytes))
        out.append(column)
        names.add(name)
        first += -(-rows // column.rows_per_crc)
        end = max(end, column.end)
    return tuple(out)


def _numbers(column: tuple[str, int, int, int]) -> tuple[str, int, int, int]:
    """A column as it was given, checked to be a name and three integers. ValueError."""
    try:
        name, *numbers = column
        offset, row_nbytes, rows = map(operator.index, numbers)
        return name + "", offset, row_nbytes, rows
    except (TypeError, ValueError):
        raise ValueError(f"column {column!r}: (field, offset, row_nbytes, rows), a name and three integers") from None


def _rest_crc(payload: memoryview, columns: Iterable[Column]) -> int:
    """crc32c of the bytes that no column covers, in order."""
    crc = at = 0
    for column in columns:
        if column.offset > at:
            crc = crc32c(payload[at : column.offset], crc)
        at = max(at, column.end)
    return crc32c(payload[at:], crc)


# ---------------------------------------------------------------------------------------------------------- reading it


def of(view: View) -> Tail:
    """The tail of a whole block's view. ChecksumError, ArenaCorrupt."""
    raw, crc, _ = view._tail()
    return _checked(view.handle, raw, crc)


def _checked(handle: Handle, raw: bytes, crc: int) -> Tail:
    if not raw:
        return Tail()
    if crc32c(raw) != crc:
        raise ChecksumError(f"{handle!r}: the columns table and checksums behind the payload were changed")
    return parse(raw)


def parse(raw: bytes) -> Tail:
    """The tail of its bytes; ArenaCorrupt if they are no tail."""
    if len(raw) < HEADER.size:
        raise ArenaCorrupt(f"a tail of {len(raw)} bytes is shorter than its header of {HEADER.size}")
    magic, columns, crcs, rest = HEADER.unpack_from(raw)
    end = HEADER.size + columns * COLUMN.size
    if magic != MAGIC or end + 4 * crcs != len(raw):
        raise ArenaCorrupt(f"a tail of {len(raw)} bytes announces {columns} columns and {crcs} checksums")
    return Tail(tuple(_column(raw, HEADER.size + i * COLUMN.size) for i in range(columns)), raw[end:], rest)


def _column(raw: bytes, at: int) -> Column:
    name, offset, rows, row_nbytes, first, per = COLUMN.unpack_from(raw, at)
    if row_nbytes < 1 or per < 1:
        raise ArenaCorrupt(f"a column of rows of {row_nbytes} bytes, {per} rows per checksum")
    return Column(name.rstrip(b"\0").decode(errors="replace"), offset, rows, row_nbytes, first, per)


def narrow(view: View, verify: bool, field: str | None, rows: tuple[int, int] | None) -> None:
    """Cuts a whole block's view to rows [a, b) of a field; verify: compares the row blocks it touches, each to its end.

    KeyError (no such field), ValueError (rows without field, no columns, out of range), ChecksumError.
    """
    if verify and not view._tail()[2]:
        raise ChecksumError(f"{view.handle!r} was sealed without checksums")
    if field is None:
        if rows is not None:
            raise ValueError("rows= needs field=: without a column a block has no rows")
        raw, crc, _ = view._tail()
        with memoryview(view) as payload:
            return check(view.handle, payload, raw, crc)
    tail = of(view)
    column = _find(view, tail, field)
    start, stop = (0, column.rows) if rows is None else rows
    if not 0 <= start <= stop <= column.rows:
        raise ValueError(f"rows=({start}, {stop}) of {column.rows} rows of {field!r} in {view.handle!r}")
    if verify:
        with memoryview(view) as payload:
            _verify_rows(view.handle, payload, tail, column, start, stop)
    view._cut(column.offset + start * column.row_nbytes, stop - start, column.row_nbytes)
    return None


def _find(view: View, tail: Tail, field: str) -> Column:
    for column in tail.columns:
        if column.name == field:
            return column
    if not tail.columns:
        raise ValueError(f"{view.handle!r} was sealed without columns, so there is no field {field!r}")
    raise KeyError(f"{view.handle!r} has no column {field!r}; it has {[c.name for c in tail.columns]}")


def check(handle: Handle, payload: memoryview, raw: bytes, crc: int) -> None:
    """Compares a whole payload with the tail behind it and the crc in its descriptor. ChecksumError, ArenaCorrupt."""
    Arrival(handle, payload, raw, crc).finish()


class Arrival:
    """Compares a payload that fills from its front with its tail and crc, each row block once it is complete.

    Whoever fills it finds that it is spoilt early, and each block is still in the caches. ChecksumError, ArenaCorrupt.
    """

    def __init__(self, handle: Handle, payload: memoryview, raw: bytes, crc: int) -> None:
        self._handle, self._payload, self._crc = handle, payload, crc
        self._tail = _checked(handle, raw, crc)
        self._ahead = list(self._tail.columns)
        if not self._ahead and self._tail.crcs:
            self._ahead = [Column("payload", 0, len(payload), 1, 0, BLOCK_NBYTES)]
        self._row = 0  # of the first column ahead: rows before it are compared

    def upto(self, nbytes: int) -> None:
        """So many bytes are there."""
        while self._ahead:
            column = self._ahead[0]
            whole = max(0, nbytes - column.offset) // column.step * column.rows_per_crc
            row = column.rows if nbytes >= column.end else whole
            _verify_rows(self._handle, self._payload, self._tail, column, self._row, row)
            self._row = row
            if row < column.rows:
                return
            self._ahead.pop(0)
            self._row = 0

    def finish(self) -> None:
        """All of it is there."""
        self.upto(len(self._payload))
        if self._tail.columns and _rest_crc(self._payload, self._tail.columns) != self._tail.rest_crc:
            raise ChecksumError(f"{self._handle!r}: the bytes outside its columns do not match their crc32c")
        if not self._tail.columns and not self._tail.crcs and crc32c(self._payload) != self._crc:
            raise ChecksumError(
                f"{self._handle!r}: the payload of {len(self._payload)} bytes does not match its crc32c"
            )


def _verify_rows(handle: Handle, payload: memoryview, tail: Tail, column: Column, start: int, stop: int) -> None:
    first, last = start // column.rows_per_crc, -(-stop // column.rows_per_crc)
    if start == stop:
        return
    want = tail.crcs[4 * (column.first + first) : 4 * (column.first + last)]
    with payload[column.offset + first * column.step : min(column.offset + last * column.step, column.end)] as there:
        have = crc_blocks(there, column.step)
    _compare(handle, column.name, have, want, first)


def _compare(handle: Handle, name: str, have: bytes, want: bytes, first: int) -> None:
    if have != want:
        block = first + next((i for i in range(len(have) // 4) if have[4 * i :][:4] != want[4 * i :][:4]), 0)
        raise ChecksumError(f"{handle!r}, field {name!r}: row block {block} does not match its crc32c")
