"""Replicas of a source: env servers that do the same, one per node, each with a client and an arena of its node.

A request goes to the replica with the fewest in flight, and the requests of one group to one replica, where the
group's prompt is stored, and in the engine's cache. A replica whose server dies is lost; the others go on without it.
Used by `sources` and `episodes`, in the orchestrator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from shmrl.config import EvalSource, RunTree, TrainSource
from shmrl.node.published import Addresses, Published
from shmrl.types import EpisodeResult, Task

log = logging.getLogger(__name__)

RESUME_S = 30.0  # how long a resumed run waits for replicas when others are there


class Client(Protocol):
    """What is used of `shmrl.env.client.EnvClient`; cancelling the awaiting task cancels the episode at the server."""

    async def connect(self, timeout_s: float = 600.0) -> dict[str, Any]: ...
    async def health(self) -> dict[str, Any]: ...
    async def info(self) -> dict[str, Any]: ...
    async def take_over(self, run: str) -> int: ...
    async def tasks(self, split: str, start: int, n: int) -> list[Task]: ...
    async def run_rollout(
        self, task: Task, *, model: Mapping[str, Any], group_id: str, seed: int, keep: str, tag: str, shares: bool
    ) -> EpisodeResult: ...
    async def run_group(
        self, task: Task, *, model: Mapping[str, Any], group_id: str, seeds: Sequence[int], keep: str, tag: str
    ) -> list[EpisodeResult]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica is. node: its node's name. node_url: of the server there; "" where only the replica knows it."""

    address: str
    node: str = ""
    node_url: str = ""


@dataclass(slots=True, eq=False)
class Replica:
    """One env server. inflight: episodes that it was asked for. origin: of the arena it writes to, once connected.

    Example: Replica(EnvClient("tcp://10.0.0.7:40123", token), Place("tcp://10.0.0.7:40123", "node2"))
    """

    client: Client
    place: Place
    inflight: int = 0
    served: int = 0
    origin: str = ""
    lost: bool = False

    @property
    def host(self) -> str:
        """What its node is reached by."""
        return urlsplit(self.place.address).hostname or ""


class Replicas:
    """The replicas of source `name`. There is always one that is not lost."""

    def __init__(self, name: str, replicas: Sequence[Replica]) -> None:
        self._name, self.every = name, list(replicas)
        self._groups: dict[str, tuple[Replica, int]] = {}  # where a group is, and how many things say so

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.every if not replica.lost]

    def take(self, group_id: str, episodes: int, *, stays: bool = False) -> Replica:
        """The replica for some episodes of a group; `give_back` when they have ended. stays: until `leave` the rest of
        the group goes there too."""
        replica, uses = self._groups.get(group_id, (None, int(stays)))
        if replica is None or replica.lost:
            replica = min(self.alive, key=lambda one: (one.inflight, one.served))
        self._groups[group_id] = replica, uses + 1
        replica.inflight += episodes
        replica.served += episodes
        return replica

    def give_back(self, replica: Replica, group_id: str, episodes: int) -> None:
        """These episodes have ended."""
        replica.inflight -= episodes
        self.leave(group_id)

    def leave(self, group_id: str) -> None:
        """No further episode of a group that stays is to come."""
        replica, uses = self._groups.pop(group_id, (None, 0))
        if replica is not None and uses > 1:
            self._groups[group_id] = replica, uses - 1

    def lose(self, replica: Replica, why: object) -> bool:
        """Go on without a replica; False if it is the last one."""
        if self.alive == [replica]:
            return False
        if not replica.lost:
            replica.lost = True
            log.error(
                "source %r goes on without its replica at %s%s, %d are left: %s",
                self._name, replica.place.address, f" on {replica.place.node}" if replica.place.node else "",
                len(self.alive), why,
            )  # fmt: skip
        return True

    def report(self) -> None:
        """Say how the episodes were spread, where there was a choice."""
        if len(self.every) > 1:
            spread = ", ".join(f"{one.place.node} {one.served:,}" for one in self.every)
            log.info("source %r: episodes by replica: %s", self._name, spread)


async def places(tree: RunTree) -> list[list[Place]]:
    """Where the replicas of each source are, in config order: at the derived address, or where the files of a run over
    several nodes say. RunError when not all of them, with their nodes' servers, are there in time."""
    if tree.job is None or not tree.deployment.several:
        return [[Place(tree.env_address(index))] for index in range(len(tree.sources))]
    addresses, count = Addresses(tree.job), tree.orchestrator.env_server_replicas
    timeout_s = tree.orchestrator.connect_timeout_s

    async def published(split: str, source: TrainSource | EvalSource) -> list[Place]:
        if source.serve.address is not None:
            return [Place(source.serve.address)]

        def complete() -> list[Published]:
            nodes = addresses.nodes()
            return [one for one in addresses.envs(split, source.name) if one.origin in nodes]

        found = await addresses.awaited(complete, count, timeout_s, f"replicas of {split}/{source.name}")
        nodes = addresses.nodes()
        return [Place(one.address, one.node, nodes.get(one.origin, "")) for one in found]

    return await asyncio.gather(*[published(split, source) for split, source in tree.sources])
