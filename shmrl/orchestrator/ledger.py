"""The ledger: which arena blocks this run's orchestrator holds, for which episode, and who still needs them.

Lives in the orchestrator's process; the only code there that adopts, ships, frees or finishes blocks, in whichever
arena they are (`arenas`). A block enters when its episode's reply arrives (`adopt`) and leaves on exactly one way:
`release` (filtered, stale, pruned, evaluated, returned too late, shutdown), `let_go` (the step that used it is durable,
and not retained any more) or `write_off` (its node is lost, and it with that). A block that several samples share - a
common prefix - is counted: it is shipped in every step that uses it and leaves with its last sample.

Readers of a shipped block are the ranks whose micro batches contain it plus the ledger itself, whose reader index is
the number of ranks: nothing retires before the step's effects are published, and a rank that is restarted until then
reads the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shmrl.errors import LostPayload
from shmrl.node.holdings import sampled
from shmrl.orchestrator.arenas import Arenas
from shmrl.payload.header import name_of
from shmrl.types import Handle, MicroBatch, Sample


@dataclass(slots=True)
class Hold:
    """One block: whose it is, how many samples still wait for it, and the shipped steps that need it.

    Example: Hold(tag="run/reverse-text/g17/3", samples=2, steps={4})
    """

    tag: str
    samples: int = 0
    steps: set[int] = field(default_factory=set)


class Ledger:
    """Every hold of the run. `num_ranks` is the number of trainer ranks, and the ledger's own reader index.

    longest: tokens that samples are cut to, so that what is sampled in those of other nodes is counted in time.
    """

    def __init__(self, arenas: Arenas, num_ranks: int, longest: int | None = None) -> None:
        self._arenas = arenas
        self._num_ranks, self._longest = num_ranks, longest
        self._holds: dict[Handle, Hold] = {}
        self._counted: dict[tuple[Handle, ...], int] = {}  # S of other nodes' samples, cut to the longest
        self._written_off: set[str] = set()  # origins of lost nodes
        self._pins: dict[str, set[Handle]] = {}
        self._arriving: Counter[Handle] = Counter()  # adoptions under way, by block
        arenas.held = self.held

    def __len__(self) -> int:
        return len(self._holds)

    def open(self) -> dict[Handle, Hold]:
        """Every hold, for reports."""
        return dict(self._holds)

    def held(self, origin: str) -> list[Handle]:
        """What is held in one arena."""
        return [handle for handle in self._holds if handle.origin == origin]

    async def adopt(self, samples: Sequence[Sample], tag: str) -> None:
        """Become the owner of an episode's blocks. LostPayload if one is gone; the episode's others are then freed."""
        for error in (await self.adopt_all({tag: samples})).values():
            raise error

    async def adopt_all(self, episodes: Mapping[str, Sequence[Sample]]) -> dict[str, LostPayload]:
        """Become the owner of everything that a reply brought, by the episodes' tags; the errors of those that lost a
        block. Their others are freed, but for what siblings share. If this is cancelled, everything is."""
        counts = {
            tag: Counter(handle for sample in samples for handle in sample.handles) for tag, samples in episodes.items()
        }
        handles = dict.fromkeys(handle for count in counts.values() for handle in count)
        self._arriving.update(list(handles))
        try:
            gone = await self._arenas.adopt(handles)
            await self._count(sample for samples in episodes.values() for sample in samples)
        except asyncio.CancelledError:
            self._arrived(handles)
            raise
        lost: dict[str, LostPayload] = {}
        for tag, count in counts.items():
            missing = next((handle for handle in count if handle in gone), None)
            if missing is not None:
                lost[tag] = LostPayload(f"{tag}: block {missing!r} could not be adopted: {gone[missing]}")
                lost[tag].__cause__ = gone[missing]
                continue
            for handle, uses in count.items():
                self._holds.setdefault(handle, Hold(tag)).samples += uses
        self._arrived([handle for handle in handles if handle not in gone], gone)
        return lost

    def _arrived(self, here: Iterable[Handle], gone: Iterable[Handle] = ()) -> None:
        """These adoptions have ended: what no episode took is freed, unless a sibling's is still under way."""
        self._arriving -= Counter([*here, *gone])
        self._arenas.free([handle for handle in here if handle not in self._holds and handle not in self._arriving])

    async def _count(self, samples: Iterable[Sample]) -> None:
        """What is sampled in samples of other nodes that will be cut: asked for while we wait anyway."""
        for sample in samples:
            if self._longest is not None and self._longest < sample.T and self._arenas.is_elsewhere(sample):
                count = await self._arenas.sampled(sample.truncated(self._longest))
                if count is not None:
                    self._counted[sample.handles] = count

    def release(self, samples: Iterable[Sample]) -> None:
        """These samples will not be trained: free each block that no other sample waits for and no step reads."""
        unused = []
        for sample in samples:
            self._counted.pop(sample.handles, None)
            for handle in sample.handles:
                hold = self._hold(handle)
                if hold is None:
                    continue
                hold.samples -= 1
                if not hold.samples and not hold.steps:
                    del self._holds[handle]
                    unused.append(handle)
        self._arenas.free(unused)

    def _hold(self, handle: Handle) -> Hold | None:
        """The block's hold; None if it was written off."""
        hold = self._holds.get(handle)
        assert hold is not None or handle.origin in self._written_off, f"{handle!r} is not held"
        return hold

    def pin(self, group: str, samples: Iterable[Sample]) -> None:
        """Keep what these samples share with others until `unpin(group)`: siblings under way may refer to it."""
        pinned = self._pins.setdefault(group, set())
        shared = {handle for sample in samples for handle, _, _ in sample.segments[:-1]} - pinned
        for handle in shared:
            if (hold := self._hold(handle)) is not None:
                hold.samples += 1
        pinned |= shared

    def unpin(self, group: str) -> None:
        """No further sibling comes: what nobody else waits for is freed. Idempotent."""
        segments = tuple((handle, 0, 0) for handle in self._pins.pop(group, ()))
        self.release([Sample(segments=segments, T=0, S=0, R=0)])

    def cut(self, sample: Sample, n: int) -> Sample:
        """The sample's first n tokens, with S counted where its blocks can be read; what only the rest referred to is
        given back."""
        shorter = sample.truncated(n)
        if n < sample.T:
            if self._arenas.is_elsewhere(sample):
                shorter = replace(shorter, S=min(shorter.S, self._counted.pop(sample.handles, shorter.S)))
            else:
                with contextlib.suppress(LostPayload):
                    shorter = replace(shorter, S=sampled(self._arenas.local, shorter))
        kept = set(shorter.handles)
        gone = tuple(segment for segment in sample.segments if segment[0] not in kept)
        if gone:
            self.release([Sample(segments=gone, T=0, S=0, R=0)])
        return shorter

    def ship(self, ranks: Sequence[Sequence[MicroBatch]], step: int, readers: int = 1) -> None:
        """Arm the done sets of everything the ranks' micro batches contain, before their messages are sent.

        readers: how many ranks read each list of micro batches (a context-parallel group's). A block that is gone goes
        out all the same: the ranks agree on what they drop.
        """
        lists: Counter[Handle] = Counter()
        for micro_batches in ranks:
            lists.update({handle for micro in micro_batches for handle in micro.handles})
            for micro in micro_batches:
                for sample in micro.samples:
                    for handle in sample.handles:
                        if (hold := self._hold(handle)) is not None:
                            hold.samples -= 1
        by_count: dict[int, list[Handle]] = defaultdict(list)
        for handle, count in lists.items():
            if handle in self._holds:
                self._holds[handle].steps.add(step)
                by_count[count].append(handle)
        for count, handles in by_count.items():
            self._arenas.ship(handles, count * readers + 1, step)

    async def resume(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> None:
        """Hold again what an orchestrator before this one shipped in `step`, as far as it is still there."""
        whose = {
            handle: sample
            for micro_batches in ranks
            for micro in micro_batches
            for sample in micro.samples
            for handle in sample.handles
        }
        gone = await self._arenas.adopt([handle for handle in whose if handle not in self._holds])
        for handle, sample in whose.items():
            if handle not in gone:  # else the step was done with it
                self._holds.setdefault(handle, Hold(name_of(sample))).steps.add(step)

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
            self._arenas.done(finished, reader=self._num_ranks)

    def discard(self, tag: str) -> None:
        """Free what a server that is gone left under a tag, and nobody adopted."""
        self._arenas.discard(tag)

    def write_off(self, origin: str) -> int:
        """The node of these blocks is lost, and nobody can free them: forget them -> how many there were."""
        self._written_off.add(origin)
        handles = self.held(origin)
        for handle in handles:
            del self._holds[handle]
        return len(handles)

    def is_lost(self, sample: Sample) -> bool:
        """Whether a block of it was written off."""
        return bool(self._written_off) and any(handle.origin in self._written_off for handle in sample.handles)

    def close(self) -> dict[Handle, Hold]:
        """Free whatever is left and say what it was; empty after a normal end."""
        left, self._holds = self._holds, {}
        self._arenas.free(list(left))
        return left
