"""Calls of other servers of a nesting: agents, resources, models. JSON over HTTP, cookies by hand, never silent.

A call fails once and says so: `CallFailed` carries whether trying the episode once more could help, and Gym's name for
what was the matter. Only calls that are safe to repeat (`again=True`: opening and closing under an id of our own) are
repeated, `TRIES` times in all, when the connection broke.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import Any

import aiohttp

from shmrl.config.gym import Reference
from shmrl.config.nesting import Nesting
from shmrl.env.episodes.telemetry import Telemetry
from shmrl.env.episodes.wire import encoded
from shmrl.errors import EnvError

log = logging.getLogger(__name__)
TRIES, PAUSE_S = 3, 0.5
CONNECT_S = 10.0
TRANSIENT = frozenset({408, 425, 429})
JSON = {"Content-Type": "application/json"}


class CallFailed(EnvError):
    """A server did not do what it was asked to. transient: it might, once more. kind: Gym's failure kind, or None."""

    def __init__(self, message: str, *, transient: bool, kind: str | None = None) -> None:
        self.transient, self.kind = transient, kind
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply as it came: status, headers (names may repeat), body, and the cookies it sets."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    cookies: dict[str, str]


class Servers:
    """The servers of a nesting, as one instance calls them. Between `open` and `close`."""

    def __init__(self, nesting: Nesting, telemetry: Telemetry) -> None:
        self.nesting, self._telemetry = nesting, telemetry
        self._client: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)  # an episode's own deadline bounds the rest
        self._client = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def url(self, reference: Reference) -> str:
        """Where a server is; ConfigError."""
        return self.nesting.url(reference)

    async def post(
        self,
        reference: Reference,
        path: str,
        body: Any,
        *,
        cookies: Mapping[str, str] | None = None,
        again: bool = False,
        route: str = "",
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """(the map it answered, the cookies it set). CallFailed. route: what it is counted as, if not its path."""
        route = route or path
        answer = await self.relay(reference, path, encoded(body), JSON, cookies=cookies, again=again, route=route)
        who = f"{reference.name}{path}"
        if answer.status >= 400:
            transient = answer.status in TRANSIENT or answer.status >= 500
            text = answer.body[:500].decode("utf-8", "replace")
            raise CallFailed(f"{who} answered {answer.status}: {text}", transient=transient)
        try:
            value = json.loads(answer.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise CallFailed(f"{who} answered no JSON map: {answer.body[:200]!r}", transient=False)
        return value, answer.cookies

    async def relay(
        self,
        reference: Reference,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        cookies: Mapping[str, str] | None = None,
        again: bool = False,
        route: str = "",
    ) -> Answer:
        """Whatever it answers to these bytes. CallFailed if it answers nothing."""
        counted = self._telemetry.of(self.nesting.instances[reference.name])
        url = self.url(reference) + path
        for left in reversed(range(TRIES if again else 1)):
            try:
                answer = await self._once(url, body, headers, cookies)
            except (aiohttp.ClientError, OSError) as error:
                counted.called(route or path, _kind(error))
                problem = f"{reference.name}{path}: {type(error).__name__}: {error}"
                if not left:
                    raise CallFailed(problem, transient=True, kind=_kind(error)) from None
                log.warning("%s; once more in %g s", problem, PAUSE_S)
                await asyncio.sleep(PAUSE_S)
            else:
                counted.called(route or path, str(answer.status))
                return answer
        raise AssertionError("unreachable")

    async def _once(
        self, url: str, body: bytes, headers: Mapping[str, str], cookies: Mapping[str, str] | None
    ) -> Answer:
        assert self._client is not None, "open() first"
        if cookies:
            headers = {**headers, "Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
        async with self._client.post(url, data=body, headers=headers, allow_redirects=False) as reply:
            return Answer(reply.status, tuple(reply.headers.items()), await reply.read(), _set_by(reply.cookies))


def _set_by(cookies: SimpleCookie) -> dict[str, str]:
    return {name: morsel.value for name, morsel in cookies.items()}


def _kind(error: Exception) -> str:
    if isinstance(error, TimeoutError):  # aiohttp's timeouts are
        return "transport_timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "transport_unreachable"
    return "transport_peer_drop"
