"""`SessionServer`: an environment's sessions behind one HTTP port, for OpenEnv and AgileRL clients.

    WS /ws                                a session: one socket, one process
    POST /reset, POST /step, GET /state   without a session: an environment of their own for one request
    GET /metadata, /schema, /health       constants; /health is 503 until the environment has loaded
    GET /healthz                          facts: ready, active and most sessions, restarts of the template

Runs in the env-server process, beside the native protocol or alone. A slot is taken when the environment has loaded,
and freed when its process is gone, so that there are never more than `max_concurrent_envs`. Where a token is asked for,
it is the first part of the path (http://host:port/TOKEN, which every stock client can use) or a bearer token.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from aiohttp import web

from shmrl.config import EnvServerConfig
from shmrl.config.addresses import is_loopback
from shmrl.env.sessions import frames
from shmrl.env.sessions.conversation import GOING_AWAY, MAX_TEXT, Conversation, Over
from shmrl.env.sessions.processes import SessionProcess, Template
from shmrl.env.sessions.slots import Slots
from shmrl.env.starting import cannot_bind, environment_settings, needs_sandbox, needs_token
from shmrl.errors import ConfigError, EnvError, WorkerDied
from shmrl.node.host import read_token
from shmrl.node.web import BACKLOG, GONE, Door, url_of

log = logging.getLogger(__name__)
REFUSED_S = 1.0
"""How long a refused client has to read why: its first message, or this."""
CLOSE_TIMEOUT_S = 2.0
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds and probes after which a peer behind a cut cable is gone. Pings of WebSocket some tunnels drop."""
GONE_S = 0.2
LEAVING = "the server is shutting down"
FILES, FILES_PER_SESSION = 256, 4
"""A session's: the client's socket, the link, the pidfd; one more for clients that are refused."""
BESIDE, FEWEST_BESIDE = 512, 64
"""Connections without a request, and requests beyond the sessions: as many of each as there can be open files."""

