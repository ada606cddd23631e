"""The ledger: which arena blocks this run's orchestrator holds, for which episode, and who still needs them.

Lives in the orchestrator's process; the only code there that adopts, ships, frees or finishes blocks. A block enters
when its episode's reply arrives (`adopt`) and leaves on exactly one way: `release` (filtered, stale, pruned, evaluated,
returned too late, shutdown) or `let_go` (the step that used it is durable, and not retained any more). A block that
several samples share - a common prefix - is counted: it is shipped in every step that uses it and leaves with its last
sample.

Readers of a shipped block are the ranks whose micro batches contain it plus the ledger itself, whose reader index is
the number of ranks: nothing retires before the step's effects are published, and a rank that is restarted until then
reads the same bytes.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shmrl.errors import AlreadyFreed, ArenaError, LostPayload, StaleHandle
from shmrl.payload.header import name_of, read_loss_mask
from shmrl.types import Handle, MicroBatch, Sample

if TYPE_CHECKING:
    from shmrl.arena import Arena


@dataclass(slots=True)
class Hold:
    """One block: whose it is, how many samples still wait for it, and the shipped steps that need it.

    Example: Hold(tag="run/reverse-text/g17/3", samples=2, steps={4})
    """

    tag: str
    samples: int = 0
    steps: set[int] = field(default_factory=set)


class Ledger:
    """Every hold of the run. `num_ranks` is the number of trainer ranks, and the ledger's own reader index."""

    def __init__(self, arena: Arena, num_ranks: int) -> None:
        self._arena = arena
        self._num_ranks = num_ranks
        self._holds: dict[Handle, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def open(self) -> dict[Handle, Hold]:
        """Every hold, for reports."""
        return dict(self._holds)

    def adopt(self, samples: Sequence[Sample], tag: str) -> None:
        """Become the owner of an episode's blocks. LostPayload if one is gone; the episode's others are then freed."""
        for error in self.adopt_all({tag: samples}).values():
            raise error

    def adopt_all(self, episodes: Mapping[str, Sequence[Sample]]) -> dict[str, LostPayload]:
        """Become the owner of everything that a reply brought, by the episodes' tags; the errors of those that lost a
        block. Their others are freed, but for what siblings share."""
        counts = {
            tag: Counter(handle for sample in samples for handle in sample.handles) for tag, samples in episodes.items()
        }
        gone: dict[Handle, ArenaError] = {}
        handles = dict.fromkeys(handle for count in counts.values() for handle in count)
        for handle in handles:
            try:
                self._arena.adopt([handle])
            except ArenaError as error:
                gone[handle] = error
        lost: dict[str, LostPayload] = {}
        for tag, count in counts.items():
            missing = next((handle for handle in count if handle in gone), None)
            if missing is not None:
                lost[tag] = LostPayload(f"{tag}: block {missing!r} could not be adopted: {gone[missing]}")
                lost[tag].__cause__ = gone[missing]
                continue
            for handle, uses in count.items():
                self._holds.setdefault(handle, Hold(tag)).samples += uses
        self._free([handle for handle in handles if handle not in gone and handle not in self._holds])
        return lost

    def release(self, samples: Iterable[Sample]) -> None:
        """These samples will not be trained: free each block that no other sample waits for and no step reads."""
        unused = []
        for sample in samples:
            for handle in sample.handles:
                hold = self._holds[handle]
                hold.samples -= 1
                if not hold.samples and not hold.steps:
                    del self._holds[handle]
                    unused.append(handle)
        self._free(unused)

    def cut(self, sample: Sample, n: int) -> Sample:
        """The sample's first n tokens, with S counted where its blocks are here; what only the rest referred to is
        given back."""
        shorter = sample.truncated(n)
        if n < sample.T:
            with contextlib.suppress(LostPayload):
                shorter = replace(shorter, S=int(read_loss_mask(self._arena, shorter).sum()))
        kept = set(shorter.handles)
        gone = tuple(segment for segment in sample.segments if segment[0] not in kept)
        if gone:
            self.release([Sample(segments=gone, T=0, S=0, R=0)])
        return shorter

    def ship(self, ranks: Sequence[Sequence[MicroBatch]], step: int, readers: int = 1) -> None:
        """Arm the done sets of everything the ranks' micro batches contain, before their messages are sent.

        readers: how many ranks read each list of micro batches (a context-parallel group's).
        """
        lists: Counter[Handle] = Counter()
        for micro_batches in ranks:
            lists.update({handle for micro in micro_batches for handle in micro.handles})
            for micro in micro_batches:
                for sample in micro.samples:
                    for handle in sample.handles:
                        self._holds[handle].samples -= 1
        by_count: dict[int, list[Handle]] = defaultdict(list)
        for handle, count in lists.items():
            self._holds[handle].steps.add(step)
            by_count[count].append(handle)
        for count, handles in by_count.items():
            self._arm(handles, count * readers + 1, step)

    def _arm(self, handles: Sequence[Handle], readers: int, step: int) -> None:
        """Ship what is still there. A block that is gone goes out all the same: the ranks agree on what they drop."""
        try:
            self._arena.ship(handles, readers=readers, step=step)
        except StaleHandle:
            for handle in handles:
                with contextlib.suppress(StaleHandle):
                    self._arena.ship([handle], readers=readers, step=step)

    def resume(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        """Hold again what an orchestrator before this one shipped in `step`, as far as it is still there."""
        for sample in (sample for micro_batches in ranks for micro in micro_batches for sample in micro.samples):
            for handle in sample.handles:
                if handle not in self._holds:
                    try:
                        self._arena.adopt([handle])
                    except ArenaError:
                        continue  # the step was done with it
                    self._holds[handle] = Hold(name_of(sample))
                self._holds[handle].steps.add(step)

    def let_go(self, step: int) -> None:
        """Nobody reads the step again: be its last reader. Blocks that later samples or steps share stay held."""
        finished = []
        for handle, hold in list(self._holds.items()):
            if step not in hold.steps:
                continue
            hold.steps.remove(step)
            if not hold.samples and not hold.steps:
                finished.append(handle)
                del self._holds[handle]
        if finished:
            self._arena.done(finished, reader=self._num_ranks)

    def close(self) -> dict[Handle, Hold]:
        """Free whatever is left and say what it was; empty after a normal end."""
        left, self._holds = self._holds, {}
        self._free(list(left))
        return left

    def _free(self, handles: Sequence[Handle]) -> None:
        """Free as the owner. A block that is gone already (discarded by an operator, its ttl over) is no error here."""
        if not handles:
            return
        try:
            self._arena.free(handles)
        except (AlreadyFreed, StaleHandle):
            pass
