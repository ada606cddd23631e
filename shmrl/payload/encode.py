"""`encode`: one branch -> one arena block, written in place.

Called by the env worker when an episode ends. The layout is worked out first, the block reserved at its exact size,
and every column written straight into it; expert ids are decoded from base64 or narrowed on the way, with the
interpreter lock released. A block whose ids are found wrong there is given back unsealed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shmrl.arena.columns import rows_per_crc
from shmrl.errors import PayloadError
from shmrl.payload import _payload
from shmrl.payload.branch import Branch
from shmrl.payload.checks import Rows, type_code
from shmrl.payload.header import Column, Header, align, name_of, packed, read_header, read_loss_mask, read_tokens
from shmrl.payload.registry import all_fields, get_field
from shmrl.payload.routing import Stitched
from shmrl.types import Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena

ONE_PASS_FROM = 1 << 18
"""Bytes of a column from which it is copied with its checksums, around the caches; a smaller one is still in them when
the block is sealed."""


@dataclass(frozen=True, slots=True)
class _Array:
    """One column to write. fill(target) writes it into its place, an array of this dtype and shape in the block; where
    it has taken the column's checksums on the way, it returns them."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fill: Callable[[NDArray[Any]], NDArray[np.uint32] | None]


def encode(
    arena: Arena,
    branch: Branch,
    tag: str,
    prefix: tuple[Sample, int] | None = None,
    *,
    timeout_s: float = 30.0,
    on_full: Literal["block", "raise", "spill"] = "block",
) -> Sample:
    """Stores a branch in one block and returns its reference, which is O(1) in its size. The caller owns the block.

    Args:
        tag: "run/source/group/episode"; fills the header where branch.meta does not have these.
        prefix: (sample, n): the first n positions are that sample's rows, stored once; this block has only the rest.
            Its tokens and loss mask must be equal there, its fields the same, and its routing must have n rows.
        timeout_s, on_full: how long to wait for space, and what then (see `Arena.reserve`).

    Raises PayloadError, LostPayload (the prefix is gone), ArenaFull.

    Example: encode(arena, branch, tag="run1/reverse-text/g7/e3") -> Sample(segments=((Handle(...), 0, 37),), T=37, ...)
    """
    start = 0
    segments: tuple[Any, ...] = ()
    if prefix is not None:
        _check_prefix(arena, branch, *prefix)
        start, segments = prefix[1], prefix[0].truncated(prefix[1]).segments
    arrays = _arrays(branch, start)
    header, nbytes = _layout(arrays, branch, start, segments, _full_meta(branch.meta, tag))
    raw, base = header.pack()
    columns = [(c.name, base + c.offset, c.row_nbytes, c.shape[0]) for c in header.columns.values()]
    with arena.reserve(base + nbytes, tag=tag, timeout_s=timeout_s, on_full=on_full) as block:
        taken = _write(block.buffer, raw, base, arrays, header.columns)
        handle = block.seal(columns=columns, taken=taken)
    return header.sample(handle)


def fingerprint(tokens: NDArray[np.int32]) -> bytes:
    """8 bytes that identify a token sequence."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()


def _full_meta(meta: Mapping[str, Any], tag: str) -> dict[str, Any]:
    return {**dict(zip(("run", "source", "group", "episode"), tag.split("/"), strict=False)), **meta}


def _write(buffer: Any, raw: bytes, base: int, arrays: list[_Array], columns: dict[str, Column]) -> dict[str, bytes]:
    """Header, then every column; checksums that were taken on the way. No array over the buffer survives this."""
    taken: dict[str, bytes] = {}
    target = np.frombuffer(buffer, np.uint8)
    target[: len(raw)] = np.frombuffer(raw, np.uint8)
    for array in arrays:
        column = columns[array.name]
        first = base + column.offset
        crcs = array.fill(target[first : first + column.nbytes].view(array.dtype).reshape(array.shape))
        if crcs is not None:
            taken[array.name] = crcs.tobytes()
    return taken


def _layout(
    arrays: list[_Array], branch: Branch, start: int, segments: tuple[Any, ...], meta: dict[str, Any]
) -> tuple[Header, int]:
    """The header with offsets relative to the first column, and the columns' total size in bytes."""
    columns: dict[str, Column] = {}
    offset = 0
    for array in arrays:
        column = Column(array.name, array.dtype.str, array.shape, offset)
        columns[array.name] = column
        offset = align(offset + column.nbytes)
    header = Header(
        T=branch.T, S=branch.S, R=branch.R, start=start, columns=columns, meta=meta, layers=branch.layers,
        fields=tuple(dict.fromkeys(get_field(name).group for name in branch.rows)),
        num_experts=branch.num_experts, fingerprint=fingerprint(branch.tokens), prefix=segments,
    )  # fmt: skip
    return header, offset


