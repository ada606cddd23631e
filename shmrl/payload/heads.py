"""Heads and sampling masks of an engine's answer: per sampled token some ids, as many as the engine lists.

Made by whoever reads an answer (`shmrl.inference.answers`, or lists of a caller's own), consumed by `BranchBuilder` in
env workers. An answer of 16,000 tokens with a head of 128 has two million entries: no Python object for any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import PayloadError

EXCLUDED = -9000.0
"""Log-probabilities at or below this are -inf: vLLM's JSON has -9999.0 for tokens that could not be drawn."""
Head = tuple[Sequence[int], Sequence[float]]
"""(ids, log-probabilities) of one token, the sampled one first."""


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The log-probabilities an engine lists for each of S sampled tokens, the sampled token's own first.

    Attributes: counts int32 [S]; ids int32 [sum(counts)], logprobs float32 [sum(counts)], row after row.

    Example: Heads.of([([7, 2, 9], [-0.2, -2.1, -3.0])])
    """

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, rows: Heads | Sequence[Head]) -> Heads:
        """The same of a list of (ids, log-probabilities); PayloadError for None, or where a row has more of one."""
        if isinstance(rows, Heads):
            return rows
        for at, (ids, logprobs) in enumerate(rows):
            if len(ids) != len(logprobs):
                raise PayloadError.of(
                    "head", f"{len(ids)} ids and {len(logprobs)} logprobs at sampled row {at}", at, value=len(ids)
                )
            for column, pair in enumerate(zip(ids, logprobs, strict=True)):
                if None in pair:
                    raise PayloadError.of("head", f"None at position {(at, column)}", (at, column), value=None)
        flat, counts = _flat("head", [ids for ids, _ in rows])
        with np.errstate(over="ignore"):  # what float32 does not reach is -inf
            values = np.fromiter(chain.from_iterable(logprobs for _, logprobs in rows), np.float32, len(flat))
        return cls(counts, flat, values)

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[tuple[list[int], list[float]]]:
        """(ids, log-probabilities) of each token as lists."""
        ends = np.cumsum(self.counts, dtype=np.int64).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            yield self.ids[start:stop].tolist(), self.logprobs[start:stop].tolist()

    def matrix(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(ids, log-probabilities) [S, max(counts)]; shorter rows end with id -1 at -inf."""
        width = int(self.counts.max(initial=0))
        if (self.counts == width).all():
            return self.ids.reshape(len(self), width), self.logprobs.reshape(len(self), width)
        there = np.arange(width) < self.counts[:, None]
        ids, logprobs = np.full(there.shape, -1, np.int32), np.full(there.shape, -np.inf, np.float32)
        ids[there], logprobs[there] = self.ids, self.logprobs
        return ids, logprobs

    def narrowed(self, k: int) -> Heads:
        """Per token the sampled one, then the best k, which may have it too."""
        ids, logprobs = self.matrix()
        best = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
        columns = np.concatenate([np.zeros((len(ids), 1), np.int64), best], axis=1)
        counts = np.minimum(self.counts, k) + 1
        there = np.arange(columns.shape[1]) < counts[:, None]
        return Heads(
            counts.astype(np.int32),
            np.take_along_axis(ids, columns, axis=1)[there],
            np.take_along_axis(logprobs, columns, axis=1)[there],
        )

    def kept(self) -> KeptSets:
        """The kept sets of an engine that reports none: the ids whose log-probability is not -inf, ascending.

        Right only with processed log-probabilities and as many of them as top_k (vLLM 0.30; equal to 0.32's own mask).
        """
        rows = np.repeat(np.arange(len(self)), self.counts)
        kept = self.logprobs > EXCLUDED
        pairs = np.unique(rows[kept].astype(np.int64) << 32 | self.ids[kept])
        counts = np.bincount(pairs >> 32, minlength=len(self))
        return KeptSets(counts.astype(np.int32), (pairs & 0xFFFFFFFF).astype(np.int32))

    def mass(self) -> NDArray[np.float64]:
        """float64 [S]: the probability of all distinct ids that are not excluded."""
        ids, logprobs = self.matrix()
        order = np.argsort(ids, axis=1, kind="stable")
        ids, logprobs = np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)
        first = np.ones(ids.shape, bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        each = np.where(first & (logprobs > EXCLUDED), np.minimum(logprobs, 1.0), -np.inf)  # above 0 is none anyway
        return np.asarray(np.exp(each.astype(np.float64)).sum(axis=1))

    def rows(self, sampled: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """What is stored, [S, k + 1]: the sampled token, then the top k. -9999.0 becomes -inf.

        An engine lists the sampled token first and then the others: k entries if it is among the top k, else k + 1.
        PayloadError for a row that has too few entries, or not the sampled token's.

        Example: Heads.of([([7, 2, 9], [-0.2, -2.1, -3.0])]).rows([7], 3) -> [[7, 7, 2, 9]], [[-0.2, -0.2, -2.1, -3.0]]
        """
        odd = np.flatnonzero((self.counts != k) & (self.counts != k + 1))
        if odd.size:
            at, count = int(odd[0]), int(self.counts[odd[0]])
            raise PayloadError.of(
                "head", f"{count} entries at sampled row {at}, expected {k} or {k + 1}", at, value=count
            )
        ids, logprobs = self.matrix()
        own = ids == np.asarray(sampled, np.int64)[:, None]
        missing = np.flatnonzero(~own.any(axis=1))
        if missing.size:
            at = int(missing[0])
            found = ids[at, : self.counts[at]].tolist()
            raise PayloadError.of(
                "head", f"the sampled token {sampled[at]} is not in row {at}: {found}", at, value=sampled[at]
            )
        columns = np.empty((len(ids), k + 1), np.int64)
        columns[:, 0] = own.argmax(axis=1)
        columns[:, 1:] = np.arange(1, k + 1)
        short = np.flatnonzero(self.counts == k)
        columns[short, 1:] = np.argsort(-logprobs[short], axis=1, kind="stable")[:, :k]
        logprobs = np.take_along_axis(logprobs, columns, axis=1)
        logprobs[logprobs <= EXCLUDED] = -np.inf
        return np.take_along_axis(ids, columns, axis=1), logprobs


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The ids that the sampler kept for each of S sampled tokens; none where it restricted nothing.

    Attributes: counts int32 [S]; ids int32 [sum(counts)], row after row.

    Example: KeptSets.of([[5, 9], [5], [7, 7, 2]]) -> counts [2, 1, 3], ids [5, 9, 5, 7, 7, 2]
    """

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, rows: KeptSets | Sequence[Sequence[int]]) -> KeptSets:
        """The same of a list of kept ids per token; PayloadError for None."""
        if isinstance(rows, KeptSets):
            return rows
        for at, row in enumerate(rows):
            if row is None or None in row:
                raise PayloadError.of("mask", f"None at position {at}", at, value=None)
        ids, counts = _flat("mask", rows)
        return cls(counts, ids)

    @classmethod
    def unrestricted(cls, n: int) -> KeptSets:
        """Of n tokens that were drawn from the whole vocabulary."""
        return cls(np.zeros(n, np.int32), np.empty(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """One after the other."""
        empty = cls.unrestricted(0)
        return cls(
            np.concatenate([empty.counts, *(part.counts for part in parts)]),
            np.concatenate([empty.ids, *(part.ids for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[list[int]]:
        """The kept ids of each token as lists."""
        ends = np.cumsum(self.counts, dtype=np.int64).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            yield self.ids[start:stop].tolist()


def _flat(field: str, rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(ids, counts) of lists of ids."""
    counts = np.array([len(row) for row in rows], np.int32)
    try:
        return np.fromiter(chain.from_iterable(rows), np.int32, int(counts.sum(dtype=np.int64))), counts
    except OverflowError:
        high = max((id_ for row in rows for id_ in row), key=abs)
        raise PayloadError.of(field, f"id {high} is beyond int32", value=high) from None
