"""`assemble`: the only copy of a payload, from the mapped blocks into a trainer rank's staging buffers.

Called by a trainer rank for each micro batch of its share, before the step. Reads the blocks' headers, works out which
rows go where, and hands C one list of copies per field. What no sample covers gets the field's fill. Every view is
released before it returns; the caller says done() later, when all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import PayloadError
from shmrl.payload import _payload
from shmrl.payload.batch import Staging, TensorBatch
from shmrl.payload.header import Column, Header, name_of, open_block
from shmrl.payload.registry import Field, members
from shmrl.types import Handle, MicroBatch, Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena

TokenRange = tuple[int, int, int]
"""(sequence, start, stop); the sequence behind the last one is the padding."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions [start, stop) of a block that go to destination positions from `at` on.

    rows_before, sampled: sampled tokens of the block before `start`, and those within. expected: how many of the
    piece's positions have a routing row according to the sample.
    """

    sample: Sample
    block: int
    start: int
    stop: int
    at: int
    expected: int
    rows_before: int = 0
    sampled: int = 0


@dataclass(slots=True)
class _Plan:
    """Everything the gathers of one micro batch share."""

    pieces: list[_Piece] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)  # (start, stop) of each range, in order
    seq_lens: list[int] = field(default_factory=list)
    pad_from: int = 0  # the first padding position
    N: int = 0


def assemble(
    arena: Arena,
    micro_batch: MicroBatch,
    out: TensorBatch | None = None,
    tokens: Sequence[TokenRange] | None = None,
    layers: Sequence[int] | None = None,
    *,
    expert_parallel: int = 1,
    verify: bool = False,
) -> TensorBatch:
    """The arrays of one micro batch, in packing order, then padding.

    Args:
        out: a batch of an earlier call; its buffers are reused where they are large enough, its arrays overwritten.
        tokens: (sequence, start, stop) ranges, in order: a context-parallel rank's share (`zigzag`). Padding is then
            only what ranges of sequence len(samples) ask for. Only these rows are read.
        layers: global layer ids, in the order wanted: a pipeline stage's share. Only these are read.
        expert_parallel: shards the padding routes are spread over.
        verify: check the checksums of the row blocks that are touched.

    Raises LostPayload (a block is gone: which, whose), PayloadError (what is stored is not what the reference says).

    Example: batch = assemble(arena, micro_batch, out=batch) -> TensorBatch with tokens int32 [N], routing uint8 [N,
        48, 8]
    """
    if micro_batch.padding < 0:
        raise PayloadError.of(
            "padding",
            f"padding of {micro_batch.padding} positions: less than the rows there are",
            value=micro_batch.padding,
        )
    staging = out.staging if out is not None else Staging()
    with ExitStack() as views:
        handles = {handle: index for index, handle in enumerate(micro_batch.handles)}
        whose = {handle: name_of(sample) for sample in micro_batch.samples for handle in sample.handles}
        blocks = [views.enter_context(open_block(arena, handle, whose[handle])) for handle in handles]
        headers = [Header.unpack(view, f"{h!r} of {whose[h]}") for h, view in zip(handles, blocks, strict=True)]
        sources = _payload.Sources(blocks)
        views.callback(sources.release)
        job = _Job(sources, headers, staging, layers, expert_parallel)
        job.plan = _plan(micro_batch, handles, headers, tokens)
        batch = job.run(micro_batch)
        if verify:
            _verify(arena, job.touched, tuple(handles))
        return batch


def _verify(arena: Arena, touched: list[tuple[int, str, int, int]], handles: tuple[Handle, ...]) -> None:
    """Checks the row blocks that were read, and only those: a reference is not hurt by damage behind its
    cut (FR-01)."""
    for block, name, first, last in touched:
        if first < last:
            arena.get(handles[block], verify=True, field=name, rows=(first, last)).release()


def zigzag(seq_lens: Sequence[int], cp_size: int, cp_rank: int) -> list[TokenRange]:
    """The two ranges per sequence of one context-parallel rank: chunk r from the front and chunk r from the back.

    Example: zigzag([8, 4], 2, 0) -> [(0, 0, 2), (0, 6, 8), (1, 0, 1), (1, 3, 4)]; positions 0, 1, 6, 7 and 8, 11 of
        the row
    """
    ranges: list[TokenRange] = []
    for sequence, length in enumerate(seq_lens):
        if length % (2 * cp_size):
            raise ValueError(f"sequence {sequence} has {length} tokens, not a multiple of 2 x {cp_size} ranks")
        chunk = length // (2 * cp_size)
        ranges.append((sequence, cp_rank * chunk, (cp_rank + 1) * chunk))
        ranges.append((sequence, length - (cp_rank + 1) * chunk, length - cp_rank * chunk))
    return ranges


def _plan(
    micro_batch: MicroBatch, handles: dict[Handle, int], headers: list[Header], tokens: Sequence[TokenRange] | None
) -> _Plan:
    samples = micro_batch.samples
    lengths = [*micro_batch.seq_lens, micro_batch.padding]
    plan = _Plan(seq_lens=[0] * len(samples))
    for sample in samples:
        _check_segments(sample, handles, headers)
    ranges = tokens if tokens is not None else [(index, 0, length) for index, length in enumerate(lengths)]
    for sequence, start, stop in ranges:
        if not (0 <= sequence < len(lengths) and 0 <= start <= stop <= lengths[sequence]):
            raise PayloadError.of(
                "tokens", f"no range {(sequence, start, stop)} in sequences of {lengths}", value=(sequence, start, stop)
            )
        plan.positions.append((start, stop))
        if sequence < len(samples):
            if plan.pad_from < plan.N:
                raise PayloadError.of("tokens", "the padding's ranges come last", value=(sequence, start, stop))
            plan.pieces += _pieces(samples[sequence], start, stop, plan.N, handles)
            plan.seq_lens[sequence] += stop - start
            plan.pad_from = plan.N + stop - start
        plan.N += stop - start
    return plan


def _pieces(sample: Sample, start: int, stop: int, at: int, handles: dict[Handle, int]) -> Iterator[_Piece]:
    """The parts of positions [start, stop) of a sample, one per segment they touch."""
    first = 0
    for handle, low, high in sample.segments:
        a, b = max(start, first), min(stop, first + high - low)
        if a < b:
            offset = low - first
            yield _Piece(sample, handles[handle], a + offset, b + offset, at + a - start, max(0, min(sample.R, b) - a))
        first += high - low


def _check_segments(sample: Sample, handles: dict[Handle, int], headers: list[Header]) -> None:
    """A reference that names more than is stored is an error, never clamped (RR-03)."""
    for handle, start, stop in sample.segments:
        stored = headers[handles[handle]].tokens_here
        if not 0 <= start <= stop <= stored:
            raise PayloadError.of(
                "tokens", f"{name_of(sample)}: positions [{start}, {stop}) of a block of {stored}", stop, value=stored
            )
    total = sum(stop - start for _, start, stop in sample.segments)
    if total != sample.T:
        raise PayloadError.of("tokens", f"{name_of(sample)}: segments of {total} tokens, T = {sample.T}", value=total)


@dataclass(slots=True)
class _Job:
    """The gathers of one micro batch."""

    sources: _payload.Sources
    headers: list[Header]
    staging: Staging
    layers: Sequence[int] | None
    expert_parallel: int
    plan: _Plan = field(default_factory=_Plan)
    touched: list[tuple[int, str, int, int]] = field(
        default_factory=list
    )  # (block, column, first row, last row) that was read

    def run(self, micro_batch: MicroBatch) -> TensorBatch:
        plan, take = self.plan, self.staging.take
        loss_mask = self._loss_mask()
        fields: dict[str, Any] = {}
        covered: dict[str, NDArray[np.bool_]] = {}
        groups = micro_batch.fields or tuple(dict.fromkeys(name for s in micro_batch.samples for name in s.fields))
        for entry in (member for group in groups for member in members(group)):
            shape = self._row_shape(entry, micro_batch)
            if shape is not None:
                fields[entry.name], covered[entry.name] = self._field(entry, shape, micro_batch, loss_mask)
        positions = take("positions", (plan.N,), np.int32)
        np.concatenate(
            [np.empty(0, np.int32), *(np.arange(a, b, dtype=np.int32) for a, b in plan.positions)], out=positions
        )
        return TensorBatch(
            tokens=self._core("tokens", np.int32), positions=positions, loss_mask=loss_mask,
            logprobs=self._core("logprobs", np.float32), seq_lens=np.array(plan.seq_lens, np.int32), fields=fields,
            covered=covered, layers=self._layers(micro_batch), num_experts=self._num_experts(micro_batch),
            head_has_sampled=any(bool(s.meta.get("head_has_sampled")) for s in micro_batch.samples),
            staging=self.staging,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- core columns

    def _core(self, name: str, dtype: Any) -> NDArray[Any]:
        array = self.staging.take(name, (self.plan.N,), dtype)
        array[self.plan.pad_from :] = 0
        self._gather(
            [self._copy(p, self._column(p, name), p.start, p.at, p.stop - p.start) for p in self.plan.pieces], array
        )
        return array

    def _loss_mask(self) -> NDArray[np.bool_]:
        """Unpacks the bits, and counts each piece's sampled rows (what head and mask are aligned to)."""
        array = self.staging.take("loss_mask", (self.plan.N,), np.bool_)
        array[self.plan.pad_from :] = False
        counted = []
        for p in self.plan.pieces:
            offset = self._column(p, "loss_mask").offset
            self.touched.append((p.block, "loss_mask", 0, (p.stop + 7) // 8))
            self.sources.unpack_bits(p.block, offset, p.start, p.stop, array[p.at : p.at + p.stop - p.start])
            before = self.sources.count_bits(p.block, offset, 0, p.start)
            sampled = self.sources.count_bits(p.block, offset, p.start, p.stop)
            counted.append(_Piece(p.sample, p.block, p.start, p.stop, p.at, p.expected, before, sampled))
        self.plan.pieces = counted
        return array

    # ------------------------------------------------------------------------------------------------- fields

    def _field(
        self, entry: Field, shape: tuple[int, ...], micro_batch: MicroBatch, loss_mask: NDArray[np.bool_]
    ) -> tuple[Any, NDArray[np.bool_]]:
        """(the field's array or (values, counts), its coverage)."""
        covered = self.staging.take(f"{entry.name}/covered", (self.plan.N,), np.bool_)
        covered[:] = False
        spans = [
            span
            for p in self.plan.pieces
            if entry.group in p.sample.fields
            for span in self._spans(entry, p, loss_mask)
        ]
        for _, _, at, count in spans:
            covered[at : at + count] = True
        if entry.is_ragged:
            return self._ragged(entry, spans), covered
        experts = self._num_experts(micro_batch)
        dtype = entry.element(experts)
        array = self.staging.take(entry.name, (self.plan.N, *shape), dtype)
        copies: list[list[int]] = []
        for p, row, at, count in spans:
            copies += self._fixed(entry, p, row, at, count, array)
        self._gather(copies, array)
        self._fill(entry, array, covered, experts)
        return array, covered

    def _spans(self, entry: Field, p: _Piece, loss_mask: NDArray[np.bool_]) -> Iterator[tuple[_Piece, int, int, int]]:
        """(piece, first row in the block, first destination position, count): runs of rows that stay together."""
        if entry.align == "input":
            count = min(self._stored_rows(p, entry), p.stop) - p.start
            wanted = p.expected if entry.name == "routing" else max(count, p.stop - p.start - 1)
            if max(count, 0) != wanted:
                raise PayloadError.of(
                    entry.name,
                    f"{max(count, 0)} rows for positions [{p.start}, {p.stop}) of {name_of(p.sample)}, its "
                    f"reference says {wanted}",
                    value=count,
                )
            if count > 0:
                yield p, p.start, p.at, count
            return
        if self._stored_rows(p, entry) < p.rows_before + p.sampled:
            raise PayloadError.of(
                entry.name, f"{self._stored_rows(p, entry)} rows in {name_of(p.sample)}, its loss mask has more"
            )
        edges = np.flatnonzero(
            np.diff(np.concatenate(([0], loss_mask[p.at : p.at + p.stop - p.start].view(np.int8), [0])))
        )
        row = p.rows_before
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield p, row, p.at + low, high - low
            row += high - low

    def _stored_rows(self, p: _Piece, entry: Field) -> int:
        return (
            self._column(p, f"{entry.name}/offsets").shape[0] - 1
            if entry.is_ragged
            else self._column(p, entry.name).shape[0]
        )

    def _fixed(self, entry: Field, p: _Piece, row: int, at: int, count: int, array: NDArray[Any]) -> list[list[int]]:
        """Copies of `count` rows: one, or one per run of neighbouring layers where layers are selected."""
        column = self._column(p, entry.name)
        stored = np.dtype(column.dtype)
        if stored != array.dtype:
            raise PayloadError.of(
                entry.name, f"{stored} in {name_of(p.sample)}, {array.dtype} in this batch", value=column.dtype
            )
        selected = self.layers is not None and entry.layer_axis == 0
        shape = (*array.shape[1:],) if not selected else (len(self.headers[p.block].layers), *array.shape[2:])
        if column.shape[1:] != shape:
            raise PayloadError.of(
                entry.name,
                f"rows of {column.shape[1:]} in {name_of(p.sample)}, {shape} in this batch",
                value=column.shape,
            )
        if not selected:
            return [self._copy(p, column, row, at, count)]
        assert self.layers is not None
        slots = _slots(self.headers[p.block].layers, self.layers, name_of(p.sample))
        self.touched.append((p.block, column.name, row, row + count))
        width = column.row_nbytes // column.shape[1]
        start, stride = column.offset + row * column.row_nbytes, width * len(slots)
        return [
            [p.block, start + slot * width, column.row_nbytes, at * stride + index * width, stride, count, width * run]
            for index, slot, run in _runs(slots)
        ]

    def _fill(self, entry: Field, array: NDArray[Any], covered: NDArray[np.bool_], num_experts: int) -> None:
        """Padding first, then the other gaps, so that pad row p is the p-th of the padding whatever stands
        before it."""
        gaps = np.flatnonzero(~covered)
        gaps = np.roll(gaps, -int(np.searchsorted(gaps, self.plan.pad_from)))
        if len(gaps) and callable(entry.fill):
            array[gaps] = entry.fill(len(gaps), array.shape[1:], num_experts, self.expert_parallel)
        elif len(gaps):
            array[gaps] = entry.fill

    def _ragged(
        self, entry: Field, spans: list[tuple[_Piece, int, int, int]]
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        counts = self.staging.take(f"{entry.name}/counts", (self.plan.N,), np.int32)
        counts[:] = 0
        copies = []
        total = 0
        for p, row, at, count in spans:
            offsets = self._offsets(entry, p, row, count)
            counts[at : at + count] = np.diff(offsets)
            first, last = int(offsets[0]), int(offsets[-1])
            copies.append(self._copy(p, self._column(p, entry.name), first, total, last - first))
            total += last - first
        values = self.staging.take(entry.name, (total,), entry.element(0))
        self._gather(copies, values)
        return values, counts

    def _offsets(self, entry: Field, p: _Piece, row: int, count: int) -> NDArray[Any]:
        column = self._column(p, f"{entry.name}/offsets")
        offsets = np.empty(count + 1, column.dtype)
        self._gather([self._copy(p, column, row, 0, count + 1)], offsets)
        return offsets

    # --------------------------------------------------------------------------------------------- descriptors

    def _column(self, p: _Piece, name: str) -> Column:
        column = self.headers[p.block].columns.get(name)
        if column is None:
            raise PayloadError.of(name, f"not in the block of {name_of(p.sample)}")
        return column

    def _copy(self, p: _Piece, column: Column, row: int, at: int, count: int) -> list[int]:
        nbytes = column.row_nbytes
        self.touched.append((p.block, column.name, row, row + count))
        return [p.block, column.offset + row * nbytes, 0, at * nbytes, 0, 1, count * nbytes]

    def _gather(self, copies: list[list[int]], array: NDArray[Any]) -> None:
        if copies:
            self.sources.gather(np.array(copies, np.int64), array)

    # -------------------------------------------------------------------------------------------------- shapes

    def _row_shape(self, entry: Field, micro_batch: MicroBatch) -> tuple[int, ...] | None:
        """The assembled row shape; None if neither a sample nor the micro batch knows it (nothing to assemble)."""
        known = [s.meta["shapes"][entry.group] for s in micro_batch.samples if entry.group in s.meta.get("shapes", {})]
        if entry.group in micro_batch.shapes:
            known.append(micro_batch.shapes[entry.group])
        if not known:
            return None
        shape = tuple(known[0][:-1] if entry.dtype is None else known[0])
        if self.layers is not None and entry.layer_axis == 0:
            return (len(self.layers), *shape[1:])
        return shape

    def _num_experts(self, micro_batch: MicroBatch) -> int:
        shapes = [*(s.meta.get("shapes", {}) for s in micro_batch.samples), micro_batch.shapes]
        return next((int(s["routing"][-1]) for s in shapes if s.get("routing")), 0)

    def _layers(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        if self.layers is not None:
            return tuple(self.layers)
        return next((header.layers for header in self.headers if header.layers), ())


def _slots(stored: tuple[int, ...], wanted: Sequence[int], whose: str) -> list[int]:
    """Where the wanted global layers lie among the stored ones; never by position (RR-15)."""
    where = {layer: slot for slot, layer in enumerate(stored)}
    missing = [layer for layer in wanted if layer not in where]
    if missing:
        raise PayloadError.of(
            "layers", f"{missing} are not among the stored ones {list(stored)} of {whose}", value=missing
        )
    return [where[layer] for layer in wanted]


def _runs(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """(index, first slot, length) of each run of consecutive slots."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield start, slots[start], index - start
            start = index
