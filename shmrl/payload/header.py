"""The header of a block: what is in it and where, and everything a restarted orchestrator needs to adopt it.

A block is `prefix (16 bytes) | msgpack header | columns, each 64-byte aligned`. The prefix is magic, format version
and the header's size; column offsets count from the first aligned byte behind the header, so that the header's size
depends on nothing behind it. Written by `encode` (env worker), read by `assemble` (trainer rank) and the helpers here
(anyone).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import msgpack
import numpy as np
from numpy.typing import NDArray

from shmrl.errors import ForeignArena, LostPayload, NotSealed, PayloadError, StaleHandle
from shmrl.payload.registry import members
from shmrl.types import Handle, Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena

FORMAT_VERSION = 1
ALIGN = 64
_PREFIX = struct.Struct("<4sHHII")
_MAGIC = b"SHMB"

SAMPLE_META = (
    "source", "group", "episode", "branch", "task", "reward", "version_start", "version_end", "stop_reason",
    "logprobs_mode", "temperature", "top_p", "top_k", "min_p", "head_has_sampled",
)  # fmt: skip
"""What of the header's meta travels in `Sample.meta`; everything else stays in the block."""


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a block. offset: bytes from the block's start.

    Example: Column("routing", "|u1", (36, 48, 8), 4096)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * prod(self.shape[1:]))

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_nbytes

    def of(self, view: Any) -> NDArray[Any]:
        """The array, a view into the block."""
        count = prod(self.shape)
        return np.frombuffer(view, np.dtype(self.dtype), count=count, offset=self.offset).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What a block says about itself.

    Attributes:
        T, S, R: of the whole branch, shared prefix included. start: positions of the prefix, stored in other blocks.
        prefix: (handle, start, stop) of those. columns: by name. layers, num_experts: of the routing.
        fingerprint: 8-byte BLAKE2 of the branch's int32 token ids. meta: scalars and names by key.
    """

    T: int
    S: int
    R: int
    start: int
    columns: dict[str, Column]
    fields: tuple[str, ...]
    meta: dict[str, Any]
    layers: tuple[int, ...] = ()
    num_experts: int = 0
    fingerprint: bytes = b""
    prefix: tuple[tuple[Handle, int, int], ...] = ()
    version: int = field(default=FORMAT_VERSION)

    @property
    def tokens_here(self) -> int:
        """Positions stored in this block."""
        return self.columns["tokens"].shape[0]

    def pack(self) -> tuple[bytes, int]:
        """(prefix and msgpack header, offset of the first column); columns hold offsets relative to that."""
        body = packed(
            "meta",
            {
                "T": self.T, "S": self.S, "R": self.R, "start": self.start, "fields": self.fields, "meta": self.meta,
                "layers": self.layers, "num_experts": self.num_experts, "fingerprint": self.fingerprint,
                "prefix": [[bytes(handle), start, stop] for handle, start, stop in self.prefix],
                "columns": [[c.name, c.dtype, c.shape, c.offset] for c in self.columns.values()],
            }
        )  # fmt: skip
        raw = _PREFIX.pack(_MAGIC, self.version, 0, len(body), 0) + body
        return raw, align(len(raw))

    @classmethod
    def unpack(cls, view: Any, name: str = "block") -> Header:
        """The header at the start of a mapped block; PayloadError if it is none, or of another format version."""
        data = memoryview(view)
        magic, version, _, size, _ = (
            _PREFIX.unpack(data[: _PREFIX.size]) if len(data) >= _PREFIX.size else (b"", 0, 0, 0, 0)
        )
        if magic != _MAGIC or version != FORMAT_VERSION or _PREFIX.size + size > len(data):
            raise PayloadError.of(
                "header", f"{name}: no payload of format {FORMAT_VERSION}: {bytes(data[:16])!r}", value=version
            )
        try:
            raw = msgpack.unpackb(data[_PREFIX.size : _PREFIX.size + size], use_list=False)
        except ValueError as error:
            raise PayloadError.of("header", f"{name}: unreadable ({error})") from error
        return cls._of(raw, name, version, align(_PREFIX.size + size), len(data))

    @classmethod
    def _of(cls, raw: Any, name: str, version: int, base: int, nbytes: int) -> Header:
        """The header of a decoded map: whatever it holds, an array that it names lies within the block."""
        what = "the map"
        try:
            given = dict(raw)
            what = "columns"
            columns = {c: _column(c, dtype, shape, base + at, nbytes) for c, dtype, shape, at in given.pop("columns")}
            what = "prefix"
            prefix = tuple((Handle(handle), int(start), int(stop)) for handle, start, stop in given.pop("prefix"))
            what = "its keys"
            missing = sorted(_KEYS.keys() - given.keys())
            if missing or len(given) > len(_KEYS):
                raise ValueError(f"missing {missing}, unknown {sorted(map(str, given.keys() - _KEYS.keys()))}")
            for what, kind in _KEYS.items():
                if not isinstance(given[what], kind):
                    raise TypeError(f"a {type(given[what]).__name__}")
        except (KeyError, ValueError, TypeError) as error:
            told = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            raise PayloadError.of("header", f"{name}: {what} of the header cannot be read ({told})") from error
        needed = {"tokens", "loss_mask", "logprobs", *(name for group in given["fields"] for name in _columns(group))}
        if not needed <= columns.keys():
            raise PayloadError.of("header", f"{name}: the header has no column {sorted(needed - columns.keys())}")
        return cls(columns=columns, prefix=prefix, version=version, **given)

    def sample(self, handle: Handle) -> Sample:
        """The reference to this block's branch: what `encode` returned, and what a restarted run adopts."""
        meta = {key: self.meta[key] for key in SAMPLE_META if self.meta.get(key) is not None}
        meta["shapes"] = {group: self.row_shape(group) for group in self.fields}
        segments = (*self.prefix, (handle, 0, self.tokens_here))
        return Sample(segments=segments, T=self.T, S=self.S, R=self.R, fields=self.fields, meta=meta)

    def row_shape(self, group: str) -> tuple[int, ...]:
        """Shape of one row of a field; expert ids carry num_experts behind it: (L, K, E). () for ragged ones."""
        field = members(group)[0]
        if field.is_ragged:
            return ()
        shape = self.columns[field.name].shape[1:]
        return (*shape, self.num_experts) if field.dtype is None else shape


