"""What an assembly reads and where it goes: token ranges -> pieces of blocks at destination positions.

Pure arithmetic over a micro batch and its blocks' headers, for assemble.py in a trainer rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shmrl.errors import PayloadError
from shmrl.payload.header import Header, name_of
from shmrl.types import Handle, MicroBatch, Sample

TokenRange = tuple[int, int, int]
"""(sequence, start, stop); the sequence behind the last one is the padding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [start, stop) of a block that go to destination positions from `at` on.

    routed: how many of them have a routing row, according to the sample.
    """

    sample: Sample
    block: int
    start: int
    stop: int
    at: int
    routed: int


@dataclass(slots=True)
class Plan:
    """Everything the gathers of one micro batch share.

    positions: (start, stop) of every range, in order. pad_from: the first padding position. N: all of them.

    Example: two samples of 37 and 24 tokens, padding 3 -> positions [(0, 37), (0, 24), (0, 3)], pad_from 61, N 64
    """

    seq_lens: list[int]
    pieces: list[Piece] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)
    pad_from: int = 0
    N: int = 0


def make_plan(
    micro_batch: MicroBatch, handles: dict[Handle, int], headers: list[Header], tokens: Sequence[TokenRange] | None
) -> Plan:
    samples = micro_batch.samples
    lengths = [*micro_batch.seq_lens, micro_batch.padding]
    plan = Plan([0] * len(samples))
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


def _pieces(sample: Sample, start: int, stop: int, at: int, handles: dict[Handle, int]) -> Iterator[Piece]:
    """The parts of positions [start, stop) of a sample, one per segment they touch."""
    first = 0
    for handle, low, high in sample.segments:
        a, b = max(start, first), min(stop, first + high - low)
        if a < b:
            offset = low - first
            yield Piece(sample, handles[handle], a + offset, b + offset, at + a - start, max(0, min(sample.R, b) - a))
        first += high - low


def _check_segments(sample: Sample, handles: dict[Handle, int], headers: list[Header]) -> None:
    """A reference that names more than is stored is an error, never clamped."""
    for handle, start, stop in sample.segments:
        stored = headers[handles[handle]].tokens_here
        if not 0 <= start <= stop <= stored:
            raise PayloadError.of(
                "tokens", f"{name_of(sample)}: positions [{start}, {stop}) of a block of {stored}", stop, value=stored
            )
    total = sum(stop - start for _, start, stop in sample.segments)
    if total != sample.T:
        raise PayloadError.of("tokens", f"{name_of(sample)}: segments of {total} tokens, T = {sample.T}", value=total)


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, first slot, length) of each run of consecutive slots."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield start, slots[start], index - start
            start = index


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
