"""One turn of an agent, against a resources server: Gym's `single_agent_turn`, and its form for legacy rows.

In order: seed the resources session, open the agent's session (with the tools, cookies and the sandbox that the seed
gave; the agent borrows the sandbox and never closes it), call `/v1/responses`, close the agent's session, verify, and
close the resources session. Each close is registered before its session is opened, since an answer that is lost opens
it too.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from shmrl.config.gym import EpisodeTable, Reference
from shmrl.env.episodes.episodes import Closing, Course
from shmrl.env.episodes.protocol import Asked, BadRequest, Protocol, telling
from shmrl.env.episodes.servers import CallFailed
from shmrl.env.episodes.wire import EpisodeRequest, Failure, Message


def _of(kind: str) -> AfterValidator:
    def check(reference: Reference) -> Reference:
        if reference.type != kind:
            raise ValueError(f"a reference to one of {kind} is expected, not of {reference.type}")
        return reference

    return AfterValidator(check)


Resources = Annotated[Reference, _of("resources_servers")]
Agent = Annotated[Reference, _of("responses_api_agents")]


class TurnTable(EpisodeTable):
    """resources_tool_transports: how the agent reaches the tools of the resources server."""

    resources_server: Resources
    agent_server: Agent
    resources_tool_transports: list[Literal["direct_http", "mcp"]] = Field(default_factory=list)


class TurnInput(Message):
    """A turn's input. Fields that stand beside `task_data` are part of it, as in flat rows."""

    responses_create_params: dict[str, Any]
    task_data: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        rest = dict(given)
        params, data = rest.pop("responses_create_params", None), rest.pop("task_data", {})
        if not isinstance(data, Mapping):
            return given
        twice = [key for key in rest.keys() & data.keys() if rest[key] != data[key]]
        if twice:
            raise ValueError(f"{', '.join(twice)}: one value stands in task_data, another one beside it")
        return {"responses_create_params": params, "task_data": {**data, **rest}}


@dataclass(slots=True, eq=False)
class Turn:
    """What is known of one episode as it goes on."""

    request: EpisodeRequest
    given: TurnInput
    course: Course
    resources_id: str = field(default_factory=lambda: f"resources-session-{uuid.uuid4().hex}")
    agent_id: str = field(default_factory=lambda: f"agent-session-{uuid.uuid4().hex}")
    resources_cookies: dict[str, str] = field(default_factory=dict)
    agent_cookies: dict[str, str] = field(default_factory=dict)
    seed: dict[str, Any] = field(default_factory=dict)
    observations: Any = None

    @property
    def ids(self) -> dict[str, Any]:
        return {
            "episode_id": self.request.episode_id.model_dump(),
            "task_id": self.request.task.task_id.model_dump(),
        }


