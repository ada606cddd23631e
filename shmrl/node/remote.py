"""`RemoteArena`: the arena of another node, as the run's orchestrator owns blocks in it, through that node's server.

Blocking calls, for threads; `holdings` answers them. A call goes on for the client's patience while the server is away,
and is done once however often it had to be asked.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from shmrl.node.client import Client
from shmrl.node.holdings import PAGE, Found
from shmrl.payload.wireform import sample_from_wire, sample_to_wire
from shmrl.types import Sample

Operation = tuple[Any, ...]
"""A verb and its arguments. Example: ("ship", [handle, ...], 3, 7)"""


class RemoteArena:
    """The arena behind the node server at `url`. NodeError from every method when that stays away, or refuses."""

    def __init__(self, client: Client, url: str) -> None:
        self.url = url
        self._client, self._me, self._number = client, secrets.token_hex(8), 0

    def apply(self, operations: Sequence[Operation]) -> tuple[str, list[dict[int, str]]]:
        """Operations in order, by one thread at a time -> (the server's life, per operation what is gone by index)."""
        self._number += 1
        said = self._client.call(
            self.url, "owner/apply", owner=self._me, number=self._number, operations=[list(one) for one in operations]
        )
        return said["instance"], said["gone"]

    def look(self) -> dict[str, Any]:
        """pressure, stats, steps (see `holdings.looked`), instance, rss_bytes."""
        return dict(self._client.call(self.url, "owner/look"))

    def find(self, prefix: str) -> list[Found]:
        """Every block under a tag prefix."""
        found: list[Found] = []
        while True:
            after = found[-1].row["slot"] if found else -1
            page = self._client.call(self.url, "owner/find", prefix=prefix, after=after)
            found += [Found(row, meta, sample and sample_from_wire(sample)) for row, meta, sample in page]
            if len(page) < PAGE:
                return found

    def sampled(self, sample: Sample) -> int | None:
        """How many tokens of a sample were sampled; None where a block of it is lost."""
        return self._read("sampled", sample)  # type: ignore[no-any-return]

    def shown(self, sample: Sample) -> dict[str, Any] | None:
        """What people are shown of a sample."""
        return self._read("shown", sample)  # type: ignore[no-any-return]

    def _read(self, what: str, sample: Sample) -> Any:
        return self._client.call(self.url, "owner/read", what=what, sample=sample_to_wire(sample))
