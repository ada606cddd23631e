"""Samples and micro batches as compact positional lists, for msgpack frames between processes.

Env workers send samples, the orchestrator sends micro batches; neither grows with the number of tokens (a count of
20,000 takes two bytes more than one of 100). A sample with realistic names is under 400 bytes.
"""

from __future__ import annotations

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


def micro_batch_to_wire(batch: MicroBatch) -> list[Any]:
    """Example: [[sample, ...], 3, ["routing"], [[48, 8, 128]]]"""
    samples = [sample_to_wire(sample) for sample in batch.samples]
    return [samples, batch.padding, list(batch.fields), [[name, *shape] for name, shape in batch.shapes.items()]]


def micro_batch_from_wire(wire: list[Any] | tuple[Any, ...]) -> MicroBatch:
    """The micro batch of `micro_batch_to_wire`'s list; ValueError if it is none."""
    samples, padding, fields, shapes = wire
    return MicroBatch(
        samples=tuple(sample_from_wire(sample) for sample in samples),
        padding=padding,
        fields=tuple(fields),
        shapes={name: tuple(shape) for name, *shape in shapes},
    )
