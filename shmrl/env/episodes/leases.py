"""Blocks that a collector was told of. It may never come for them, so each is kept for a time and then freed.

Who wants one for longer adopts it: what is another's is not freed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from shmrl.arena import Arena
from shmrl.env.episodes.telemetry import Counted
from shmrl.errors import ArenaError
from shmrl.types import Handle, Sample

log = logging.getLogger(__name__)


class Leases:
    """The leases of one arena, in the process that adopted their blocks."""

    def __init__(self, arena: Arena, lease_s: float, counted: Counted) -> None:
        self._arena, self.lease_s, self._counted = arena, lease_s, counted
        self._timers: dict[tuple[Handle, ...], asyncio.TimerHandle] = {}

    def keep(self, samples: Sequence[Sample]) -> None:
        """Become the owner of the samples' blocks, and free them when their time is over. ArenaError if one is gone."""
        handles = tuple(dict.fromkeys(handle for sample in samples for handle in sample.handles))
        if handles:
            try:
                self._arena.adopt(handles)
            except ArenaError:
                self._free(handles)
                raise
            self._timers[handles] = asyncio.get_running_loop().call_later(self.lease_s, self._expire, handles)
            self._counted.leased(len(handles))

    def close(self) -> None:
        """Free all of them."""
        for handles, timer in list(self._timers.items()):
            timer.cancel()
            self._expire(handles)

    def _expire(self, handles: tuple[Handle, ...]) -> None:
        del self._timers[handles]
        self._counted.leased(-len(handles))
        self._free(handles)
        log.debug("%d blocks were kept for %g s and are freed", len(handles), self.lease_s)

    def _free(self, handles: tuple[Handle, ...]) -> None:
        for handle in handles:
            with contextlib.suppress(ArenaError):  # somebody adopted it: it is theirs
                self._arena.free([handle])


def payload_to_json(samples: Sequence[Sample], arena: str, node: str | None, lease_s: float) -> dict[str, Any]:
    """What a result says of its trainable branches: where they are, for how long, and what they are.

    Example: {"arena": "shm:5f1c...", "node": null, "lease_s": 3600.0, "branches": [{"segments": [["h01...", 0, 37]],
    "T": 37, "S": 12, "R": 36, "fields": ["routing"], "meta": {"reward": 0.83, ...}}]}
    """
    return {
        "arena": arena,
        "node": node,
        "lease_s": lease_s,
        "branches": [
            {
                "segments": [[str(handle), start, stop] for handle, start, stop in sample.segments],
                "T": sample.T,
                "S": sample.S,
                "R": sample.R,
                "fields": list(sample.fields),
                "meta": sample.meta,
            }
            for sample in samples
        ],
    }


def samples_of(payload: dict[str, Any]) -> list[Sample]:
    """The samples of a result's `shmrl_payload`, for `assemble`; ValueError if it is none."""
    try:
        return [
            Sample(
                segments=tuple((Handle.parse(text), start, stop) for text, start, stop in branch["segments"]),
                T=branch["T"],
                S=branch["S"],
                R=branch["R"],
                fields=tuple(branch["fields"]),
                meta={**branch["meta"], "shapes": {k: tuple(v) for k, v in branch["meta"].get("shapes", {}).items()}},
            )
            for branch in payload["branches"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"shmrl_payload: {type(error).__name__}: {error}") from None