_KEYS: dict[str, type] = {
    "T": int, "S": int, "R": int, "start": int, "fields": tuple, "meta": dict, "layers": tuple, "num_experts": int,
    "fingerprint": bytes,
}  # fmt: skip


def _columns(group: Any) -> list[str]:
    """The columns that captured fields have; PayloadError for fields that this process does not know."""
    fields = members(str(group))
    return [name for field in fields for name in ([f"{field.name}/offsets"] * field.is_ragged + [field.name])]


def _column(name: Any, dtype: Any, shape: Any, offset: Any, nbytes: int) -> Column:
    """A column of a header, which lies within the block's `nbytes`. ValueError, TypeError."""
    column = Column(name, dtype, tuple(shape), offset)
    if not isinstance(name, str) or not shape or any(type(n) is not int or n < 0 for n in (*shape, offset)):
        raise ValueError(f"{column}: a name, a type, sizes and an offset are expected")
    if np.dtype(dtype).hasobject or column.offset + column.nbytes > nbytes:
        raise ValueError(f"{column} ends behind the block's {nbytes} bytes")
    return column


def packed(field: str, value: Any) -> bytes:
    """msgpack of a value; PayloadError naming the field it belongs to if it holds what msgpack cannot carry."""
    try:
        return bytes(msgpack.packb(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise PayloadError.of(field, f"something that msgpack cannot carry ({error})") from error


def align(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // ALIGN) * ALIGN


class Blocks(Protocol):
    """Where blocks are read: an arena, or the file of a step."""

    def get(
        self, handle: Handle, verify: bool = False, field: str | None = None, rows: tuple[int, int] | None = None
    ) -> Any: ...


def open_block(arena: Blocks, handle: Handle, whose: str) -> Any:
    """A view of a block; LostPayload naming it and its owner if it is gone, or another node's and was not fetched.
    Release the view when done."""
    try:
        return arena.get(handle)
    except (StaleHandle, NotSealed, ForeignArena) as error:
        raise LostPayload(f"block {handle!r} of {whose} is gone: {error}") from error


def name_of(sample: Sample) -> str:
    """source/group/episode/branch of a sample, as far as it has them."""
    parts = [str(sample.meta[key]) for key in ("source", "group", "episode", "branch") if key in sample.meta]
    return "/".join(parts) or "a sample"


def read_header(arena: Arena, handle: Handle) -> Header:
    """The header of one block. LostPayload if the block is gone, PayloadError if it is no payload."""
    with open_block(arena, handle, "a payload") as view:
        return Header.unpack(view, repr(handle))


def read_tokens(arena: Arena, sample: Sample) -> NDArray[np.int32]:
    """Token ids int32 [sample.T], copied out of the block (of its prefix too)."""
    return read_column(arena, sample, "tokens")


def read_loss_mask(arena: Arena, sample: Sample) -> NDArray[np.bool_]:
    """Loss mask bool [sample.T], copied."""
    parts = []
    for handle, start, stop in sample.segments:
        with open_block(arena, handle, name_of(sample)) as view:
            bits = np.unpackbits(Header.unpack(view).columns["loss_mask"].of(view), bitorder="little")
            parts.append(bits[start:stop].astype(np.bool_))
    return np.concatenate([np.empty(0, np.bool_), *parts])


def read_column(arena: Arena, sample: Sample, name: str) -> NDArray[Any]:
    """Rows of one per-token core column ("tokens" or "logprobs") of a sample, copied: [sample.T]."""
    parts: list[NDArray[Any]] = []
    for handle, start, stop in sample.segments:
        with open_block(arena, handle, name_of(sample)) as view:
            column = Header.unpack(view).columns[name].of(view)
            parts.append(column[start:stop].copy())
            del column
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def read_text(arena: Arena, sample: Sample) -> list[dict[str, Any]] | None:
    """The episode's messages as they were encoded, or None if the branch had none."""
    handle = sample.segments[-1][0]
    with open_block(arena, handle, name_of(sample)) as view:
        column = Header.unpack(view).columns.get("text")
        if column is None:
            return None
        messages: list[dict[str, Any]] = msgpack.unpackb(
            memoryview(view)[column.offset : column.offset + column.nbytes]
        )
        return messages
