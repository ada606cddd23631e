"""`gather`: rows of one field, out of any blocks that were sealed with columns, into an array of the caller's.

For embedders, in a trainer rank: what `assemble` does to a whole micro batch, for one field, without payload headers.
Blocks are read in place; of each only the rows and layers that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import PayloadError
from shmrl.payload import _payload
from shmrl.payload.plan import runs
from shmrl.types import Handle

if TYPE_CHECKING:
    from shmrl.arena import Arena, Column

RowRange = tuple[Handle, int, int]
"""Rows [start, stop) of a block's field, as in `Sample.segments`."""


def gather(
    arena: Arena,
    field: str,
    rows: Sequence[RowRange],
    out: NDArray[Any],
    layers: Sequence[int] | None = None,
    *,
    verify: bool = False,
) -> None:
    """Copies rows of `field` to out[0], out[1], ... in the order given; what lies behind them is left as it is.

    Args:
        out: C-contiguous [N, ...] with N >= the rows asked for; with `layers` [N, len(layers), ...].
        layers: places of the wanted layers among those that a stored row has, in the order wanted.
        verify: first checks the checksums of the row blocks that are touched.

    Raises PayloadError (rows of another size, ranges or layers outside), KeyError (no such field), StaleHandle,
    ChecksumError.

    Example: gather(arena, "routing", [(handle, 0, 64)], out[:64], layers=range(12, 24)) -> out uint8 [64, 12, 8]
    """
    wanted = sum(stop - start for _, start, stop in rows)
    if not out.flags.c_contiguous or not 0 <= wanted <= len(out):
        raise PayloadError.of(field, f"{wanted} rows into a C-contiguous array of {len(out)}", value=wanted)
    handles = list(dict.fromkeys(handle for handle, _, _ in rows))
    with ExitStack() as stack:
        views = [stack.enter_context(view) for view in arena.get_many(handles)]
        columns = {handle: _column(arena, handle, field) for handle in handles}
        if verify:
            for handle, start, stop in rows:
                arena.get(handle, verify=True, field=field, rows=(start, stop)).release()
        copies, at = list[list[int]](), 0
        for handle, start, stop in rows:
            copies += _copies(handles.index(handle), columns[handle], start, stop, at, out, layers)
            at += stop - start
        sources = _payload.Sources(views)
        stack.callback(sources.release)
        sources.gather(np.array(copies, np.int64).reshape(-1, 7), out)


def _column(arena: Arena, handle: Handle, field: str) -> Column:
    columns = arena.columns(handle)
    for column in columns:
        if column.name == field:
            return column
    raise KeyError(f"{handle!r} has no column {field!r}; it has {[column.name for column in columns]}")


def _copies(
    block: int, column: Column, start: int, stop: int, at: int, out: NDArray[Any], layers: Sequence[int] | None
) -> Iterator[list[int]]:
    """One copy, or one per run of neighbouring layers."""
    if not 0 <= start <= stop <= column.rows:
        raise PayloadError.of(column.name, f"rows [{start}, {stop}) of {column.rows}", start, value=stop)
    row = out.strides[0] if out.ndim > 1 else out.itemsize
    src, count = column.row_nbytes, stop - start
    first = column.offset + start * src
    if layers is None:
        if row != src:
            raise PayloadError.of(column.name, f"rows of {src} bytes into rows of {row}", value=row)
        yield [block, first, src, at * row, row, count, row]
        return
    layer = row // max(len(layers), 1)
    shape = f"{out.dtype} {out.shape[1:]}"
    if out.ndim < 2 or out.shape[1] != len(layers) or layer < 1 or src % layer:
        raise PayloadError.of(column.name, f"{len(layers)} layers of rows of {src} bytes into {shape}", value=row)
    if not all(0 <= slot < src // layer for slot in layers):
        said = f"layers {list(layers)} of {src // layer} (rows of {src} bytes, {layer} per layer of {shape})"
        raise PayloadError.of(column.name, said, value=list(layers))
    for index, slot, run in runs(layers):
        yield [block, first + slot * layer, src, at * row + index * layer, row, count, layer * run]
