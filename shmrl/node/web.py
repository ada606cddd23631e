"""`Door`: who comes in at an HTTP port of ours, served by aiohttp, so that clients that do not go on keep nobody out.

A connection costs whoever opens it nothing, and us a file. It waits while it has sent no whole request, or no whole
body, and between two requests. Whoever sends none within `REQUEST_S`, or no whole body within as long again, is hung up
on; of more than `most_waiting` the oldest goes, those between two requests only where all others have just come.
`most_busy` is how many requests can be under way; further ones are answered 503. What one costs is the application's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

REQUEST_S = 60.0
IDLE_S = 300.0
"""Between two requests of one connection: longer than the pools of clients keep theirs, so that they close first."""
BACKLOG = 1024
"""Connections that the kernel keeps for us, and that are accepted in one turn of the loop, before a door sees any."""
FRESH_S = 1.0
"""How long somebody who came to ask is not taken for somebody who never will, if another can go."""
CLOSED = "Connection closed."  # a RuntimeError of a body that is still read when its server stops
GONE = (ConnectionError, ClientError, HttpProcessingError, web.RequestPayloadError)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Wait(NamedTuple):
    since: float
    idle: bool
    timer: asyncio.TimerHandle


class Door:
    """One application's connections, from the event loop that serves it.

    Example:
        door = Door(web.Application(), most_waiting=512)
        await (runner := door.runner(access_log=None)).setup()
        await door.listen(runner, ("127.0.0.1", 0))
    """

    def __init__(self, app: web.Application, most_waiting: int, most_busy: int | None = None) -> None:
        """Before the application is set up: its first middleware is the door's."""
        self._app, self._most, self._most_busy = app, most_waiting, most_busy
        self._waiting: dict[web.RequestHandler, _Wait] = {}  # the oldest first
        self._busy = 0
        app.middlewares.insert(0, self._counted)

    def runner(self, **options: Any) -> web.AppRunner:
        """Of the application; its log has no traceback of what a client did."""
        return web.AppRunner(self._app, logger=_log(), **options)

    async def listen(self, runner: web.AppRunner, where: tuple[str, int] | socket.socket) -> tuple[str, int]:
        """Serve the runner's application at (host, port), or a socket that is bound -> what was bound. OSError."""
        await _Site(runner, self, where).start()
        host, port = runner.addresses[-1][:2]
        return str(host), int(port)

    def enter(self, server: web.Server) -> web.RequestHandler:
        """What talks to a connection that was just accepted."""
        if len(self._waiting) >= self._most:
            self._make_room()
        connection = server()
        self._await(connection, REQUEST_S)
        return connection

    def _make_room(self) -> None:
        """For one more: forget those that left, else close one."""
        fresh = asyncio.get_running_loop().time() - FRESH_S
        for connection in [one for one, wait in self._waiting.items() if one.transport is None and wait.since < fresh]:
            self._no_longer(connection)
        while len(self._waiting) >= self._most:
            self._close(next(self._least(fresh)))

    def _least(self, fresh: float) -> Iterator[web.RequestHandler]:
        """Those who can go, the first of them first."""
        yield from (one for one, wait in self._waiting.items() if not wait.idle and wait.since < fresh)
        yield from (one for one, wait in self._waiting.items() if wait.idle)
        yield from self._waiting

    def _await(self, connection: web.RequestHandler, seconds: float, *, idle: bool = False) -> None:
        self._no_longer(connection)
        loop = asyncio.get_running_loop()
        self._waiting[connection] = _Wait(loop.time(), idle, loop.call_later(seconds, self._close, connection))

    def _no_longer(self, connection: web.RequestHandler) -> None:
        if wait := self._waiting.pop(connection, None):
            wait.timer.cancel()

    def _has_come(self, connection: web.RequestHandler) -> None:
        """A body; by then its request may have been answered."""
        if (wait := self._waiting.get(connection)) is not None and not wait.idle:
            self._no_longer(connection)

    def _close(self, connection: web.RequestHandler) -> None:
        self._no_longer(connection)
        connection.force_close()

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        self._no_longer(connection)
        if self._most_busy is not None and self._busy >= self._most_busy:
            busy = f"{self._busy} requests are under way, and no more can be"
            return web.Response(status=503, text=busy, headers={"Connection": "close", "Retry-After": "1"})
        if request.body_exists and not request.content.is_eof():
            self._await(connection, REQUEST_S)
            request.content.on_eof(lambda: self._has_come(connection))
        self._busy += 1
        try:
            return await handler(request)
        finally:
            self._busy -= 1
            self._no_longer(connection)
            if connection.transport is not None and not connection.transport.is_closing():
                self._await(connection, IDLE_S, idle=True)


def url_of(host: str, port: int) -> str:
    """Example: http://[::1]:8000 of ("::1", 8000)"""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Site(web.BaseSite):
    """A place to listen whose connections come through a door."""

    def __init__(self, runner: web.AppRunner, door: Door, where: tuple[str, int] | socket.socket) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._door, self._where = door, where

    @property
    def name(self) -> str:
        return f"a door at {self._where}"

    async def start(self) -> None:
        await super().start()
        server, where, create = self._runner.server, self._where, asyncio.get_running_loop().create_server
        assert server is not None

        def enter() -> web.RequestHandler:
            return self._door.enter(server)

        if isinstance(where, socket.socket):
            self._server = await create(enter, sock=where, backlog=self._backlog)
        else:
            self._server = await create(enter, *where, backlog=self._backlog)


def _log() -> logging.Logger:
    log = logging.getLogger(__name__)
    if _unless_a_clients not in log.filters:
        log.addFilter(_unless_a_clients)
    return log


def _unless_a_clients(record: logging.LogRecord) -> bool:
    """Whether an error is ours: what a client sent, or broke off, is a line for who debugs."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, GONE) and str(error) != CLOSED:
        return True
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    record.msg, record.args = f"{record.getMessage()}: {error}".partition("\n")[0], ()
    record.exc_info = record.exc_text = None
    return logging.getLogger(__name__).isEnabledFor(logging.DEBUG)
