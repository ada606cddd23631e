"""`/v1/chat/completions` for one worker's episodes: what environments talk to that bring a client of their own.

On loopback, in the env worker, for as long as its environment. A request names its episode's model in `X-Session-ID`
(verifiers sends a trace's id there) and has the worker's key; the model records it as it records an author's calls,
through the engine's token route, so that such an environment's arrays are those of any other. Only text crosses here.
What is sampled and how is the source's to say: of a request's own settings only max_tokens counts.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from shmrl.env.model import Choice, Completion, Message, Model
from shmrl.errors import EngineError, EnvError, ShmrlError, told

log = logging.getLogger(__name__)

SESSION = "X-Session-ID"
MAX_BODY = 64 << 20
EXHAUSTED = {
    "length": (
        "context_length_exceeded",
        "This model's maximum context length is {most} tokens; the prompt has {here}",
    ),
    "max_turns": ("max_turns_reached", "the episode has had its max_turns"),
}
"""How the end of a model is told, by `Model.limit`: (code, message). Clients know the first one from vLLM."""


@dataclass(slots=True, eq=False)
class Session:
    """One model behind the endpoint. `error`: what went wrong in it first, as it was, for whoever sees only HTTP.

    said: the model's replies by what a client sends back of them, so that a conversation is recognised.
    """

    model: Model
    error: Exception | None = None
    said: dict[str, Message] = field(default_factory=dict)

    def asked(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A request's messages, the model's own replies among them as it gave them. EnvError for what is no text."""
        plain = [_text_only(message) for message in messages]
        return [self.said.get(_key(m), m) if m.get("role") == "assistant" else m for m in plain]

    def reply(self, message: Message) -> None:
        self.said[_key(message)] = message


class Endpoint:
    """The server. `url` ends with /v1; `key` is the bearer token.

    Example:
        async with Endpoint() as endpoint:
            session = endpoint.open("trace-1", model)
            ...  # a client of endpoint.url with the header X-Session-ID: trace-1
            endpoint.close("trace-1")
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self.url = ""
        self._sessions: dict[str, Session] = {}

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def __aenter__(self) -> Endpoint:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def open(self, name: str, model: Model) -> Session:
        """Requests of this name are the model's, until `close`."""
        session = self._sessions[name] = Session(model)
        return session

    def close(self, name: str) -> None:
        self._sessions.pop(name, None)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            return _refused(401, "a key is missing, or another worker's", "invalid_api_key")
        session = self._sessions.get(request.headers.get(SESSION, ""))
        if session is None:
            return _refused(404, f"no episode is under way in session {request.headers.get(SESSION)!r}", "no_session")
        try:
            body = await request.json()
            completion = await self._answer(session, body)
        except (ValueError, TypeError, KeyError, EnvError) as error:
            session.error = session.error or error
            return _refused(400, told(error), "invalid_request")
        except ShmrlError as error:
            session.error = session.error or error
            return _refused(502 if isinstance(error, EngineError) else 500, str(error), type(error).__name__)
        if not completion.usage["completion_tokens"]:
            code, text = EXHAUSTED[session.model.limit]
            facts = {"most": session.model.spec.max_model_len, "here": completion.usage["prompt_tokens"]}
            return _refused(400, text.format(**facts), code)
        reply = _reply(session.model, completion)
        return await _streamed(request, reply, body) if body.get("stream") else web.json_response(reply)

    async def _answer(self, session: Session, body: Any) -> Completion:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise EnvError("a request is a map with messages")
        if body.get("n") not in (None, 1):
            raise EnvError(f"n = {body['n']}: one completion per request")
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        asked = session.asked(body["messages"])
        completion = await session.model.create(messages=asked, tools=body.get("tools") or None, max_tokens=most)
        session.reply(completion.choices[0].message)
        return completion


def _text_only(message: Any) -> Mapping[str, Any]:
    """A message whose content is one text; EnvError for images and whatever else has no ids of text."""
    if not isinstance(message, Mapping):
        raise EnvError(f"a message is a map, not a {type(message).__name__}")
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    others = [part.get("type") if isinstance(part, Mapping) else part for part in parts]
    if any(kind != "text" for kind in others):
        raise EnvError(f"content of type {', '.join(map(str, others))}: only text is supported")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _key(message: Mapping[str, Any]) -> str:
    """What is the same of a reply and of what a client sends back of it, which may have more keys, or fewer."""
    calls = [(call.get("id"), dict(call.get("function") or {})) for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("content") or "", calls], sort_keys=True)


def _reply(model: Model, completion: Completion) -> dict[str, Any]:
    """OpenAI's ChatCompletion."""
    return {
        "id": f"chatcmpl-{model.turns}",
        "object": "chat.completion",
        "created": 0,
        "model": completion.model,
        "choices": [_choice(choice, "message") for choice in completion.choices],
        "usage": completion.usage,
    }


def _choice(choice: Choice, key: str) -> dict[str, Any]:
    return {"index": choice.index, key: dict(choice.message), "finish_reason": choice.finish_reason}


async def _streamed(request: web.Request, reply: dict[str, Any], body: Mapping[str, Any]) -> web.StreamResponse:
    """The whole reply as one event, for clients that only read streams."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    chunk = {**reply, "object": "chat.completion.chunk"}
    message = reply["choices"][0]["message"]
    calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": reply["choices"][0]["finish_reason"]}]
    for event in (json.dumps(chunk), "[DONE]"):
        await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response


def _refused(status: int, message: str, code: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "invalid_request_error", "code": code}}, status=status
    )
