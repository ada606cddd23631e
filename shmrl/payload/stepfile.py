"""A step in a file of its own: its micro batches and every block they refer to, so that it assembles anywhere.

    prefix   32 B: magic, format version, crc32c of the index, bytes of the index, bytes of the whole file
    index    msgpack: run, step, micro_batches [[rank, number, references], ...], blocks [[handle, offset, nbytes,
             crc32c], ...]; offsets count from the first aligned byte behind the index
    blocks   each as it is in the arena, 64-byte aligned

`write` is what `shmrl replay export` calls, with the blocks of a run. `StepFile` needs neither an arena nor a
server: it stands where an arena does for `assemble`. Nothing in a file is trusted, and none is read with pickle.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgpack

from shmrl.arena import crc32c
from shmrl.errors import ChecksumError, LostPayload, PayloadError, RunError
from shmrl.payload.header import align, name_of, open_block, packed
from shmrl.payload.wireform import micro_batches_from_wire, micro_batches_to_wire
from shmrl.types import Handle, MicroBatch

if TYPE_CHECKING:
    from shmrl.payload.header import Blocks

FORMAT_VERSION = 1
_PREFIX = struct.Struct("<8sIIQQ")
_MAGIC = b"SHMRSTEP"

MOST_DIMENSION, MOST_ROW, MOST_PADDED = 1 << 16, 1 << 16, 1 << 28
"""Of a field: its dimensions, the elements of a row, and those of all of a micro batch's padding."""

Place = tuple[int, int]
"""(rank, number): micro batch `number` of what `rank` got."""


def write(path: Path, arena: Blocks, run: str, step: int, micro_batches: Mapping[Place, MicroBatch]) -> int:
    """Write these micro batches of a step with their blocks; the file's size in bytes. It appears at once, complete.

    Raises LostPayload (a block is gone: which, whose), RunError (the file cannot be written).
    """
    samples = [sample for micro in micro_batches.values() for sample in micro.samples]
    whose = {handle: name_of(sample) for sample in samples for handle in sample.handles}
    with ExitStack() as stack:
        views = {handle: stack.enter_context(open_block(arena, handle, name)) for handle, name in whose.items()}
        table, at = list[tuple[bytes, int, int, int]](), 0
        for handle, view in views.items():
            table.append((bytes(handle), at, len(view), crc32c(view)))
            at = align(at + len(view))
        references = [[*place, micro_batches_to_wire([micro])] for place, micro in micro_batches.items()]
        index = packed("index", {"run": run, "step": step, "micro_batches": references, "blocks": table})
        base = align(_PREFIX.size + len(index))
        prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, crc32c(index), len(index), base + at)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with part.open("wb") as file:
                file.write(prefix + index)
                for (_, offset, _, _), view in zip(table, views.values(), strict=True):
                    file.seek(base + offset)
                    file.write(memoryview(view))
                file.truncate(base + at)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RunError(f"{path} cannot be written ({base + at:,} B): {error.strerror}") from error
    return base + at


