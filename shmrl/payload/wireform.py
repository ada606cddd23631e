"""Samples and micro batches as compact positional lists, for msgpack frames between processes.

Env workers send samples, the orchestrator sends micro batches; neither grows with the number of tokens (a count of
20,000 takes two bytes more than one of 100). A sample with realistic names is under 400 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmrl.payload.header import SAMPLE_META
from shmrl.types import Handle, MicroBatch, Sample


def sample_to_wire(sample: Sample) -> list[Any]:
    """Example: [[[handle, 0, 37]], 37, 12, 36, ["routing", "mask"], [48, 8, 128], ..., 0.83, 1.0]"""
    known = [sample.meta.get(key) for key in SAMPLE_META]
    other = {key: value for key, value in sample.meta.items() if key not in SAMPLE_META and key != "shapes"}
    shapes = sample.meta.get("shapes", {})
    return [
        [[bytes(handle), start, stop] for handle, start, stop in sample.segments],
        sample.T, sample.S, sample.R, list(sample.fields), [list(shapes.get(name, ())) for name in sample.fields],
        known, other, sample.advantage, sample.weight,
    ]  # fmt: skip


def sample_from_wire(wire: list[Any] | tuple[Any, ...]) -> Sample:
    """The sample of `sample_to_wire`'s list; ValueError if it is none."""
    segments, T, S, R, fields, shapes, known, other, advantage, weight = wire
    meta = {key: value for key, value in zip(SAMPLE_META, known, strict=True) if value is not None}
    meta["shapes"] = {name: tuple(shape) for name, shape in zip(fields, shapes, strict=True)}
    return Sample(
        segments=tuple((Handle(handle), start, stop) for handle, start, stop in segments),
        T=T, S=S, R=R, fields=tuple(fields), meta={**meta, **other}, advantage=advantage, weight=weight,
    )  # fmt: skip


def micro_batches_to_wire(batches: Sequence[MicroBatch]) -> list[Any]:
    """A rank's micro batches, with what they and their samples have in common (fields, shapes, meta) sent once.

    Example: [[[[sample, ...], 3, None, None], ...], [["routing"], [["routing", 48, 8, 128]]], [["routing"], [[48, 8,
    128]]], ["reverse-text", ...]]
    """
    wires = [_batch_to_wire(batch) for batch in batches]
    samples = [sample for wire in wires for sample in wire[0]]
    return [wires, _hoist(wires, _BATCH_LAYOUT), _hoist(samples, _SAMPLE_LAYOUT), _hoist_meta(samples)]


def micro_batches_from_wire(wire: list[Any] | tuple[Any, ...]) -> list[MicroBatch]:
    """The micro batches of `micro_batches_to_wire`'s list; ValueError if it is none."""
    batches, batch_layout, sample_layout, common = wire
    return [_batch_from_wire(_lower(batch, _BATCH_LAYOUT, batch_layout), sample_layout, common) for batch in batches]


def _batch_to_wire(batch: MicroBatch) -> list[Any]:
    shapes = [[name, *shape] for name, shape in batch.shapes.items()]
    return [[sample_to_wire(sample) for sample in batch.samples], batch.padding, list(batch.fields), shapes]


def _batch_from_wire(wire: list[Any], layout: list[Any] | None, common: list[Any]) -> MicroBatch:
    samples, padding, fields, shapes = wire
    lowered = [_lower(sample, _SAMPLE_LAYOUT, layout) for sample in samples]
    return MicroBatch(
        samples=tuple(sample_from_wire(_lower_meta(sample, common)) for sample in lowered),
        padding=padding,
        fields=tuple(fields),
        shapes={name: tuple(shape) for name, *shape in shapes},
    )


_BATCH_LAYOUT = slice(2, 4)  # fields and shapes in a micro batch's list
_SAMPLE_LAYOUT = slice(4, 6)  # fields and shapes in a sample's
_KNOWN = 6  # the place of the known meta in a sample's list


def _hoist(rows: list[list[Any]], where: slice) -> list[Any] | None:
    """Fields and shapes, if all rows have the same; taken out of each then. None leaves them where they are."""
    if not rows or any(row[where] != rows[0][where] for row in rows):
        return None
    layout = rows[0][where]
    for row in rows:
        row[where] = [None] * len(layout)
    return layout


def _lower(row: list[Any], where: slice, layout: list[Any] | None) -> list[Any]:
    """The row with what was hoisted put back."""
    return row if layout is None else [*row[: where.start], *layout, *row[where.stop :]]


def _hoist_meta(samples: list[list[Any]]) -> list[Any]:
    """Per known key the value that all samples have, taken out of each; None where they differ or have none."""
    columns = list(zip(*(sample[_KNOWN] for sample in samples), strict=True))
    common = [column[0] if all(value == column[0] for value in column) else None for column in columns]
    for sample in samples:
        known = zip(sample[_KNOWN], common, strict=True)
        sample[_KNOWN] = [value if shared is None else None for value, shared in known]
    return common


def _lower_meta(sample: list[Any], common: list[Any]) -> list[Any]:
    known = [own if shared is None else shared for own, shared in zip(sample[_KNOWN], common, strict=True)]
    return [*sample[:_KNOWN], known, *sample[_KNOWN + 1 :]]
