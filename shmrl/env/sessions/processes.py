"""The server's side of template and sessions: started, asked, killed, and their ends noticed by pidfd.

Owned by `server.py`, in the env-server process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from shmrl.env.link import Link
from shmrl.env.sessions.template import MAX_MESSAGE, ONE_THREAD
from shmrl.errors import ConfigError, EnvError, TasksetError, WorkerDied
from shmrl.wire import pack

CLOSE_S = 2.0
"""How long an environment may take to close before its process is killed."""


FORK_S = 30.0
"""How long the template may take to fork."""


class SessionEnded(EnvError):
    """The session's process is gone; the message says how it went, where that is known."""


class SessionProcess:
    """One session. `ended` is set when its process is gone, whatever ended it."""

    def __init__(self, pid: int, pidfd: int, link: Link) -> None:
        self.pid, self._pidfd, self._link = pid, pidfd, link
        self.ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set()

    async def ask(self, kind: str, payload: bytes) -> tuple[int, bytes]:
        """(number, payload) of the answer; see `session.py`. SessionEnded if there will be none."""
        self._link.send(0, kind, payload)
        reply = await self._link.receive()
        if reply is None:
            raise SessionEnded(f"the environment's process (pid {self.pid}) ended")
        return reply[0], reply[2]

    def start(self, settings: Mapping[str, Any]) -> None:
        self._link.send(0, "start", pack(settings))

    async def end(self, grace_s: float = CLOSE_S) -> None:
        """Let the environment close, for `grace_s`; then kill. Returns when the process is gone."""
        if grace_s:
            self._link.send(0, "end", b"")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.ended.wait()
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):  # the template was quicker to bury it than we to hear of it
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        await self.ended.wait()
        await self._link.close()


class Template:
    """The template process, started with this object, in an event loop; await `load` before anything else.

    `died` is set when it is gone. Its sessions die with it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.facts: dict[str, Any] = {}
        self.died = asyncio.Event()
        self._forking = asyncio.Lock()
        self._count = 0
        message = json.dumps(settings).encode()
        if len(message) > MAX_MESSAGE:
            raise ConfigError(f"env.args: {len(message):,} bytes as JSON; at most {MAX_MESSAGE:,} for sessions")
        self._launch(message)

    async def load(self) -> None:
        """Wait until it has loaded the environment. ConfigError, TasksetError, WorkerDied."""
        self.facts, _ = await self._receive()
        if "error" in self.facts:
            if self.facts["error"] == ConfigError.__name__:
                raise ConfigError(self.facts["message"])
            raise TasksetError(self.facts["message"])

    def _launch(self, settings: bytes) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shmrl.env.sessions.template", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
            )
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        self._end.send(settings)

    async def _receive(self) -> tuple[dict[str, Any], int]:
        """A message and its descriptor (-1 without one). WorkerDied at the connection's end."""
        await _readable(self._end)
        message, descriptors, _, _ = socket.recv_fds(self._end, MAX_MESSAGE, 1)
        if not message:
            await self.died.wait()
            pid, code = self._process.pid, self._process.returncode
            raise WorkerDied(f"the env template (pid {pid}) ended with code {code}; the log above has its last words")
        return json.loads(message), descriptors[0] if descriptors else -1

    async def session(self) -> SessionProcess:
        """A process with an environment of its own. EnvError where there is none to be had, or the template died."""
        ours, theirs = socket.socketpair()
        link = await Link.over(ours)
        try:
            with theirs:
                async with self._forking:
                    socket.send_fds(self._end, [b"fork"], [theirs.fileno()])
                    reply, pidfd = await self._answer()
        except (OSError, EnvError) as error:
            await link.close()
            raise EnvError(f"no process for a session: {error}") from None
        if "error" in reply:
            await link.close()
            raise EnvError(f"no process for a session: {reply['error']}")
        self._count += 1
        process = SessionProcess(reply["pid"], pidfd, link)
        process.start({**self._settings, "number": self._count})
        return process

    async def _answer(self) -> tuple[dict[str, Any], int]:
        """The answer to `fork`. A template that owes one for FORK_S is killed: EnvError, and nobody waits for it."""
        try:
            async with asyncio.timeout(FORK_S):
                return await self._receive()
        except TimeoutError:
            self._process.kill()
            raise EnvError(f"the env template (pid {self._process.pid}) did not answer within {FORK_S:g} s") from None

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.died.set()

    async def close(self) -> None:
        """Hang up: the template ends its sessions and itself; after CLOSE_S it is killed, and they with it."""
        self._end.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.died.wait()
        if not self.died.is_set():
            self._process.kill()
        await self.died.wait()


async def _readable(end: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(end, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(end)