class StepFile:
    """A step's file, mapped; `with` closes it.

    Attributes:
        run, step: whose, and which. nbytes: the file's size.
        micro_batches: by (rank, number). blocks: (offset, nbytes, crc32c) by handle.

    Raises PayloadError (no step's file, another format version, cut short), ChecksumError (a damaged index), RunError
    (it cannot be opened).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if self.nbytes else mmap.mmap(-1, 1)
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error
        try:
            index, base = self._index()
            self.run, self.step = _a(str, index["run"], "run"), _count(index["step"], "step")
            self.blocks = {Handle(raw): self._place(base, *where) for raw, *where in index["blocks"]}
            self.micro_batches: dict[Place, MicroBatch] = {}
            for rank, number, references in index["micro_batches"]:
                (micro,) = micro_batches_from_wire(references)
                _check(micro)
                self.micro_batches[_count(rank, "rank"), _count(number, "number")] = micro
        except (ValueError, KeyError, TypeError, IndexError) as error:
            self.close()
            raise PayloadError.of(
                "file", f"{path}: its index is unreadable ({type(error).__name__}: {error})"
            ) from error
        except BaseException:
            self.close()
            raise

    def _index(self) -> tuple[dict[str, Any], int]:
        """(the index, where the first block begins)."""
        if self.nbytes < _PREFIX.size:
            raise PayloadError.of("file", f"{self.path} has {self.nbytes} B: it is no step's file", value=self.nbytes)
        magic, version, crc, size, nbytes = _PREFIX.unpack(self._map[: _PREFIX.size])
        if magic != _MAGIC:
            raise PayloadError.of("file", f"{self.path} begins with {magic!r}: it is no step's file", value=magic)
        if version != FORMAT_VERSION:
            raise PayloadError.of("file", f"{self.path} has format {version}, this is {FORMAT_VERSION}", value=version)
        if nbytes != self.nbytes:
            raise PayloadError.of("file", f"{self.path} has {self.nbytes:,} of {nbytes:,} B", value=self.nbytes)
        raw = self._map[_PREFIX.size : _PREFIX.size + size]
        if crc32c(raw) != crc:
            raise ChecksumError(f"{self.path}: its index of {size:,} B does not match its crc32c")
        return msgpack.unpackb(raw), align(_PREFIX.size + size)

    def _place(self, base: int, offset: Any, nbytes: Any, crc: Any) -> tuple[int, int, int]:
        """Where a block is; ValueError if that is not in the file."""
        at = base + _count(offset, "a block's offset")
        return at, _count(nbytes, f"the size of the block at byte {at:,}", self.nbytes - at), _count(crc, "a crc32c")

    def get(
        self, handle: Handle, verify: bool = False, field: str | None = None, rows: tuple[int, int] | None = None
    ) -> memoryview:
        """A block's bytes, as `Arena.get` gives them. They are checked whole, whatever is asked to be verified.

        Raises LostPayload (not in this file), ChecksumError.
        """
        if handle not in self.blocks:
            raise LostPayload(f"block {handle!r} is not in {self.path}")
        offset, nbytes, crc = self.blocks[handle]
        view = memoryview(self._map)[offset : offset + nbytes]
        if crc32c(view) != crc:
            raise ChecksumError(f"{self.path}: block {handle!r} at byte {offset:,} does not match its crc32c")
        return view

    def close(self) -> None:
        """Let go of the file; where somebody still reads a block, its last reader does."""
        with suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check(micro: MicroBatch) -> None:
    """ValueError for a reference with a value of another type, or of a size that no run has."""
    shapes = [micro.shapes]
    for sample in micro.samples:
        for name in ("T", "S", "R"):
            _count(getattr(sample, name), name)
        for _, start, stop in sample.segments:
            _count(start, "a segment's start", _count(stop, "a segment's stop"))
        for name in ("advantage", "weight"):
            _a((int, float), getattr(sample, name), name)
        shapes.append(sample.meta["shapes"])
    for name in (name for fields in (micro.fields, *shapes, *(s.fields for s in micro.samples)) for name in fields):
        _a(str, name, "a field's name")
    padding = _count(micro.padding, "padding", MOST_PADDED)
    for name, shape in (item for known in shapes for item in _a(dict, known, "shapes").items()):
        row = [_count(n, f"a dimension of {name}", MOST_DIMENSION) for n in shape]
        stored = row[:-1] if name == "routing" else row  # its last one is the number of experts
        size = _count(prod(stored), f"the elements of a row of {name}", MOST_ROW)
        _count(padding * size, f"the elements of {name} in {padding:,} positions of padding", MOST_PADDED)


def _a(kind: type | tuple[type, ...], value: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def _count(value: Any, name: str, most: int = (1 << 63) - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r:.80}, not a number from 0 to {most:,}")
    return value
