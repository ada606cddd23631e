"""What every episode protocol is: from a request to its result, with other servers if it needs some.

A subclass is found by the name of its implementation in the nesting (`protocols.py`), or, one's own, by `entrypoint:
"module:attribute"`. `Table` is its part of the configuration; `run` is called once per episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from shmrl.config.gym import EpisodeTable, Limits, Reference
from shmrl.config.nesting import Instance
from shmrl.env.episodes import aggregate
from shmrl.env.episodes.episodes import Course, Work
from shmrl.env.episodes.servers import Answer, CallFailed, Servers
from shmrl.env.episodes.telemetry import Counted
from shmrl.env.episodes.wire import EpisodeFailed, EpisodeRequest, Failure, answered, encoded, failed

HOPS = frozenset(
    ("connection", "content-encoding", "content-length", "cookie", "host", "keep-alive", "transfer-encoding", "upgrade")
)
"""Headers of a connection or of a body's form: every hop has its own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood. key: equal for a request and its repetition; answer_to: what a failure is told
    as."""

    key: Hashable
    capture_key: str
    work: Work
    answer_to: Callable[[Failure], Any]


class BadRequest(ValueError):
    """The body is no request of this server: why."""


class Protocol:
    """Base of episode protocols: typed requests, and rows that name an agent, which are relayed to it.

    Example:
        class Always(Protocol):
            async def run(self, request, course):
                return {"reward": 1.0}
    """

    Table: ClassVar[type[EpisodeTable]] = EpisodeTable

    def __init__(self, instance: Instance, table: Limits, servers: Servers, counted: Counted) -> None:
        self.instance, self.table, self.servers, self.counted = instance, table, servers, counted

    @classmethod
    def references(cls, table: Any) -> Iterable[Reference]:
        """The servers it calls: whether they have an address is checked before anything starts."""
        return ()

    async def start(self) -> None:
        """Returns when episodes can run. Raises what keeps them from it."""

    async def ended(self) -> None:
        """Returns, or raises, when no episode can run any more; by default never."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """After the last episode."""

    async def run(self, request: EpisodeRequest, course: Course) -> Mapping[str, Any]:
        """The result of one episode, with a finite `reward`. EpisodeFailed is a failure that is told; so is any other
        exception, as a terminal one."""
        raise NotImplementedError(f"{type(self).__name__} has no run()")

    async def aggregate(self, body: dict[str, Any]) -> dict[str, Any]:
        """What `/aggregate_metrics` answers; BadRequest, CallFailed."""
        return aggregate.metrics(aggregate.responses(body))

    # ------------------------------------------------------------------------------------------------------- requests

    def asked(self, raw: bytes, headers: Mapping[str, str]) -> Asked:
        """What a body of `/run` asks for. ValueError (pydantic's, or BadRequest)."""
        body = parsed(raw)
        if "episode_id" in body and "task" in body:
            return self.typed(EpisodeRequest.model_validate(body))
        return self.row(body, raw, headers)

    def typed(self, request: EpisodeRequest) -> Asked:
        """An episode under its own id. The same id with another task is another episode: collectors count from 0-0."""

        async def work(course: Course) -> dict[str, Any]:
            return answered(request, await self.run(request, course))

        key = request.episode_id.capture_key
        digest = hashlib.blake2s(encoded(request.task.model_dump())).digest()
        return Asked((key, digest), key, work, lambda failure: failed(request, failure))

    def row(self, row: dict[str, Any], raw: bytes, headers: Mapping[str, str]) -> Asked:
        """A legacy row, without ids of an episode: for the agent that it names."""
        named = row.get("agent_ref")
        name = named.get("name") if isinstance(named, dict) else None
        if not isinstance(name, str):
            raise BadRequest("neither an episode (episode_id and task) nor a row that names an agent (agent_ref.name)")
        agent = Reference.model_validate({"type": "responses_api_agents", "name": name})
        self.servers.url(agent)
        return relayed(self.servers, agent, row, raw, headers)


def relayed(
    servers: Servers, agent: Reference, row: Mapping[str, Any], raw: bytes, headers: Mapping[str, str]
) -> Asked:
    """The row goes to the agent's own `/run` as it is, and so does the answer. Joined if it is repeated, where the row
    says which of the run's rollouts it is."""
    passed = {name: value for name, value in headers.items() if name.lower() not in HOPS}
    if "Cookie" in headers:
        passed["Cookie"] = headers["Cookie"]

    async def work(course: Course) -> Answer:
        course.stage = "agent"
        with telling(course):
            return await servers.relay(agent, "/run", raw, passed)

    numbers = [row.get(key) for key in ("_ng_task_index", "_ng_rollout_index")]
    counted = all(isinstance(number, int) for number in numbers)
    key: Hashable = (agent.name, hashlib.blake2s(raw).digest()) if counted else object()
    capture_key = "-".join(map(str, numbers)) if counted else "row"
    return Asked(key, capture_key, work, _relay_failed)


def _relay_failed(failure: Failure) -> Answer:
    """A row has no place for a failure that is told: its agent could not be asked."""
    status = 503 if failure.failure_kind in ("shutdown", "cancelled") or failure.stage == "admission" else 502
    body = encoded({"detail": failure.failure_reason})
    return Answer(status, (("Content-Type", "application/json"),), body, {})


@contextmanager
def telling(course: Course, kind: str | None = None, partial: dict[str, Any] | None = None) -> Iterator[None]:
    """A call that fails inside is the episode's failure, at the stage where it stands."""
    try:
        yield
    except CallFailed as error:
        raise EpisodeFailed(
            Failure.of(
                str(error),
                terminal=not error.transient,
                stage=course.stage,
                failure_kind=error.kind or kind,
                partial_response=partial,
            )
        ) from error


def parsed(raw: bytes) -> dict[str, Any]:
    """A body as a map; BadRequest."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a {type(body).__name__}, not a map")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
