"""What branches begin with, stored once: `SharedRows`.

Used by an env worker, which has all of a request's branches when it encodes the first: those of one episode, or of a
whole group that it ran. What an earlier request of the group has stored is read where it lies, in the arena. Rows are
shared where tokens and routing are the same byte for byte: where an engine routed the same prompt differently the
second time, both are stored. Nothing that was sampled is shared, so a shared block has neither heads nor masks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import LostPayload, PayloadError
from shmrl.payload.branch import Branch
from shmrl.payload.encode import encode
from shmrl.payload.header import Column, name_of, open_block, read_header, read_tokens
from shmrl.payload.routing import Stitched
from shmrl.types import Handle, Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena

MIN_SHARED_NBYTES = 64 << 10
"""What a branch must save before it is worth a further block: 170 rows of 48 layers x top-8."""
MAX_STORED = 8
"""Beginnings that a group's episodes may leave for their siblings: an engine that never routes a prompt the same way
twice would only cut blocks in two."""


class Rows(Protocol):
    """Routing rows [n, L, K], wherever they lie."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def num_experts(self) -> int: ...
    def rows(self, start: int, stop: int) -> NDArray[Any]: ...


class StoredRows:
    """The routing rows of a sample, read in its blocks. LostPayload if one is gone."""

    def __init__(self, arena: Arena, sample: Sample) -> None:
        self._arena, self._whose = arena, name_of(sample)
        self._pieces: list[tuple[int, int, int, Handle, Column]] = []  # first and last position, first row, where
        at = 0
        for handle, start, stop in sample.segments:
            header = read_header(arena, handle)
            column = header.columns["routing"]
            self._pieces.append((at, at + stop - start, start, handle, column))
            at += stop - start
        self.shape = (at, *column.shape[1:])
        self.dtype, self.num_experts, self.layers = np.dtype(column.dtype), header.num_experts, header.layers

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start .. stop, in place where they are of one block."""
        found = []
        for first, last, row, handle, column in self._pieces:
            low, high = max(start, first), min(stop, last)
            if low < high:
                with open_block(self._arena, handle, self._whose) as view:
                    found.append(column.of(view)[row + low - first : row + high - first])
        return found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A branch's positions before its first sampled token: int32 [n] ids, and their routing rows if it is captured.

    Example: Opening(tokens, Stitched(..., shape=(30_000, 48, 8), ...), layers=range(48))
    """

    tokens: NDArray[np.int32]
    routing: Rows | None = None
    layers: tuple[int, ...] = ()

    @classmethod
    def stored(cls, arena: Arena, sample: Sample) -> Opening:
        """What `SharedRows` stored of one. LostPayload if a block is gone."""
        tokens = read_tokens(arena, sample)
        if "routing" not in sample.fields:
            return cls(tokens)
        rows = StoredRows(arena, sample)
        return cls(tokens, rows, rows.layers)

    @property
    def row_nbytes(self) -> int:
        """Bytes that one position takes in a block: id, log-probability, routing."""
        routing = self.routing
        return 8 + (0 if routing is None else routing.shape[1] * routing.shape[2] * routing.dtype.itemsize)

    @property
    def is_worth_a_block(self) -> bool:
        """Whether a branch that has all of it in another block saves enough."""
        return len(self.tokens) >= _rows_worth_a_block(self)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal for routing rows to mean the same."""
        return self.layers, self.routing and (self.routing.shape[1:], self.routing.num_experts)

    def branch(self, n: int) -> Branch:
        """The first n positions, to be encoded."""
        zeros = np.zeros(n, np.float32)
        if self.routing is None:
            return Branch(self.tokens[:n], zeros.astype(np.bool_), zeros)
        assert isinstance(self.routing, Stitched)  # what is stored is not encoded again
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
            except (PayloadError, LostPayload):  # one does not encode, as its own episode will say, or is gone
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

    Args:
        openings: of every branch that may share, by a key of the caller's.
        earlier: what earlier requests have stored that the caller knows to stay, as far as it is there.
        lasting: store what later requests may share, too: every opening to its end.

    Example:
        shared = SharedRows(arena, "run/source/g7", {(0, 0): opening, (1, 0): opening_of_its_sibling})
        sample = encode(arena, branch, "run/source/g7/1", shared.prefix((1, 0)))
        shared.close([sample])
    """

    def __init__(
        self,
        arena: Arena,
        tag: str,
        openings: Mapping[Hashable, Opening],
        earlier: Sequence[Sample] = (),
        *,
        lasting: bool = False,
    ) -> None:
        self._arena, self._tag = arena, tag
        self._lasting = lasting and len(earlier) < MAX_STORED
        self._of: dict[Hashable, _Shared] = {}
        self._all: list[_Shared] = []
        for node, keys in self._known(openings, earlier):
            self._of |= dict.fromkeys(keys, node)
            self._split(openings, keys, node)
        self._split(openings, [key for key in openings if key not in self._of], None)

    @property
    def stored(self) -> list[Sample]:
        """What this request has stored for its branches, by reference; after `close`, what is left of it."""
        return [shared.sample for shared in self._all if shared.sample is not None]

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

    def _known(
        self, openings: Mapping[Hashable, Opening], earlier: Sequence[Sample]
    ) -> list[tuple[_Shared, list[Hashable]]]:
        """Which openings begin like something that is stored, and up to where: with the longest, where several do."""
        theirs: list[tuple[Opening, Sample]] = []
        for sample in earlier:
            with suppress(LostPayload):
                theirs.append((Opening.stored(self._arena, sample), sample))
        found: dict[tuple[int, int], tuple[_Shared, list[Hashable]]] = {}
        for key, opening in openings.items():
            same = [opening.common(other, 0) for other, _ in theirs]
            best = max(range(len(same)), key=same.__getitem__, default=-1)
            if best >= 0 and same[best] >= _rows_worth_a_block(opening):
                node = _Shared(theirs[best][0], same[best], None, theirs[best][1])
                found.setdefault((best, same[best]), (node, []))[1].append(key)
        return list(found.values())

    def _split(self, openings: Mapping[Hashable, Opening], keys: Sequence[Hashable], parent: _Shared | None) -> None:
        """Those that go on like the first one share what all of them have, and are split further behind it; the
        others are split among themselves."""
        start = 0 if parent is None else parent.stop
        while len(keys) > (0 if self._lasting else 1):
            first, *others = keys
            worth = start + _rows_worth_a_block(openings[first])
            same = {key: openings[first].common(openings[key], start) for key in others}
            near = [key for key in others if same[key] >= worth]
            stop = min((same[key] for key in near), default=len(openings[first].tokens))
            if near or (self._lasting and stop >= worth):
                shared = _Shared(openings[first], stop, parent)
                self._all.append(shared)
                self._of |= dict.fromkeys([first, *near], shared)
                self._split(openings, [first, *near], shared)
            keys = [key for key in others if same[key] < worth]
