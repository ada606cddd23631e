"""One client's socket and its session process: texts to and fro, each within its deadline, until one of them ends.

A reader task notices at any moment that the client is gone, in the middle of a step too. Nothing is parsed here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiohttp import WSMsgType, web

from shmrl.env.sessions.frames import SESSION_ERROR, error_frame
from shmrl.env.sessions.processes import CLOSE_S, SessionEnded, SessionProcess
from shmrl.env.sessions.session import LAST

MAX_TEXT = 16 << 20
"""Bytes of one message; a longer one closes the socket with 1009."""
MAX_AHEAD = 64
"""Messages that a client may send before it reads the answers."""
BUSY_CLOSE_S = 0.2
"""How long the environment of a client that vanished may take to close, should it not be stuck in a step."""
NORMAL, GOING_AWAY, IDLE = 1000, 1001, 4408


class Over(Exception):
    """The session ends: what the client is still told, the code its socket is closed with, the environment's grace."""

    def __init__(self, told: str = "", code: int = NORMAL, grace_s: float = CLOSE_S) -> None:
        self.told, self.code, self.grace_s = told, code, grace_s
        super().__init__(told)


class Conversation:
    """request_timeout_s, idle_timeout_s: 0 for none. on_leaving: called when it is over, before its process is."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        process: SessionProcess,
        request_timeout_s: float,
        idle_timeout_s: float,
        on_leaving: Callable[[], None],
    ) -> None:
        self._on_leaving = on_leaving
        self._socket, self._process = socket, process
        self._request_timeout_s, self._idle_timeout_s = request_timeout_s or None, idle_timeout_s or None
        self._inbox: deque[str] = deque()
        self._arrived = asyncio.Event()
        self._problem = ""

    async def run(self) -> Over:
        """Talk until it is over; the process is gone when this returns, the socket still open."""
        reading = asyncio.create_task(self._read())
        ended = asyncio.create_task(self._process.ended.wait())
        over = Over(grace_s=0)  # where this task is cancelled
        try:
            while True:
                text = await self._next(reading, ended)
                number, answer = await self._ask(text, reading)
                if answer:
                    async with asyncio.timeout(self._idle_timeout_s):  # a client may stop to read, too
                        await self._socket.send_str(answer.decode())
                if number == LAST:
                    raise Over
        except Over as reason:
            over = reason
        except TimeoutError:
            over = Over(code=IDLE)
        except ConnectionError:  # the client vanished while it was answered
            over = Over()
        finally:
            self._on_leaving()
            await self._process.end(over.grace_s)
            for task in (reading, ended):
                task.cancel()
            await asyncio.gather(reading, ended, return_exceptions=True)
        return over

    async def _read(self) -> None:
        """Takes in what the client sends; returns when there will be nothing more."""
        while not self._problem:
            message = await self._socket.receive()
            if message.type is WSMsgType.BINARY:
                self._problem = "messages are texts, not binary"
            elif message.type is not WSMsgType.TEXT:
                return
            elif len(self._inbox) >= MAX_AHEAD or sum(map(len, self._inbox)) > MAX_TEXT:
                self._problem = f"more than {MAX_AHEAD} messages, or {MAX_TEXT:,} bytes, ahead of their answers"
            else:
                self._inbox.append(message.data)
                self._arrived.set()

    async def _next(self, reading: asyncio.Task[None], ended: asyncio.Task[bool]) -> str:
        """The next message. Over when the client is gone or idle for too long, or its process has ended."""
        while not self._inbox:
            self._arrived.clear()
            arrived = asyncio.create_task(self._arrived.wait())
            awaited = {arrived, reading, ended}
            done, _ = await asyncio.wait(awaited, timeout=self._idle_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            arrived.cancel()
            if ended in done:
                raise _lost(self._process)
            if reading in done and not self._inbox:
                raise self._gone(CLOSE_S)
            if not done:
                why = f"idle for {self._idle_timeout_s:g} s (serve.idle_timeout_s): the session was closed"
                raise Over(error_frame(SESSION_ERROR, why), IDLE)
        return self._inbox.popleft()

    async def _ask(self, text: str, reading: asyncio.Task[None]) -> tuple[int, bytes]:
        """The session's answer. Over if it takes too long, if it dies of it, or if nobody waits for it any more."""
        asking = asyncio.create_task(self._process.ask("ws", text.encode()))
        timeout_s = self._request_timeout_s
        try:
            done, _ = await asyncio.wait({asking, reading}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if asking in done:
                return asking.result()
        except SessionEnded:
            raise _lost(self._process) from None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if not done:
            why = f"no answer within {timeout_s:g} s (serve.request_timeout_s): the environment's process was killed"
            raise Over(error_frame(SESSION_ERROR, why), grace_s=0)
        raise self._gone(BUSY_CLOSE_S)

    def _gone(self, grace_s: float) -> Over:
        return Over(error_frame(SESSION_ERROR, self._problem) if self._problem else "", grace_s=grace_s)


def _lost(process: SessionProcess) -> Over:
    return Over(error_frame(SESSION_ERROR, f"the environment's process (pid {process.pid}) ended"))
