"""verifiers' harness for training: a chat loop in the worker itself, with the task's tools.

verifiers' own harnesses start a program per episode, by `uv` and from PyPI; this one starts nothing and needs no
network. A turn goes to verifiers' interception server, as it must, tools are called over MCP, and the loop ends with a
reply that calls none, with the context, or when verifiers stops the rollout. Runs in the env workers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from shmrl.env.endpoint import EXHAUSTED

NAME = "shmrl_chat"
"""Its id: the top-level name under which verifiers imports it."""
BUDGETS = tuple(code for code, _ in EXHAUSTED.values())


def register() -> None:
    """Let verifiers find the harness by its id."""
    sys.modules[NAME] = sys.modules[__name__]


class ChatConfig(HarnessConfig):  # type: ignore[misc]
    """Nothing to set."""


class Chat(Harness[ChatConfig]):  # type: ignore[misc]
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """One segment of an exchange. A failed call is the program's failure; verifiers knows the cause."""
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {secret}"}
            timeout = aiohttp.ClientTimeout(total=None)  # verifiers has the deadlines
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools = await connect_mcp({"mcpServers": servers}, stack) if servers else ([], {}, {})
            loop = _Loop(http, endpoint, ctx.model, tools, tool_interception_url)
            stopped = await loop.run(_opening(*self.resolve_prompt(data)))
        return ProgramResult(exit_code=1 if stopped else 0, stdout="", stderr=stopped or "")


def _opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or ())]


class _Loop:
    """The conversation. `tools`: (schemas, names -> servers, servers), as verifiers' own programs have them."""

    def __init__(
        self, http: aiohttp.ClientSession, endpoint: str, model: str, tools: tuple[Any, Any, Any], gate: str | None
    ) -> None:
        self._http, self._url, self._model, self._gate = http, f"{endpoint}/chat/completions", model, gate
        self._schemas, self._dispatch, self._servers = tools

    async def run(self, messages: list[dict[str, Any]]) -> str | None:
        """Until a reply without tool calls, or the end of context or turns: None. Else what went wrong."""
        while True:
            status, reply = await self._post(self._url, self._request(messages))
            if status != 200:
                return None if any(code in json.dumps(reply) for code in BUDGETS) else f"{status}: {reply}"
            message = {key: value for key, value in reply["choices"][0]["message"].items() if value is not None}
            messages.append(message)
            if not message.get("tool_calls"):
                return None
            for call in message["tool_calls"]:
                stopped, result = await self._call(call)
                if stopped is not None:
                    return stopped
                messages.append(result)

    def _request(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"model": self._model, "messages": messages, **({"tools": self._schemas} if self._schemas else {})}

    async def _call(self, call: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """(why the rollout ends, or None; the tool's message). What the model got wrong is told to the model."""
        function = call["function"]
        name = function["name"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError:
            arguments = function["arguments"]
        if self._gate is not None:
            asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            status, verdict = await self._post(self._gate, asked)
            if status != 200 or verdict["action"] == "stop":
                return f"{status}: {verdict}", {}
            if verdict["action"] == "deny":
                return None, dict(verdict["message"])
        if not isinstance(arguments, dict):
            content: Any = "error: the arguments are no JSON object"
        elif name not in self._dispatch:
            content = f"error: there is no tool {name!r}; there are {', '.join(self._dispatch) or 'none'}"
        else:
            content = await call_mcp(self._servers, self._dispatch, name, arguments)
        return None, {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    async def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        async with self._http.post(url, json=body) as response:
            return response.status, await response.json(content_type=None)


__all__ = ["Chat"]