class SingleAgentTurn(Protocol):
    """`single_agent_turn`."""

    Table: ClassVar[type[EpisodeTable]] = TurnTable
    table: TurnTable

    @classmethod
    def references(cls, table: TurnTable) -> Iterable[Reference]:
        return table.resources_server, table.agent_server

    def typed(self, request: EpisodeRequest) -> Asked:
        TurnInput.model_validate(request.task.task_input)  # a bad one is refused, not run
        return super().typed(request)

    async def run(self, request: EpisodeRequest, course: Course) -> Mapping[str, Any]:
        turn = Turn(request, TurnInput.model_validate(request.task.task_input), course)
        course.stage = "seed"
        course.closes("resources session", lambda: self._close_resources(turn))
        with telling(course):
            await self._seed_resources(turn)
            tools = self._tools(turn)
        course.stage = "agent"
        agent = course.closes("agent session", lambda: self._close_agent(turn))
        with telling(course, "agent_run_error"):
            await self._open_agent(turn, tools)
            response = await self._respond(turn)
        course.stage = "cleanup"
        with telling(course, "session_release_failed", partial=response):
            await self._closed_in_time(agent)  # verification needs the cookies that the agent gives back
        course.stage = "verification"
        with telling(course, "verifier_error", partial=response):
            verdict = await self._verify(turn, response)
        if turn.observations is not None:
            verdict["ng_agent_observations"] = turn.observations
        return verdict

    async def aggregate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The resources server verifies, so it aggregates."""
        found, _ = await self.servers.post(self.table.resources_server, "/aggregate_metrics", body)
        return found

    # ---------------------------------------------------------------------------------------------------- its stages

    async def _seed_resources(self, turn: Turn) -> None:
        name = self.table.resources_server.name
        body = {"resources_session_id": turn.resources_id, **turn.ids, "task_data": turn.given.task_data}
        turn.seed, turn.resources_cookies = await self.servers.post(
            self.table.resources_server, "/seed_session", body, again=True
        )
        if not turn.resources_cookies:
            raise CallFailed(f"{name}/seed_session set no session cookie", transient=False, kind="session_lost")
        _expect(name, turn.seed, "resources_session_id", turn.resources_id)

    def _tools(self, turn: Turn) -> list[dict[str, Any]]:
        """How the agent gets at the tools; CallFailed for what the seed has not got."""
        reference = self.table.resources_server
        url, name, tools = self.servers.url(reference), reference.name, []
        if "direct_http" in self.table.resources_tool_transports:
            access = {"base_url": url, "cookies": turn.resources_cookies, "headers": {}}
            tools.append({"kind": "direct_http", "name": f"{name}.direct_http", "required": True, **access})
        if "mcp" in self.table.resources_tool_transports:
            offered = turn.seed.get("resources_tools")
            if not isinstance(offered, dict) or not isinstance(offered.get("server_name"), str):
                raise CallFailed(f"{name}/seed_session offers no MCP tools (resources_tools)", transient=False)
            if offered.get("transport", "http") != "http":
                raise CallFailed(f"{name}: MCP over {offered['transport']!r}; http is expected", transient=False)
            path = str(offered.get("url_path", "/mcp")).lstrip("/")
            connection = {
                "transport": "streamable_http",
                "url": f"{url}/{path}",
                "headers": offered.get("headers") or {},
            }
            tools.append({"kind": "mcp", "name": offered["server_name"], "required": True, "connection": connection})
        return tools

    async def _open_agent(self, turn: Turn, tools: list[dict[str, Any]]) -> None:
        body = {
            "agent_session_id": turn.agent_id,
            **turn.ids,
            "tool_accesses": tools,
            "sandbox_access": turn.seed.get("sandbox_access"),
        }
        opened, turn.agent_cookies = await self.servers.post(
            self.table.agent_server, "/v1/agent_sessions", body, again=True
        )
        _expect(self.table.agent_server.name, opened, "agent_session_id", turn.agent_id)

    async def _respond(self, turn: Turn) -> dict[str, Any]:
        """The agent's response. Not repeated when the connection breaks: it may be at work."""
        capture = "/training-token-capture" if self._captures_tokens() else ""
        path = f"/ng-rollout/{turn.request.episode_id.capture_key}{capture}/v1/responses"
        params, cookies = turn.given.responses_create_params, turn.agent_cookies
        response, now = await self.servers.post(
            self.table.agent_server, path, params, cookies=cookies, route="/v1/responses"
        )
        turn.agent_cookies = now or cookies
        return response

    async def _verify(self, turn: Turn, response: dict[str, Any]) -> dict[str, Any]:
        given = turn.given
        body = {**given.task_data, "responses_create_params": given.responses_create_params, "response": response}
        verdict, _ = await self.servers.post(
            self.table.resources_server, "/verify", body, cookies=turn.resources_cookies
        )
        return verdict

    async def _close_agent(self, turn: Turn) -> None:
        body = {"agent_session_id": turn.agent_id, "episode_id": turn.ids["episode_id"]}
        closed, _ = await self.servers.post(
            self.table.agent_server, "/v1/agent_sessions/close", body, cookies=turn.agent_cookies, again=True
        )
        _expect(self.table.agent_server.name, closed, "agent_session_id", turn.agent_id)
        turn.observations = closed.get("agent_observations")
        if closed.get("resources_cookies") is not None:
            turn.resources_cookies = dict(closed["resources_cookies"])

    async def _close_resources(self, turn: Turn) -> None:
        body = {"resources_session_id": turn.resources_id, "episode_id": turn.ids["episode_id"]}
        await self.servers.post(
            self.table.resources_server, "/close_session", body, cookies=turn.resources_cookies, again=True
        )

    async def _closed_in_time(self, session: Closing) -> None:
        limit_s = self.table.cleanup_timeout_seconds
        closing = asyncio.ensure_future(session.close())
        if not await _within(closing, limit_s):
            raise CallFailed(f"the {session.name} did not close within {limit_s:g} s", transient=True)
        closing.result()

    def _captures_tokens(self) -> bool:
        """Whether model servers are to keep the agent's tokens: the run's setting, and the agent's own."""
        capture = self.servers.nesting.rest.get("token_id_capture")
        if not isinstance(capture, dict) or not capture.get("enabled"):
            return False
        agent = self.servers.nesting.instances[self.table.agent_server.name].block
        return bool(capture.get("all_agents") or agent.get("token_id_capture"))


