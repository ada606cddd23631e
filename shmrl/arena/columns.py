"""The tail behind a block's payload: columns table and checksums, as bytes and as values.

Used by the binding when it seals a block with columns and when it reads a field, and by the inspectors; in every process.

Layout (little endian, at the first multiple of 8 behind the payload):
    header  16 B: magic, number of columns, number of checksums, crc32c of the bytes in no column
    column  64 B each: name (31 bytes at most), offset, rows, row_nbytes, first checksum, rows per checksum
    checksums 4 B each: crc32c of every row block, column by column; without columns of every 64 KiB of the payload
A row block has at most 64 KiB and at most 512 rows (a single row may be larger). The tail's own crc32c is in the descriptor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from shmrl.errors import ArenaCorrupt

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
    def crcs(self) -> int:
        """How many checksums it has."""
        return -(-self.rows // self.rows_per_crc)


@dataclass(frozen=True, slots=True)
class Tail:
    """A parsed tail: columns, the checksums as raw little-endian uint32, the crc of the bytes in no column."""

    columns: tuple[Column, ...]
    crcs: bytes
    rest_crc: int


def plan(columns: Iterable[tuple[str, int, int, int]], nbytes: int) -> tuple[tuple[Column, ...], int]:
    """(field, offset, row_nbytes, rows) in any order -> checked columns by offset, and how many checksums they need.

    ValueError names the column: outside the payload, overlapping another, a name twice or too long, row_nbytes < 1.
    """
    out: list[Column] = []
    first, end, names = 0, 0, set[str]()
    for name, offset, row_nbytes, rows in sorted(columns, key=lambda c: (c[1], c[2] * c[3])):
        if not 0 < len(name.encode()) <= NAME_MAX or name in names:
            raise ValueError(f"column name {name!r}: 1 to {NAME_MAX} bytes, each once")
        if row_nbytes < 1 or rows < 0 or offset < 0 or offset + row_nbytes * rows > nbytes:
            raise ValueError(
                f"column {name!r}: {rows} rows of {row_nbytes} bytes at offset {offset} do not fit the payload's {nbytes} bytes"
            )
        if rows and offset < end:
            raise ValueError(f"column {name!r} at offset {offset} overlaps the column that ends at {end}")
        column = Column(name, offset, rows, row_nbytes, first, max(1, min(BLOCK_ROWS, BLOCK_NBYTES // row_nbytes)))
        out.append(column)
        names.add(name)
        first += column.crcs
        end = max(end, offset + column.nbytes)
    return tuple(out), first


def gaps(columns: Iterable[Column], nbytes: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of the payload that no column covers; `columns` by offset."""
    out, at = [], 0
    for column in columns:
        if column.offset > at:
            out.append((at, column.offset))
        at = max(at, column.offset + column.nbytes)
    return out + ([(at, nbytes)] if at < nbytes else [])


def pack(columns: Iterable[Column], crcs: bytes, rest_crc: int) -> bytes:
    """The tail's bytes."""
    table = b"".join(
        COLUMN.pack(c.name.encode(), c.offset, c.rows, c.row_nbytes, c.first, c.rows_per_crc) for c in columns
    )
    return HEADER.pack(MAGIC, len(table) // COLUMN.size, len(crcs) // 4, rest_crc) + table + crcs


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
