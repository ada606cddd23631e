"""`Front`: the routes of one environment server.

    POST /run                               an episode, or a legacy row
    POST /aggregate_metrics                 statistics of results
    GET  /, /livez, /health, /healthz       alive
    GET  /readyz                            503 until episodes can run
    GET  /metrics                           counts of the whole process, for Prometheus

Requests that come before the protocol has started wait for it. A body that is no request is 422 with the faults; a
handled failure is 200 with `failure`. A client that hangs up cancels nobody else: see `episodes`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pydantic
from aiohttp import web
from multidict import CIMultiDict

from shmrl.env.episodes.episodes import Episodes
from shmrl.env.episodes.plan import Hosted
from shmrl.env.episodes.protocol import HOPS, parsed
from shmrl.env.episodes.servers import Answer, CallFailed, Servers
from shmrl.env.episodes.telemetry import Telemetry
from shmrl.env.episodes.wire import encoded
from shmrl.errors import ConfigError

log = logging.getLogger(__name__)
MAX_BODY = 256 << 20
"""Bytes of a request: rows carry images."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """One instance: its protocol, its episodes, its routes. `url` is set by who listens."""

    def __init__(self, hosted: Hosted, servers: Servers, telemetry: Telemetry, token: str | None) -> None:
        self.hosted, self.url = hosted, ""
        self.ready = asyncio.Event()
        counted = telemetry.of(hosted.instance)
        self.protocol = hosted.protocol(hosted.instance, hosted.table, servers, counted)
        self._episodes = Episodes(hosted.table, counted)
        self._telemetry, self._token = telemetry, token

    async def start(self) -> None:
        """Returns when episodes can run; raises what keeps them from it."""
        await self.protocol.start()
        self.ready.set()

    async def close(self) -> None:
        """End the episodes, then what ran them."""
        await self._episodes.close()
        await self.protocol.close()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[guard(self._token)], client_max_size=MAX_BODY)
        app.router.add_post("/run", self._run)
        app.router.add_post("/aggregate_metrics", self._aggregate)
        app.router.add_get("/metrics", self._metrics)
        add_health(app, self.ready.is_set)
        return app

    async def _run(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            asked = self.protocol.asked(raw, request.headers)
        except (ValueError, ConfigError) as error:
            return json_response({"detail": faults(error)}, 422)
        await self.ready.wait()
        answer = await self._episodes.run(asked.key, asked.capture_key, asked.work, asked.answer_to)
        response = _relayed(answer) if isinstance(answer, Answer) else json_response(answer)
        try:
            await response.prepare(request)
            await response.write_eof()
            self._episodes.handed_over(asked.key)
        except ConnectionError:
            log.info("who asked for episode %s is gone; its answer is kept", asked.capture_key)
        return response

    async def _aggregate(self, request: web.Request) -> web.Response:
        raw = await request.read()
        try:
            return json_response(await self.protocol.aggregate(parsed(raw)))
        except CallFailed as error:
            return json_response({"detail": str(error)}, 502)
        except ValueError as error:
            return json_response({"detail": faults(error)}, 422)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._telemetry.page(), headers={"Content-Type": "text/plain; version=0.0.4"})


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=encoded(value), status=status, content_type="application/json")


def _relayed(answer: Answer) -> web.Response:
    """Another server's answer as it came, its repeated headers too."""
    headers = CIMultiDict([(name, value) for name, value in answer.headers if name.lower() not in HOPS])
    return web.Response(body=answer.body, status=answer.status, headers=headers)


def faults(error: ValueError | ConfigError) -> Any:
    """What is wrong with a body: pydantic's list, where it found it, or a sentence."""
    if isinstance(error, pydantic.ValidationError):
        return [
            {key: value for key, value in fault.items() if key in ("type", "loc", "msg")}
            for fault in error.errors(include_url=False, include_context=False, include_input=False)
        ]
    return str(error)


def guard(token: str | None) -> Any:
    """A middleware that asks for the token, if there is one, as a bearer token."""

    @web.middleware
    async def authorised(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode()):
            return json_response({"detail": "the bearer token is missing or wrong"}, 401)
        return await handler(request)

    return authorised


def add_health(app: web.Application, ready: Callable[[], bool], *, on: tuple[str, ...] = ("/readyz",)) -> None:
    """Gym's routes of life and readiness. on: the paths that are 503 until it is ready; all others are alive."""

    async def alive(_: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def readiness(_: web.Request) -> web.Response:
        return json_response({"status": "ok"}) if ready() else json_response({"status": "starting"}, 503)

    for path in ("/", "/livez", "/health", "/healthz", "/readyz"):
        app.router.add_get(path, readiness if path in on else alive)
