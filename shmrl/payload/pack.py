"""`pack`: samples -> micro batches per rank, from metadata alone.

Called by the orchestrator once per step; reads no block. First-fit decreasing says how many micro batches are needed;
the samples are then spread over that many (rounded up to a multiple of the ranks) so that estimated FLOPs are level,
with first-fit's own result where spreading does not fit. Every rank gets the same number; dummies make up the
difference.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmrl.errors import PayloadError
from shmrl.payload.header import name_of
from shmrl.types import MicroBatch, Sample

ATTENTION_SPAN = 12_288
"""Sequence length at which attention costs as much as the rest of a layer: about 6 x hidden size, at 2,048."""


@dataclass(slots=True)
class _Bin:
    """One micro batch being filled. routed: True / False once a sample with loss tokens decided it, None before."""

    samples: list[Sample] = field(default_factory=list)
    tokens: int = 0
    flops: float = 0.0
    routed: bool | None = None

    def takes(self, sample: Sample, seq_len: int) -> bool:
        if self.tokens + sample.T > seq_len:
            return False
        kind = _routed(sample)
        return kind is None or self.routed is None or kind == self.routed

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.tokens += sample.T
        self.flops += estimated_flops(sample)
        kind = _routed(sample)
        self.routed = self.routed if kind is None else kind


def pack(
    samples: Sequence[Sample], *, seq_len: int, num_ranks: int, pad_to_multiple_of: int = 1
) -> list[list[MicroBatch]]:
    """Micro batches of at most seq_len tokens, one list per rank, all of one length; every sample in exactly one.

    Samples with and without routing never share a micro batch (one without loss tokens may join either); with and
    without head or mask they do. Padding brings each micro batch to a multiple of pad_to_multiple_of.

    Raises PayloadError for a sample of 0 or more than seq_len tokens and for samples that cannot be trained together
    (log-probability modes, head layouts, models), naming both sources; ValueError for impossible sizes.

    Example: pack(five_samples, seq_len=4096, num_ranks=4) -> 4 lists of 2 micro batches or fewer, equally many in each
    """
    if num_ranks < 1 or pad_to_multiple_of < 1 or seq_len < 1 or seq_len % pad_to_multiple_of:
        raise ValueError(
            f"cannot pack {seq_len} tokens, padded to multiples of {pad_to_multiple_of}, for {num_ranks} ranks"
        )
    for sample in samples:
        if not 0 < sample.T <= seq_len:
            raise PayloadError.of(
                "tokens", f"{name_of(sample)} has {sample.T} tokens, a micro batch holds 1 to {seq_len}", value=sample.T
            )
    check_compatible(samples)
    bins = _fill(samples, seq_len, num_ranks)
    shapes, fields = _shapes(samples), _fields(samples)
    ranks: list[list[_Bin]] = [[] for _ in range(num_ranks)]
    per_rank = -(-len(bins) // num_ranks)
    for item in sorted(bins, key=lambda b: -b.flops):
        min((r for r in ranks if len(r) < per_rank), key=lambda r: sum(b.flops for b in r)).append(item)
    dummy = MicroBatch((), padding=pad_to_multiple_of, fields=fields, shapes=shapes)
    return [
        [_micro_batch(b, pad_to_multiple_of, fields, shapes) for b in rank] + [dummy] * (per_rank - len(rank))
        for rank in ranks
    ]


def estimated_flops(sample: Sample) -> float:
    """Relative cost of a forward and backward pass: linear in T, plus attention's quadratic part."""
    return sample.T * (1.0 + sample.T / ATTENTION_SPAN)


def check_compatible(samples: Iterable[Sample]) -> None:
    """PayloadError naming two sources whose samples cannot share a step: logprobs mode, head layout, row shapes."""
    seen: dict[str, tuple[Any, Sample]] = {}
    for sample in samples:
        facts: dict[str, Any] = {f"{name} row shape": shape for name, shape in sample.meta.get("shapes", {}).items()}
        if sample.S and sample.meta.get("logprobs_mode") is not None:
            facts["logprobs mode"] = sample.meta["logprobs_mode"]
        if "head" in sample.fields:
            facts["head_has_sampled"] = bool(sample.meta.get("head_has_sampled"))
        for what, value in facts.items():
            first, other = seen.setdefault(what, (value, sample))
            if tuple_of(first) != tuple_of(value):
                raise PayloadError.of(
                    what,
                    f"{what} differs: {first!r} in {name_of(other)}, {value!r} in {name_of(sample)}; these "
                    "sources cannot be trained together",
                    value=value,
                )


def tuple_of(value: Any) -> Any:
    """Shapes compare equal as lists or tuples."""
    return tuple(value) if isinstance(value, list) else value


def _routed(sample: Sample) -> bool | None:
    """Which kind of micro batch a sample needs; None if either will do."""
    return "routing" in sample.fields if sample.S else None


def _fill(samples: Sequence[Sample], seq_len: int, num_ranks: int) -> list[_Bin]:
    """First-fit decreasing, then levelled. Samples that decide a bin's kind come first, the others find it decided."""
    order = sorted(samples, key=lambda s: (_routed(s) is None, -s.T))
    smallest = min((sample.T for sample in samples), default=0)
    bins: list[_Bin] = []
    open_bins: list[_Bin] = []
    for sample in order:
        target = next((b for b in open_bins if b.takes(sample, seq_len)), None)
        if target is None:
            target = _Bin()
            bins.append(target)
            open_bins.append(target)
        target.add(sample)
        if target.tokens + smallest > seq_len:
            open_bins.remove(target)
    return _level(order, bins, seq_len, -len(bins) % num_ranks) or bins


def _level(order: Sequence[Sample], first_fit: list[_Bin], seq_len: int, spare: int) -> list[_Bin] | None:
    """The same samples over `spare` more bins, each into the cheapest that takes it; None if one fits nowhere.

    Kinds are fixed beforehand, in first-fit's proportion; spare bins go to the kind with the most work per bin.
    """
    kinds = [b.routed for b in first_fit]
    work = {kind: sum(b.flops for b in first_fit if b.routed == kind) for kind in set(kinds)}
    for _ in range(spare):
        kinds.append(max(work, key=lambda kind: work[kind] / kinds.count(kind)))
    bins = [_Bin(routed=kind) for kind in kinds]
    cheapest = [(0.0, index) for index in range(len(bins))]
    for sample in sorted(order, key=lambda s: (_routed(s) is None, -estimated_flops(s))):
        passed = []
        while cheapest and not bins[cheapest[0][1]].takes(sample, seq_len):
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        index = cheapest[0][1]
        bins[index].add(sample)
        heapq.heapreplace(cheapest, (bins[index].flops, index))
        for entry in passed:
            heapq.heappush(cheapest, entry)
    return [b for b in bins if b.samples]


def _micro_batch(item: _Bin, multiple: int, fields: tuple[str, ...], shapes: dict[str, tuple[int, ...]]) -> MicroBatch:
    have = tuple(name for name in fields if name != "routing" or item.routed or _all_routed(item))
    return MicroBatch(
        tuple(item.samples), padding=-item.tokens % multiple, fields=have, shapes={n: shapes[n] for n in have}
    )


def _all_routed(item: _Bin) -> bool:
    return item.routed is None and all("routing" in sample.fields for sample in item.samples)


def _fields(samples: Sequence[Sample]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for sample in samples for name in sample.fields))


def _shapes(samples: Sequence[Sample]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = dict.fromkeys(_fields(samples), ())
    for sample in samples:
        found |= {name: tuple(shape) for name, shape in sample.meta.get("shapes", {}).items() if name in sample.fields}
    return found
