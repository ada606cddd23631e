"""`assemble`: the only copy of a payload, from the mapped blocks into a trainer rank's staging buffers.

Called by a trainer rank for each micro batch of its share, before the step. Reads the blocks' headers, works out which
rows go where, and hands C one list of copies per field. What no sample covers gets the field's fill. Every view is
released before it returns; the caller says done() later, when all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import PayloadError
from shmrl.payload import _payload
from shmrl.payload.batch import Staging, TensorBatch
from shmrl.payload.header import Blocks, Column, Header, name_of, open_block
from shmrl.payload.plan import Piece, Plan, TokenRange, make_plan, runs
from shmrl.payload.registry import Field, members
from shmrl.types import Handle, MicroBatch


@dataclass(frozen=True, slots=True)
class _Span:
    """`count` rows of a field, from `row` on in the piece's block, that stay together at destination position `at`."""

    piece: Piece
    row: int
    at: int
    count: int


def assemble(
    arena: Blocks,
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
        arena: where the blocks are, or the file that `shmrl replay export` made of a step (`StepFile`).
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
        plan = make_plan(micro_batch, handles, headers, tokens)
        job = _Job(micro_batch, plan, sources, headers, staging, layers, expert_parallel)
        batch = job.run()
        if verify:
            _verify(arena, job.read, tuple(handles))
        return batch


def _verify(arena: Blocks, read: list[tuple[int, str, int, int]], handles: tuple[Handle, ...]) -> None:
    """Checks the row blocks that were read, and only those: damage behind a cut does not matter."""
    for block, name, first, last in read:
        if first < last:
            arena.get(handles[block], verify=True, field=name, rows=(first, last)).release()


@dataclass(slots=True)
class _Job:
    """The gathers of one micro batch."""

    micro_batch: MicroBatch
    plan: Plan
    sources: _payload.Sources
    headers: list[Header]
    staging: Staging
    layers: Sequence[int] | None
    expert_parallel: int
    read: list[tuple[int, str, int, int]] = field(default_factory=list)  # (block, column, first row, last row)

    def run(self) -> TensorBatch:
        plan, samples = self.plan, self.micro_batch.samples
        loss_mask = self._loss_mask()
        fields: dict[str, Any] = {}
        covered: dict[str, NDArray[np.bool_]] = {}
        groups = self.micro_batch.fields or tuple(dict.fromkeys(name for s in samples for name in s.fields))
        for entry in (member for group in groups for member in members(group)):
            shape = self._row_shape(entry)
            if shape is not None:
                fields[entry.name], covered[entry.name] = self._field(entry, shape, loss_mask)
        positions = self.staging.take("positions", (plan.N,), np.int32)
        np.concatenate(
            [np.arange(0), *(np.arange(a, b) for a, b in plan.positions)], out=positions, casting="same_kind"
        )
        return TensorBatch(
            tokens=self._core("tokens", np.int32), positions=positions, loss_mask=loss_mask,
            logprobs=self._core("logprobs", np.float32), seq_lens=np.array(plan.seq_lens, np.int32), fields=fields,
            covered=covered, layers=self._layers(), num_experts=self._num_experts(),
            head_has_sampled=any(bool(s.meta.get("head_has_sampled")) for s in samples),
            staging=self.staging,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- core columns

    def _core(self, name: str, dtype: Any) -> NDArray[Any]:
        array = self.staging.take(name, (self.plan.N,), dtype)
        array[self.plan.pad_from :] = 0
        copies = [self._copy(p, self._column(p, name), p.start, p.at, p.stop - p.start) for p in self.plan.pieces]
        self._gather(copies, array)
        return array

    def _loss_mask(self) -> NDArray[np.bool_]:
        array = self.staging.take("loss_mask", (self.plan.N,), np.bool_)
        array[self.plan.pad_from :] = False
        for p in self.plan.pieces:
            offset = self._column(p, "loss_mask").offset
            self.read.append((p.block, "loss_mask", 0, (p.stop + 7) // 8))
            self.sources.unpack_bits(p.block, offset, p.start, p.stop, array[p.at : p.at + p.stop - p.start])
        return array

    # ------------------------------------------------------------------------------------------------- fields

    def _field(
        self, entry: Field, shape: tuple[int, ...], loss_mask: NDArray[np.bool_]
    ) -> tuple[Any, NDArray[np.bool_]]:
        """(the field's array or (values, counts), its coverage)."""
        covered = self.staging.take(f"{entry.name}/covered", (self.plan.N,), np.bool_)
        covered[:] = False
        pieces = [p for p in self.plan.pieces if entry.group in p.sample.fields]
        aligned = self._fed if entry.align == "input" else self._sampled
        spans = [span for p in pieces for span in aligned(entry, p, loss_mask)]
        for span in spans:
            covered[span.at : span.at + span.count] = True
        if entry.is_ragged:
            return self._ragged(entry, spans, covered), covered
        array = self.staging.take(entry.name, (self.plan.N, *shape), entry.element(self._num_experts()))
        self._gather([copy for span in spans for copy in self._fixed(entry, span, array)], array)
        self._fill(entry, array, covered)
        return array, covered

    def _fed(self, entry: Field, p: Piece, loss_mask: NDArray[np.bool_]) -> Iterator[_Span]:
        """Input-aligned rows: as many as positions, but for the last token, which was never fed."""
        count = max(min(self._stored_rows(p, entry), p.stop) - p.start, 0)
        wanted = p.routed if entry.name == "routing" else max(count, p.stop - p.start - 1)
        if count != wanted:
            where = f"positions [{p.start}, {p.stop}) of {name_of(p.sample)}"
            raise PayloadError.of(entry.name, f"{count} rows for {where}, its reference says {wanted}", value=count)
        if count:
            yield _Span(p, p.start, p.at, count)

    def _sampled(self, entry: Field, p: Piece, loss_mask: NDArray[np.bool_]) -> Iterator[_Span]:
        """Rows of sampled tokens: one span for each run of set bits."""
        bits = loss_mask[p.at : p.at + p.stop - p.start]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], bits.view(np.int8), [0])))).tolist()
        if not edges:
            return
        row = self.sources.count_bits(p.block, self._column(p, "loss_mask").offset, 0, p.start)
        stored, last = self._stored_rows(p, entry), row + int(np.count_nonzero(bits))
        if stored < last:
            raise PayloadError.of(entry.name, f"{stored} rows in {name_of(p.sample)}, its loss mask needs {last}")
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            yield _Span(p, row, p.at + low, high - low)
            row += high - low

    def _stored_rows(self, p: Piece, entry: Field) -> int:
        rows = self._column(p, f"{entry.name}/offsets" if entry.is_ragged else entry.name).shape[0]
        return rows - entry.is_ragged

    def _fixed(self, entry: Field, span: _Span, array: NDArray[Any]) -> list[list[int]]:
        """Copies of a span's rows: one, or one per run of neighbouring layers where layers are selected."""
        p, header = span.piece, self.headers[span.piece.block]
        column = self._column(p, entry.name)
        selected = self.layers if entry.layer_axis == 0 else None
        row = array.shape[1:] if selected is None else (len(header.layers), *array.shape[2:])
        if column.shape[1:] != row or np.dtype(column.dtype) != array.dtype:
            have, want = f"{column.dtype} {column.shape[1:]}", f"{array.dtype.str} {row}"
            raise PayloadError.of(
                entry.name, f"rows of {have} in {name_of(p.sample)}, {want} in this batch", value=have
            )
        if selected is None:
            return [self._copy(p, column, span.row, span.at, span.count)]
        slots = _slots(header.layers, selected, name_of(p.sample))
        self.read.append((p.block, column.name, span.row, span.row + span.count))
        layer, src = column.row_nbytes // len(header.layers), column.row_nbytes
        start, dst = column.offset + span.row * src, layer * len(slots)
        return [
            [p.block, start + slot * layer, src, span.at * dst + index * layer, dst, span.count, layer * run]
            for index, slot, run in runs(slots)
        ]

    def _fill(self, entry: Field, array: NDArray[Any], covered: NDArray[np.bool_]) -> None:
        """Padding first, then the other gaps: pad row p is the p-th of the padding, whatever stands before it."""
        gaps = np.flatnonzero(~covered)
        gaps = np.roll(gaps, -int(np.searchsorted(gaps, self.plan.pad_from)))
        if len(gaps) and callable(entry.fill):
            array[gaps] = entry.fill(len(gaps), array.shape[1:], self._num_experts(), self.expert_parallel)
        elif len(gaps):
            array[gaps] = entry.fill

    def _ragged(
        self, entry: Field, spans: list[_Span], covered: NDArray[np.bool_]
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """(values one after the other in packing order, counts [N]). A piece's rows lie together in its block, so its
        offsets give the counts of all of them, and where their values start and end."""
        counts = self.staging.take(f"{entry.name}/counts", (self.plan.N,), np.int32)
        counts[:] = 0
        copies: list[list[int]] = []
        total = 0
        for _, together in groupby(spans, key=lambda span: span.piece.at):
            first, *others = together
            p = first.piece
            offsets = self._offsets(entry, p, first.row, first.count + sum(span.count for span in others))
            here = slice(p.at, p.at + p.stop - p.start)
            counts[here][covered[here]] = np.diff(offsets)
            start, stop = int(offsets[0]), int(offsets[-1])
            copies.append(self._copy(p, self._column(p, entry.name), start, total, stop - start))
            total += stop - start
        values = self.staging.take(entry.name, (total,), entry.element(0))
        self._gather(copies, values)
        return values, counts

    def _offsets(self, entry: Field, p: Piece, row: int, count: int) -> NDArray[Any]:
        column = self._column(p, f"{entry.name}/offsets")
        offsets = np.empty(count + 1, column.dtype)
        self._gather([self._copy(p, column, row, 0, count + 1)], offsets)
        return offsets

    # --------------------------------------------------------------------------------------------- descriptors

    def _column(self, p: Piece, name: str) -> Column:
        column = self.headers[p.block].columns.get(name)
        if column is None:
            raise PayloadError.of(name, f"not in the block of {name_of(p.sample)}")
        return column

    def _copy(self, p: Piece, column: Column, row: int, at: int, count: int) -> list[int]:
        nbytes = column.row_nbytes
        self.read.append((p.block, column.name, row, row + count))
        return [p.block, column.offset + row * nbytes, 0, at * nbytes, 0, 1, count * nbytes]

    def _gather(self, copies: list[list[int]], array: NDArray[Any]) -> None:
        if copies:
            self.sources.gather(np.array(copies, np.int64), array)

    # -------------------------------------------------------------------------------------------------- shapes

    def _shapes(self) -> Iterator[dict[str, tuple[int, ...]]]:
        yield from (sample.meta.get("shapes", {}) for sample in self.micro_batch.samples)
        yield self.micro_batch.shapes

    def _row_shape(self, entry: Field) -> tuple[int, ...] | None:
        """The assembled row shape; None if neither a sample nor the micro batch knows it (nothing to assemble)."""
        known = next((shapes[entry.group] for shapes in self._shapes() if entry.group in shapes), None)
        if known is None:
            return None
        shape = tuple(known[:-1] if entry.dtype is None else known)
        return (len(self.layers), *shape[1:]) if self.layers is not None and entry.layer_axis == 0 else shape

    def _num_experts(self) -> int:
        return next((int(shapes["routing"][-1]) for shapes in self._shapes() if shapes.get("routing")), 0)

    def _layers(self) -> tuple[int, ...]:
        stored = next((header.layers for header in self.headers if header.layers), ())
        return stored if self.layers is None else tuple(self.layers)


def _slots(stored: tuple[int, ...], wanted: Sequence[int], whose: str) -> list[int]:
    """Where the wanted global layers lie among the stored ones; never by position."""
    where = {layer: slot for slot, layer in enumerate(stored)}
    missing = [layer for layer in wanted if layer not in where]
    if missing:
        raise PayloadError.of(
            "layers", f"{missing} are not among the stored ones {list(stored)} of {whose}", value=missing
        )
    return [where[layer] for layer in wanted]