LARGE, LARGE_AT_ONCE = 1 << 20, 8
"""Bytes of a request's body from which only so many are read side by side."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionServer:
    """Serves sessions until `stop`, or until it cannot. `url` is known once `bound` is set, before the first is ready.

    Example: [serve] http = "127.0.0.1:8000", protocols = ["openenv"], max_concurrent_envs = 16
    """

    def __init__(self, config: EnvServerConfig) -> None:
        assert config.serve.http is not None
        self.config = config
        self.bound = asyncio.Event()
        self.url = ""
        self._slots = Slots(config.serve.max_concurrent_envs)
        self._opened = 0
        self._restarts = 0
        self._stop = asyncio.Event()
        self._ready = asyncio.Event()
        self._conversations: set[asyncio.Task[Any]] = set()
        self._reading = asyncio.Semaphore(LARGE_AT_ONCE)
        self._token = config.serve.token

    async def run(self) -> None:
        """Serve. Raises PortInUse, ConfigError, TasksetError, WorkerDied."""
        needs_sandbox(self.config)
        host, port = self._place()
        app = self._app()
        beside = self._allow_files()
        door = Door(app, beside, self._slots.most + beside)
        runner = door.runner(access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)
        await runner.setup()
        keeping: asyncio.Task[None] | None = None
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await self._listen(door, runner, host, port)
            keeping = asyncio.create_task(self._keep_template())
            await asyncio.wait({stopping, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
        finally:
            self._stop.set()
            tasks = [task for task in (keeping, stopping) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._conversations:  # their processes are gone; they tell their clients
                await asyncio.wait(self._conversations, timeout=CLOSE_TIMEOUT_S)
            await runner.cleanup()

    def stop(self) -> None:
        """Make `run` return; it ends the sessions first."""
        self._stop.set()

    # ------------------------------------------------------------------------------------------------------ lifecycle

    def _allow_files(self) -> int:
        """Raise this process's limit of open files to what all sessions need -> connections that may wait beside them,
        and requests. ConfigError beyond the hard limit."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = FILES + FILES_PER_SESSION * self._slots.most
        if needed > hard != resource.RLIM_INFINITY:
            raise ConfigError(
                f"serve.max_concurrent_envs = {self._slots.most} takes {needed:,} open files, and the hard limit is "
                f"{hard:,} (ulimit -Hn)"
            )
        beside = BESIDE if hard == resource.RLIM_INFINITY else min(BESIDE, (hard - needed) // 2)
        wanted = needed + 2 * beside + BACKLOG
        if wanted > soft != resource.RLIM_INFINITY:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )
        return max(beside, FEWEST_BESIDE)

    def _place(self) -> tuple[str, int]:
        host, _, port = str(self.config.serve.http).rpartition(":")
        host = host.strip("[]")
        if not is_loopback(host):
            where = f"serve.http = {self.config.serve.http!r}"
            self._token = needs_token(where, self._token or read_token(self.config.arena), "serve.token")
        return host, int(port)

    async def _listen(self, door: Door, runner: web.AppRunner, host: str, port: int) -> None:
        try:
            self.url = url_of(*await door.listen(runner, (host, port)))
        except OSError as error:
            where = str(self.config.serve.http)
            raise cannot_bind(f"sessions of {self.config.name}", where, error, "serve.http") from None
        self.bound.set()

    async def _keep_template(self) -> None:
        """A template at all times: one that dies is replaced, within the budget. Raises what ends the server."""
        while True:
            template = self._template = Template(environment_settings(self.config))
            try:
                await template.load()
                self._say(template)
                self._ready.set()
                await template.died.wait()
            finally:
                self._ready.clear()
                await template.close()
            self._restarts += 1
            log.error("the env template died, and its sessions with it")
            if self._restarts > self.config.serve.restart_budget:
                budget = self.config.serve.restart_budget
                raise WorkerDied(f"the env template died {self._restarts} times, restart_budget is {budget}")

    def _say(self, template: Template) -> None:
        if threads := template.facts["threads"]:
            log.warning(
                "%s has %d threads after loading: sessions are started afresh instead of forked, and load it again",
                self.config.env.id,
                threads,
            )
        log.info("Serving %s (up to %d concurrent sessions)", self.url, self._slots.most)

    # ----------------------------------------------------------------------------------------------------------- HTTP

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._authorised], client_max_size=MAX_TEXT)
        for prefix in ("", "/{token}"):
            for method, path, handler in (
                ("GET", "/ws", self._ws),
                ("GET", "/health", self._health),
                ("GET", "/healthz", self._healthz),
                ("GET", "/metadata", self._constant),
                ("GET", "/schema", self._constant),
                ("POST", "/reset", self._stateless),
                ("POST", "/step", self._stateless),
                ("GET", "/state", self._stateless),
            ):
                app.router.add_route(method, prefix + path, handler)
        return app

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = request.match_info.get("token") or bearer
        if self._token is not None and not hmac.compare_digest(
            given.encode(errors="surrogatepass"), self._token.encode()
        ):
            return _json({"detail": "the token is missing or wrong: http://host:port/TOKEN, or a bearer token"}, 401)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        if self._ready.is_set():
            return _json({"status": "healthy"})
        return _json({"status": "unhealthy"}, 503)

    async def _healthz(self, _: web.Request) -> web.Response:
        return _json({"alive": True, **self.facts()}, 200 if self._ready.is_set() else 503)

    def facts(self) -> dict[str, Any]:
        """What /healthz says."""
        return {
            "ready": self._ready.is_set(),
            "active_sessions": self._slots.taken,
            "max_sessions": self._slots.most,
            "restarts": self._restarts,
        }

    async def _until_ready(self, request: web.Request) -> bool:
        """Wait for the template; False if the client, or the server, goes meanwhile. No place is held for that time."""
        awaited = [asyncio.create_task(one) for one in (self._ready.wait(), self._stop.wait(), _gone(request))]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in awaited:
                task.cancel()
            await asyncio.gather(*awaited, return_exceptions=True)
        return self._ready.is_set() and not _left(request)

    async def _constant(self, request: web.Request) -> web.Response:
        if not await self._until_ready(request):
            return _json({"detail": LEAVING}, 503)
        return _json(self._template.facts[request.path.rpartition("/")[2]])

    async def _stateless(self, request: web.Request) -> web.Response:
        """One request with an environment of its own, which takes a slot as long as it lasts."""
        try:
            async with self._reading if _is_large(request) else nullcontext():
                body = await request.read()
        except (*GONE, RuntimeError) as error:
            error.__traceback__ = None  # it has the bytes that came, and the request has it
            return _json({"detail": "the request broke off, or its body is not what its headers say"}, 400)
        if not await self._until_ready(request):
            return _json({"detail": LEAVING}, 503)
        if not await self._slots.take():
            full = frames.capacity_frame(self._slots.taken, self._slots.most)
            return web.Response(text=full, status=503, content_type=_JSON)
        process: SessionProcess | None = None
        try:
            process = await self._template.session()
            status, answer = await self._one(request, process, body)
        except EnvError as error:
            return _json({"detail": str(error)}, 503)
        finally:
            self._slots.leave()
            try:
                if process is not None:
                    await process.end()
            finally:
                self._slots.free()
        return web.Response(body=answer, status=status, content_type=_JSON)

    async def _one(self, request: web.Request, process: SessionProcess, body: bytes) -> tuple[int, bytes]:
        asking = asyncio.create_task(process.ask(request.path.rpartition("/")[2], body))
        gone = asyncio.create_task(_gone(request))
        timeout_s = self.config.serve.request_timeout_s or None
        done, _ = await asyncio.wait({asking, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (asking, gone):
            task.cancel()
        settled = await asyncio.gather(asking, return_exceptions=True)
        if asking in done and not isinstance(settled[0], BaseException):
            return settled[0]
        await process.end(0)
        problem = str(settled[0]) if asking in done else f"no answer within {timeout_s} s: the environment was killed"
        return (500 if asking in done else 504), frames.dumps({"detail": problem}).encode()

    # ------------------------------------------------------------------------------------------------------- sessions

    async def _ws(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(timeout=CLOSE_TIMEOUT_S, max_msg_size=MAX_TEXT, compress=False)
        await ws.prepare(request)
        _keep_alive(request)
        if not await self._until_ready(request):
            await self._tell(request, ws, Over(frames.error_frame(frames.SESSION_ERROR, LEAVING), GOING_AWAY))
            return ws
        if not await self._slots.take():
            await self._refuse(request, ws)
            return ws
        self._opened += 1
        number = self._opened
        log.info("session %d opened (%d of %d)", number, self._slots.taken, self._slots.most)
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            over = await self._converse(ws)
        finally:
            self._slots.free()
            self._conversations.discard(task)
            log.info("session %d closed (%d of %d)", number, self._slots.taken, self._slots.most)
        await self._tell(request, ws, over)
        return ws

    async def _converse(self, ws: web.WebSocketResponse) -> Over:
        try:
            process = await self._template.session()
        except BaseException as error:
            self._slots.leave()
            if not isinstance(error, EnvError):
                raise
            return Over(frames.error_frame(frames.FACTORY_ERROR, str(error), factory_name=self.config.env.id))
        serve = self.config.serve
        talk = Conversation(ws, process, serve.request_timeout_s, serve.idle_timeout_s, on_leaving=self._slots.leave)
        over = await talk.run()
        if self._stop.is_set():
            return Over(frames.error_frame(frames.SESSION_ERROR, LEAVING), GOING_AWAY)
        return over

    async def _refuse(self, request: web.Request, ws: web.WebSocketResponse) -> None:
        """Say that it is full, and hang up when the client had time to read it: a close that comes before a client's
        first message is all that some clients see."""
        log.warning("a session was refused: %d of %d are open", self._slots.taken, self._slots.most)
        try:
            await ws.send_str(frames.capacity_frame(self._slots.taken, self._slots.most))
            async with asyncio.timeout(REFUSED_S):
                await ws.receive()
        except (TimeoutError, ConnectionError):
            pass
        await self._tell(request, ws, Over())

    async def _tell(self, request: web.Request, ws: web.WebSocketResponse, over: Over) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if over.told and not ws.closed:
                    await ws.send_str(over.told)
                await ws.close(code=over.code)
        except (TimeoutError, ConnectionError):
            log.debug("a client was gone before it was told why")
            if request.transport is not None:
                request.transport.abort()


_JSON = "application/json"


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(text=frames.dumps(value), status=status, content_type=_JSON)


async def _gone(request: web.Request) -> None:
    """Returns when nobody waits for the answer any more."""
    while not _left(request):  # noqa: ASYNC110
        await asyncio.sleep(GONE_S)


def _is_large(request: web.Request) -> bool:
    return request.content_length is None or request.content_length > LARGE


def _left(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _keep_alive(request: web.Request) -> None:
    """The kernel asks whether a silent peer is there."""
    assert request.transport is not None
    end = request.transport.get_extra_info("socket")
    if end is not None and end.family in (socket.AF_INET, socket.AF_INET6):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            end.setsockopt(socket.IPPROTO_TCP, option, value)
