"""Other servers of Gym, as `single_agent_turn` meets them: a resources server and an agent, in Gym 0.7's words.

They answer what the recorded ones answered (tests/data/gym/raw_calls.txt), remember every call and which sessions are
open, and misbehave where a test says so: `stub.on["/verify"] = 503` (a status), "drop" (the connection breaks), "hang"
(no answer until the caller leaves), a map (the answer instead), or a function of the body that gives one of these.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

RESPONSE = {
    "id": "resp_1", "created_at": 1.0, "model": "stub", "object": "response", "parallel_tool_calls": True,
    "tool_choice": "auto", "tools": [], "status": "completed",
    "output": [{
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "it is cold", "annotations": []}],
    }],
}  # fmt: skip
SANDBOX = {"connection": {"provider": "docker", "url": "http://127.0.0.1:9"}, "workdir": "/work"}
TOOLS = {"server_name": "weather", "url_path": "/mcp", "transport": "http", "headers": {"X-Session": "1"}}
LIFE = [
    "/seed_session",
    "/v1/agent_sessions",
    "/v1/responses",
    "/v1/agent_sessions/close",
    "/verify",
    "/close_session",
]
"""The calls of an episode that goes well, in order."""


@dataclass
class Call:
    path: str
    body: Any
    cookies: dict[str, str]
    headers: dict[str, str]


@dataclass
class Stub:
    """Both servers; `urls` are of the resources server and of the agent."""

    calls: list[Call] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    on: dict[str, Any] = field(default_factory=dict)
    reached: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    ports: list[int] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [call.path for call in self.calls]

    def of(self, path: str) -> Call:
        return next(call for call in self.calls if call.path == path)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.startswith("/ng-rollout/"):
            path = "/v1/responses"
        if request.method == "GET":  # whoever asks whether it is up
            return web.json_response({"status": "ok"})
        body = await request.json()
        self.calls.append(Call(path, body, dict(request.cookies), dict(request.headers)))
        self._keep_book(path, body)
        self.reached[path].set()
        action = self.on.get(path)
        if callable(action):
            action = action(body)
        if action == "hang":
            await asyncio.Event().wait()
        if action == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(action, int):
            return web.json_response({"detail": f"{path} is out of order"}, status=action)
        answer = web.json_response(action if action is not None else self._answer(path, body))
        if path == "/seed_session" and self.on.get("cookie") != "none":
            answer.set_cookie("resources", "signed.one")
        if path.startswith("/v1/"):
            answer.set_cookie("agent", "signed.agent")
        if path == "/run":
            answer.headers.add("X-Agent", "yes")
        return answer

    def _keep_book(self, path: str, body: Any) -> None:
        """Seeds open as soon as they are asked for: their answers may be lost."""
        if path in ("/seed_session", "/v1/agent_sessions"):
            name = body.get("resources_session_id") or body["agent_session_id"]
            if name not in self.opened:
                self.opened.append(name)
        if path in ("/close_session", "/v1/agent_sessions/close") and self.on.get(path) is None:
            self.closed.append(body.get("resources_session_id") or body["agent_session_id"])

    def _answer(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/seed_session":
            ids = {"resources_session_id": body["resources_session_id"]}
            return {**ids, "resources_tools": TOOLS, "sandbox_access": SANDBOX}
        if path == "/v1/agent_sessions":
            return {"agent_session_id": body["agent_session_id"]}
        if path == "/v1/responses":
            return RESPONSE
        if path == "/v1/agent_sessions/close":
            ids = {"agent_session_id": body["agent_session_id"]}
            return {**ids, "agent_observations": {"calls": 1}, "resources_cookies": {"resources": "signed.two"}}
        if path == "/verify":
            return {**body, "reward": 1.0, "mask_sample": False, "failure_kind": None, "failure_reason": None}
        if path == "/close_session":
            return {"resources_session_id": body["resources_session_id"]}
        if path == "/run":
            return {**body, "reward": 0.5}
        return {"group_level_metrics": [], "agent_metrics": {"mean/reward": 0.25}, "key_metrics": {}}


@asynccontextmanager
async def stubbed():
    """The two servers, running."""
    stub, runners = Stub(), []
    for _ in range(2):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", stub.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.ports.append(runner.addresses[0][1])
        runners.append(runner)
    try:
        yield stub
    finally:
        for runner in runners:
            await runner.cleanup()
