"""`pack`: samples -> micro batches per rank, from metadata alone.

Called by the orchestrator once per step; reads no block. Best-fit decreasing says how many micro batches are needed;
the samples are then spread over that many (rounded up to a multiple of the ranks) so that estimated FLOPs are level,
with best-fit's own result where spreading does not fit. Every rank gets the same number; dummies make up the
difference.

Where samples lie on several nodes, a node's samples share micro batches with each other as far as the work stays level:
a node that is lost before its blocks are read costs the micro batches that its samples are in.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shmrl.errors import PayloadError
from shmrl.payload.header import name_of
from shmrl.types import MicroBatch, Sample

K = TypeVar("K", bound=Hashable)

ATTENTION_SPAN = 12_288
"""Sequence length at which attention costs as much as the rest of a layer: about 6 x hidden size, at 2,048."""
UNEVEN = 1.1
"""How much more work the busiest rank may have for the sake of micro batches whose samples lie on one node."""


@dataclass(slots=True, eq=False)
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
    shapes, fields = _shapes(samples), _fields(samples)
    ranks = _shared_out(_fill(samples, seq_len, num_ranks), num_ranks)
    per_rank = max(map(len, ranks))
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


def _shared_out(bins: Sequence[_Bin], num_ranks: int) -> list[list[_Bin]]:
    """Each rank's bins: at most as many as the others', the costliest first and to whoever has the least work."""
    ranks: list[list[_Bin]] = [[] for _ in range(num_ranks)]
    per_rank = -(-len(bins) // num_ranks)
    least = [(0.0, index) for index in range(num_ranks)]  # of the ranks that take another
    for item in sorted(bins, key=lambda b: -b.flops):
        work, index = heapq.heappop(least)
        ranks[index].append(item)
        if len(ranks[index]) < per_rank:
            heapq.heappush(least, (work + item.flops, index))
    return ranks


def _work(bins: Iterable[_Bin]) -> float:
    return sum(b.flops for b in bins)


def _fill(samples: Sequence[Sample], seq_len: int, num_ranks: int) -> list[_Bin]:
    """Best-fit decreasing, then levelled: by node where no rank gets more than UNEVEN times the work for it."""
    bins = _best_fit(samples, seq_len)
    level = _level(samples, _shelves(bins, -len(bins) % num_ranks), seq_len) or bins
    if len({_node(sample) for sample in samples}) < 2:
        return level
    count = max(len(bins), 2)  # no node is to take a whole step along
    by_node = _level(samples, _shelves(bins, count + -count % num_ranks - len(bins), by_node=True), seq_len)
    if by_node is None or _busiest(by_node, num_ranks) > UNEVEN * _busiest(level, num_ranks):
        return level
    return by_node


def _busiest(bins: Sequence[_Bin], num_ranks: int) -> float:
    return max(map(_work, _shared_out(bins, num_ranks)))


def _node(sample: Sample) -> str:
    """Where it lies; what it shares with others lies there, too."""
    return sample.segments[-1][0].origin


def _best_fit(samples: Sequence[Sample], seq_len: int) -> list[_Bin]:
    """Each into the fullest bin that takes it. Samples that decide a bin's kind come first, the others find it
    decided."""
    bins: list[_Bin] = []
    rooms: defaultdict[bool | None, list[tuple[int, int]]] = defaultdict(list)  # (tokens left, bin), sorted, by kind
    for sample in sorted(samples, key=lambda s: (_routed(s) is None, -s.T)):
        kind = _routed(sample)
        places = [(one, bisect_left(rooms[one], (sample.T,))) for one in (list(rooms) if kind is None else [kind])]
        places = [(one, at) for one, at in places if at < len(rooms[one])]
        if places:
            kind, at = min(places, key=lambda place: rooms[place[0]][place[1]])
            left, index = rooms[kind].pop(at)
        else:
            left, index = seq_len, len(bins)
            bins.append(_Bin())
        bins[index].add(sample)
        insort(rooms[kind], (left - sample.T, index))
    return bins


class _Shelf:
    """Bins of one kind for the samples of some nodes, the cheapest in front."""

    def __init__(self, routed: bool | None, nodes: Iterable[str], count: int) -> None:
        self.nodes = frozenset(nodes)
        self.bins = [_Bin(routed=routed) for _ in range(count)]
        self._order = [(0.0, index) for index in range(count)]  # and places that a bin has left since

    def cheapest(self, sample: Sample, seq_len: int) -> int | None:
        """The bin that takes it."""
        passed, found = [], None
        while self._order and found is None:
            flops, index = heapq.heappop(self._order)
            if flops == self.bins[index].flops:
                passed.append((flops, index))
                found = index if self.bins[index].takes(sample, seq_len) else None
        for place in passed:
            heapq.heappush(self._order, place)
        return found

    def add(self, index: int, sample: Sample) -> None:
        self.bins[index].add(sample)
        heapq.heappush(self._order, (self.bins[index].flops, index))


def _shelves(best_fit: Sequence[_Bin], spare: int, by_node: bool = False) -> list[_Shelf]:
    """As many bins as best-fit took and `spare` more, all empty: of its kinds in its proportion, and by_node of the
    nodes in that of their work; a bin is for several nodes where there are fewer bins."""
    kinds = Counter(b.routed for b in best_fit)
    _deal(spare, kinds, {kind: _work(b for b in best_fit if b.routed == kind) for kind in kinds})
    shelves = []
    for kind, count in kinds.items():
        work: defaultdict[str, float] = defaultdict(float)
        for sample in (sample for b in best_fit if b.routed == kind for sample in b.samples):
            work[_node(sample)] += estimated_flops(sample)
        groups = _groups(work, count if by_node else 1)
        bins = Counter(range(len(groups)))
        _deal(count - len(groups), bins, {i: sum(work[node] for node in group) for i, group in enumerate(groups)})
        shelves += [_Shelf(kind, group, bins[i]) for i, group in enumerate(groups)]
    return shelves


def _deal(count: int, counts: Counter[K], work: Mapping[K, float]) -> None:
    """So many more, each to whoever has the most work for each that it has."""
    for _ in range(count):
        counts[max(work, key=lambda key: work[key] / counts[key])] += 1


def _groups(work: Mapping[str, float], most: int) -> list[list[str]]:
    """Nodes in groups of like work, at most so many."""
    groups: list[list[str]] = [[] for _ in range(min(most, len(work)))]
    for node in sorted(work, key=lambda node: -work[node]):
        min(groups, key=lambda group: sum(work[one] for one in group)).append(node)
    return groups


def _level(samples: Sequence[Sample], shelves: Sequence[_Shelf], seq_len: int) -> list[_Bin] | None:
    """Each sample into the cheapest bin for its node that takes it, else into the cheapest of all; None if one fits
    nowhere."""
    for sample in sorted(samples, key=lambda s: (_routed(s) is None, -estimated_flops(s))):
        theirs = [shelf for shelf in shelves if _node(sample) in shelf.nodes]
        place = _cheapest(sample, theirs, seq_len) or _cheapest(sample, shelves, seq_len)
        if place is None:
            return None
        shelf, index = place
        shelf.add(index, sample)
    return [b for shelf in shelves for b in shelf.bins if b.samples]


def _cheapest(sample: Sample, shelves: Iterable[_Shelf], seq_len: int) -> tuple[_Shelf, int] | None:
    found = [(shelf, index) for shelf in shelves if (index := shelf.cheapest(sample, seq_len)) is not None]
    return min(found, key=lambda place: place[0].bins[place[1]].flops, default=None)


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
