"""A session server in the test's process, sockets of it, and what its processes are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest

from shmrl.config import EnvServerConfig
from shmrl.env.sessions.server import SessionServer
from tests.env.test_server import alive

ENVS = "tests.env.sessions.environments:"


def session_config(env_id, args=None, **serve) -> EnvServerConfig:
    """An env server's configuration with sessions on a free port, and nothing else."""
    served = {"http": "127.0.0.1:0", "protocols": ["openenv"], **serve}
    return EnvServerConfig.model_validate({"name": "test", "env": {"id": env_id, "args": args or {}}, "serve": served})


class Socket:
    """A client's socket: says JSON, or anything."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws

    async def ask(self, kind, data=None):
        """The answer's (type, data)."""
        await self.ws.send_str(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        return await self.hear()

    async def hear(self):
        answer = json.loads(await self.ws.receive_str(timeout=20))
        return answer["type"], answer["data"]

    async def closed(self) -> int:
        """The code with which the server closes, which it has to do next."""
        message = await self.ws.receive(timeout=20)
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return self.ws.close_code

    def vanish(self, how="abort"):
        """End the connection without a word of WebSocket: by a reset (abort), or as the kernel does it for a process
        that was killed (close)."""
        getattr(self.ws._response.connection.transport, how)()


class Client:
    """HTTP and sockets of one server."""

    def __init__(self, http: aiohttp.ClientSession, server: SessionServer) -> None:
        self.http, self.server = http, server
        self._sockets: list[Socket] = []

    async def open(self, path="/ws") -> Socket:
        self._sockets.append(Socket(await self.http.ws_connect(self.server.url + path, max_msg_size=0)))
        return self._sockets[-1]

    def close(self):
        for socket in self._sockets:
            socket.ws._response.close()

    async def get(self, path, method="GET", **rest):
        """(status, JSON)."""
        async with self.http.request(method, self.server.url + path, **rest) as response:
            return response.status, json.loads(await response.text())

    async def facts(self):
        return (await self.get("/healthz"))[1]

    def processes(self) -> list[psutil.Process]:
        """Of sessions: the template's children that live (it takes a moment to bury one)."""
        children = psutil.Process(self.server._template._process.pid).children()
        return [process for process in children if alive(process)]

    async def free(self, slots=0, timeout_s=1.0):
        """Wait until `slots` are taken."""
        async with asyncio.timeout(timeout_s):
            while self.server.facts()["active_sessions"] != slots:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving_sessions(env_id, args=None, **serve) -> AsyncIterator[Client]:
    server = SessionServer(session_config(env_id, args, **serve))
    running = asyncio.create_task(server.run())
    ready = asyncio.create_task(server._ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if running.done():
        running.result()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = Client(http, server)
        try:
            yield client
        finally:
            client.close()
            server.stop()
            await running


@pytest.fixture
def sessions():
    """`async with sessions("TextEcho", max_concurrent_envs=2) as client`."""
    return lambda name, args=None, **serve: serving_sessions(ENVS + name, args, **serve)