class SingleAgentTurnLegacy(SingleAgentTurn):
    """`single_agent_turn_legacy`: flat rows too, each an episode of the pair it is configured with."""

    def asked(self, raw: bytes, headers: Mapping[str, str]) -> Asked:
        asked = super().asked(raw, headers)

        async def work(course: Course) -> dict[str, Any]:
            return self._flat((await asked.work(course))["result"])

        return Asked(asked.key, asked.capture_key, work, self._flat_failure)

    def row(self, row: dict[str, Any], raw: bytes, headers: Mapping[str, str]) -> Asked:
        if "task_input" in row or isinstance(row.get("task_id"), Mapping):
            raise BadRequest("a task with its input, but no episode: episode_id and task are expected")
        pair = self.table.resources_server.name, self.table.agent_server.name, self.instance.name
        source, named = row.get("task_source", pair[0]), row.get("agent_ref", {"name": pair[1]})
        if source not in pair:
            raise BadRequest(f"task_source {source!r} is none of {', '.join(pair)}")
        if not isinstance(named, dict) or named.get("name") != pair[1]:
            raise BadRequest(f"agent_ref {named!r} is not the agent of this server, {pair[1]}")
        return self.typed(EpisodeRequest.model_validate({"episode_id": _row_id(row), "task": _row_task(row, source)}))

    def _flat(self, result: Mapping[str, Any]) -> dict[str, Any]:
        return {**result, "agent_ref": {"name": self.table.agent_server.name}}

    def _flat_failure(self, failure: Failure) -> dict[str, Any]:
        told = {
            "_ng_failure_class": "environment_server_failed",
            "_ng_failure_terminal": failure.terminal,
            "_ng_failure_message": failure.failure_reason,
            "_ng_failure_stage": failure.stage,
        }
        if failure.partial_response is not None:
            told["_ng_failure_partial_response"] = failure.partial_response
        return self._flat(told)


def _row_id(row: Mapping[str, Any]) -> dict[str, Any]:
    """Which rollout a flat row is, and which attempt."""
    rollout = row.get("_ng_rollout_id")
    if rollout is None:
        numbers = [row.get(key) for key in ("_ng_task_index", "_ng_rollout_index")]
        if not all(isinstance(number, int) for number in numbers):
            raise BadRequest("a row needs _ng_task_index and _ng_rollout_index, or _ng_rollout_id")
        rollout = "-".join(map(str, numbers))
    return {"rollout_id": rollout, "attempt": row.get("_ng_attempt_index", 0)}


def _row_task(row: Mapping[str, Any], taskset: str) -> dict[str, Any]:
    """Its task: the id that it has, or its number; everything but what routes it."""
    ids = (row[key] for key in ("task_id", "problem_id", "instance_id", "_ng_task_index") if row.get(key) is not None)
    given = next(ids, None)
    if given is None:
        raise BadRequest("a row needs a task_id, or _ng_task_index")
    routing = ("agent_ref", "task_source", "skills_ref")
    data = {key: value for key, value in row.items() if key not in routing and not key.startswith("_ng_")}
    return {"task_id": {"taskset": taskset, "task_id": str(given)}, "task_input": data}


def _expect(who: str, answer: Mapping[str, Any], key: str, value: str) -> None:
    if answer.get(key) != value:
        raise CallFailed(f"{who} answered {key} = {answer.get(key)!r}, not {value!r}", transient=False)


async def _within(task: asyncio.Future[None], limit_s: float) -> bool:
    """Whether the task ended in time; else, or with its caller, it is cancelled and waited for."""
    try:
        return bool((await asyncio.wait([task], timeout=limit_s))[0])
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
