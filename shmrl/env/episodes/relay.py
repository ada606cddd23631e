"""Gym's `legacy_agent`: an agent that runs its episodes itself gets every row as it is, and its answer goes back so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from shmrl.config.gym import EpisodeTable, Reference
from shmrl.env.episodes.protocol import Asked, Protocol, parsed, relayed
from shmrl.env.episodes.turn import Agent


class AgentTable(EpisodeTable):
    """agent_server: who runs the episodes; the limits bound how long and how many it is waited for."""

    agent_server: Agent


class LegacyAgent(Protocol):
    """`legacy_agent`."""

    Table: ClassVar[type[EpisodeTable]] = AgentTable
    table: AgentTable

    @classmethod
    def references(cls, table: AgentTable) -> Iterable[Reference]:
        return (table.agent_server,)

    def asked(self, raw: bytes, headers: Mapping[str, str]) -> Asked:
        return relayed(self.servers, self.table.agent_server, parsed(raw), raw, headers)

    async def aggregate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The agent knows its own results."""
        found, _ = await self.servers.post(self.table.agent_server, "/aggregate_metrics", body)
        return found
