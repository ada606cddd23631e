"""What the branches of one request begin with, stored once: `SharedRows`.

Used by an env worker, which has all of a request's branches when it encodes the first: those of one episode, or of a
whole group that it ran. Rows are shared where tokens and routing are the same byte for byte: where an engine routed
the same prompt differently the second time, both are stored. Nothing that was sampled is shared, so a shared block
has neither heads nor masks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import PayloadError
from shmrl.payload.branch import Branch
from shmrl.payload.encode import encode
from shmrl.payload.routing import Stitched
from shmrl.types import Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena

MIN_SHARED_NBYTES = 64 << 10
"""What a branch must save before it is worth a further block: 170 rows of 48 layers x top-8."""


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A branch's positions before its first sampled token: int32 [n] ids, and their routing rows if it is captured.

    Example: Opening(tokens, Stitched(..., shape=(30_000, 48, 8), ...), layers=range(48))
    """

    tokens: NDArray[np.int32]
    routing: Stitched | None = None
    layers: tuple[int, ...] = ()

    @property
    def row_nbytes(self) -> int:
        """Bytes that one position takes in a block: id, log-probability, routing."""
        routing = self.routing
        return 8 + (0 if routing is None else routing.shape[1] * routing.shape[2] * routing.dtype.itemsize)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal for routing rows to mean the same."""
        return self.layers, self.routing and (self.routing.shape[1:], self.routing.num_experts)

    def branch(self, n: int) -> Branch:
        """The first n positions, to be encoded."""
        zeros = np.zeros(n, np.float32)
        if self.routing is None:
            return Branch(self.tokens[:n], zeros.astype(np.bool_), zeros)
        return Branch(
            self.tokens[:n], zeros.astype(np.bool_), zeros, routing=self.routing.first(n), layers=self.layers,
            num_experts=self.routing.num_experts,
        )  # fmt: skip

    def common(self, other: Opening, start: int) -> int:
        """How many first positions of both are the same; the first `start` are known to be."""
        if self.layout != other.layout:
            return start
        stop = min(len(self.tokens), len(other.tokens))
        stop = start + _equal(self.tokens[start:stop], other.tokens[start:stop])
        if self.routing is None or other.routing is None:
            return stop
        step = _rows_worth_a_block(self)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            try:
                same = _equal(self.routing.rows(low, high), other.routing.rows(low, high))
            except PayloadError:  # one of them does not encode, and its own episode will say so
                return low
            if same < high - low:
                return low + same
        return stop


def _rows_worth_a_block(opening: Opening) -> int:
    return -(-MIN_SHARED_NBYTES // opening.row_nbytes)


def _equal(a: NDArray[Any], b: NDArray[Any]) -> int:
    """How many first rows of two arrays of one shape are equal."""
    differ = (a != b).any(axis=tuple(range(1, a.ndim)))
    return int(np.argmax(differ)) if differ.any() else len(a)


@dataclass(slots=True, eq=False)
class _Shared:
    """Positions up to `stop` that some branches share; those up to the parent's stop are in the parent's blocks."""

    opening: Opening
    stop: int
    parent: _Shared | None
    sample: Sample | None = None


class SharedRows:
    """The shared blocks of one request, each stored under `tag` when the first branch that needs it is encoded.

    They belong to the samples that refer to them: whoever adopts those has them. The tag must be one under which the
    whole request is discarded when it fails, and none that an episode alone is discarded by.

    Args: openings: of every branch that may share, by a key of the caller's.

    Example:
        shared = SharedRows(arena, "run/source/g7", {(0, 0): opening, (1, 0): opening_of_its_sibling})
        sample = encode(arena, branch, "run/source/g7/1", shared.prefix((1, 0)))
        shared.close([sample])
    """

    def __init__(self, arena: Arena, tag: str, openings: Mapping[Hashable, Opening]) -> None:
        self._arena, self._tag = arena, tag
        self._of: dict[Hashable, _Shared] = {}
        self._all: list[_Shared] = []
        self._split(openings, list(openings), None)

    def prefix(self, key: Hashable, **limits: Any) -> tuple[Sample, int] | None:
        """What `encode` takes as the prefix of this branch; stores it first where nobody has. limits: encode's.

        Raises what encode does: the branch fails then, and the next one tries again.
        """
        shared = self._of.get(key)
        return None if shared is None else (self._stored(shared, limits), shared.stop)

    def close(self, samples: Iterable[Sample]) -> None:
        """Everything is encoded, or failed: free what none of these samples refers to. Idempotent."""
        used = {handle for sample in samples for handle in sample.handles}
        unused = []
        for shared in self._all:
            if shared.sample is not None and (own := shared.sample.segments[-1][0]) not in used:
                unused.append(own)
                shared.sample = None
        self._arena.free(unused)

    def _stored(self, shared: _Shared, limits: Mapping[str, Any]) -> Sample:
        if shared.sample is None:
            parent = shared.parent
            prefix = None if parent is None else (self._stored(parent, limits), parent.stop)
            shared.sample = encode(self._arena, shared.opening.branch(shared.stop), self._tag, prefix, **limits)
        return shared.sample

    def _split(self, openings: Mapping[Hashable, Opening], keys: Sequence[Hashable], parent: _Shared | None) -> None:
        """Those that go on like the first one share what all of them have, and are split further behind it; the
        others are split among themselves."""
        start = 0 if parent is None else parent.stop
        while len(keys) > 1:
            first, *others = keys
            worth = start + _rows_worth_a_block(openings[first])
            same = {key: openings[first].common(openings[key], start) for key in others}
            near = [key for key in others if same[key] >= worth]
            if near:
                shared = _Shared(openings[first], min(same[key] for key in near), parent)
                self._all.append(shared)
                self._of |= dict.fromkeys([first, *near], shared)
                self._split(openings, [first, *near], shared)
            keys = [key for key in others if same[key] < worth]