def _arrays(branch: Branch, start: int) -> list[_Array]:
    """Every column of positions start .. T."""
    loss = branch.loss_mask[start:]
    bits = np.packbits(loss, bitorder="little")
    out = [
        _copied("tokens", branch.tokens[start:]),
        _copied("loss_mask", bits),
        _copied("logprobs", branch.logprobs[start:]),
    ]
    if branch.messages is not None:
        out.append(_copied("text", np.frombuffer(packed("text", branch.messages), np.uint8)))
    sampled_before = branch.S - int(np.count_nonzero(loss))
    for field in all_fields():
        rows = branch.rows.get(field.name)
        if rows is not None:
            out += _rows(field.name, rows, start if field.align == "input" else sampled_before, branch.num_experts)
    return out


def _rows(name: str, rows: Rows, first: int, num_experts: int) -> list[_Array]:
    """The columns of one field from row `first` on: its values, or for ragged ones its offsets and its values."""
    dtype = get_field(name).element(num_experts)
    if rows.counts is not None:
        offsets = np.zeros(rows.count - first + 1, np.int32 if len(rows.values) < 2**31 else np.int64)
        np.cumsum(rows.counts[first:], out=offsets[1:])
        skipped = int(rows.counts[:first].sum(dtype=np.int64))
        return [_copied(f"{name}/offsets", offsets), _copied(name, rows.values[skipped:])]
    if isinstance(rows.values, Stitched):
        shape = (rows.count - first, *rows.values.shape[1:])
        return [_Array(name, dtype, shape, partial(rows.values.fill, start=first))]
    values = rows.values[first:]
    if values.dtype == dtype:
        return [_copied(name, values)]
    source = np.ascontiguousarray(values)
    code = type_code(source.dtype)

    def fill(target: NDArray[Any]) -> None:
        _payload.narrow(source, code, target, dtype.itemsize)

    return [_Array(name, dtype, values.shape, fill)]


def _copied(name: str, source: NDArray[Any]) -> _Array:
    def fill(target: NDArray[Any]) -> NDArray[np.uint32] | None:
        if source.nbytes < ONE_PASS_FROM or not source.flags.c_contiguous:
            target[...] = source
            return None
        row_nbytes = source.nbytes // len(source)
        step = rows_per_crc(row_nbytes)
        crcs = np.empty(-(-len(source) // step), np.uint32)
        _payload.copy_rows(source, target, step * row_nbytes, crcs)
        return crcs

    return _Array(name, source.dtype, source.shape, fill)


def _check_prefix(arena: Arena, branch: Branch, sample: Sample, n: int) -> None:
    """The first n positions of both must be the same thing, described the same way."""
    if not 0 < n <= min(sample.T, branch.T - 1):
        raise PayloadError.of("prefix", f"{n} positions of a sample of {sample.T} for a branch of {branch.T}", value=n)
    short = sample.truncated(n)
    _check_equal("tokens", read_tokens(arena, short), branch.tokens[:n])
    _check_equal("loss_mask", read_loss_mask(arena, short), branch.loss_mask[:n])
    header = read_header(arena, sample.segments[0][0])
    sampled = branch.loss_mask[:n].any()
    for field in (get_field(name) for name in branch.rows):
        if (field.align == "input" or sampled) and field.group not in sample.fields:
            raise PayloadError.of(
                "prefix", f"{name_of(sample)} has no {field.group}, the branch has", value=field.group
            )
    if "routing" in branch.rows and (header.layers, header.num_experts) != (branch.layers, branch.num_experts):
        have = f"{header.num_experts} experts, layers {header.layers}"
        raise PayloadError.of(
            "prefix", f"{name_of(sample)} has {have}, the branch {branch.num_experts}, {branch.layers}"
        )
    if "routing" in branch.rows and n > sample.R:
        raise PayloadError.of("prefix", f"{sample.R} routing rows for {n} positions; share {sample.R}", value=sample.R)


def _check_equal(what: str, theirs: NDArray[Any], ours: NDArray[Any]) -> None:
    differ = theirs != ours
    if differ.any():
        at = int(np.argmax(differ))
        raise PayloadError.of("prefix", f"{what} differ at position {at}: {theirs[at]} there, {ours[at]} here", at)
