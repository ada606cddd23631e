"""Admission: whether the arena has room for one more group, and whether its writers wait for what cannot come.

Two small pure classes, numbers in and decisions out, asked by the dispatcher in the orchestrator's process. The rule: a
group starts only if what is used, what the groups under way may still write, and what it will write itself stay under a
mark; so groups that are under way always finish, and a full arena delays the next group instead of failing this one's
episodes. "Used" is the whole arena: finished groups that wait for a batch, and steps that are shipped and not done.

Sizes are learnt. An episode is taken for as long as it can be until enough have been seen, because the first to return
are the short ones; then for a high quantile of the source's last ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from shmrl.arena import span_bytes
from shmrl.config.budget import HIGH, LOW
from shmrl.types import Sample

WINDOW, QUANTILE = 64, 0.9  # episodes that a source's size is learnt from


def share_bytes(episode: Iterable[Sample], group: Iterable[Sample], size: int) -> int:
    """What an episode takes of the arena where the `size` episodes of its group share: its own blocks, and its part of
    what those of `group`, which are there so far, have in common."""
    own = {sample.segments[-1][0] for sample in episode}
    common = {handle for sample in group for handle, _, _ in sample.segments[:-1]} - own
    return sum(span_bytes(h.nbytes) for h in own) + sum(span_bytes(h.nbytes) for h in common) // size


@dataclass(frozen=True, slots=True)
class Room:
    """The arena at one moment, in bytes. `capacity` is what it can really have.

    Example: Room(used=180 << 20, promised=40 << 20, capacity=256 << 20, groups=3, returning=True)
    """

    used: int
    promised: int  # what the groups under way may still write
    capacity: int
    groups: int  # under way
    returning: bool  # a step that holds some of it is trained, or about to be


class Admission:
    """Estimates of sources, and the mark. `longest_bytes`: an episode of a source that nothing is known of."""

    def __init__(self, longest_bytes: int, *, spills: bool) -> None:
        self._sizes: dict[str, deque[int]] = defaultdict(lambda: deque([longest_bytes] * WINDOW, WINDOW))
        self.spills = spills  # what finds no room goes to a file soon: writers never wait for long
        self.holding = False  # over the high mark, and not yet back under the low one

    def saw(self, source: str, nbytes: int) -> None:
        """An episode of `source` came back and takes `nbytes`."""
        self._sizes[source].append(nbytes)

    def episode_bytes(self, source: str) -> int:
        """What an episode of `source` will take, rarely more."""
        return sorted(self._sizes[source])[int(QUANTILE * WINDOW)]

    def admits(self, group_bytes: int, room: Room) -> bool:
        """Whether a group of `group_bytes` may start now.

        One always may when no other is under way and no step will give anything back: nothing would ever change
        otherwise, and if it does not fit its writers will tell. A configured spill directory takes what is over the
        mark, but only when memory is not about to come back.
        """
        mark = (LOW if self.holding else HIGH) * room.capacity
        self.holding = room.used + room.promised + group_bytes > mark
        return not self.holding or (not room.returning and (self.spills or not room.groups))


class Standstill:
    """Tells when writers have waited for `patience_s` with nothing moving at all."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None
        self._last: Hashable = None

    def observe(self, now: float, waiting: bool, state: Hashable) -> bool:
        """One look, at `now` seconds; `state` differs when anything came, went or failed. What is done about a
        standstill gets the same time before it is told again."""
        moved, self._last = state != self._last, state
        if not waiting or moved or self._since is None:
            self._since = now if waiting else None
            return False
        if now - self._since < self._patience_s:
            return False
        self._since = now
        return True
