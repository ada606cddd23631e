"""`serve_sidecar`: an env server in a process of its own for as long as a block of code runs.

Used by evaluation and by embedders, in their process. The server takes a free port and a token of its own, and stops
when this process is gone, however it went (it holds the other end of a pipe).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shmrl.config import ArenaConfig, EnvServerConfig, ServeConfig, dump_toml
from shmrl.config.tree import EnvSpec
from shmrl.env.client import EnvClient
from shmrl.env.server import DEATH_PIPE
from shmrl.errors import ProcessFailed

log = logging.getLogger(__name__)
GRACE_S = 8.0
"""From SIGTERM to SIGKILL: the server itself gives its workers 5 s."""
_SERVING = re.compile(rb"Serving (\S+) \(up to")


@asynccontextmanager
async def serve_sidecar(
    env_id: str, args: dict[str, Any] | None = None, *, arena: ArenaConfig | None = None
) -> AsyncIterator[EnvClient]:
    """A connected client of a new server on a free port. arena: where payloads go (default: one of the server's own).

    Raises ProcessFailed with the server's last lines if it cannot serve, TasksetError if its environment cannot load.

    Example: async with serve_sidecar("reverse-text", {"seed": 1}) as client: print(await client.info())
    """
    serve = ServeConfig(address="tcp://127.0.0.1:0")
    config = EnvServerConfig(env=EnvSpec(id=env_id, args=args or {}), serve=serve, arena=arena or ArenaConfig())
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="shmrl-") as directory:
        file = Path(directory) / "env.toml"
        file.write_text(dump_toml(config))
        read_end, write_end = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shmrl", "env-server", str(file)),
            env={**os.environ, "SHMRL_TOKEN": token, DEATH_PIPE: str(read_end), "SHMRL_LOG_LEVEL": "info"},
            pass_fds=[read_end],
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(read_end)
        tail: deque[bytes] = deque(maxlen=20)
        try:
            address = await _address(process, tail)
            relay = asyncio.create_task(_relay(process, tail))
            client = EnvClient(address, token)
            try:
                await client.connect()
                yield client
            finally:
                await client.close()
                await _stop(process)
                await relay
        finally:
            await _stop(process)
            os.close(write_end)


async def _address(process: asyncio.subprocess.Process, tail: deque[bytes]) -> str:
    """Where the server serves, from its own log."""
    while (line := await _line(process, tail)) is not None:
        found = _SERVING.search(line)
        if found:
            return found[1].decode()
    code = await process.wait()
    raise ProcessFailed("env-server", code, tail=b"".join(tail).decode(errors="replace"))


async def _line(process: asyncio.subprocess.Process, tail: deque[bytes]) -> bytes | None:
    assert process.stderr is not None
    line = await process.stderr.readline()
    tail.append(line)
    sys.stderr.write(line.decode(errors="replace"))
    return line or None


async def _relay(process: asyncio.subprocess.Process, tail: deque[bytes]) -> None:
    while await _line(process, tail) is not None:
        pass


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Terminate, GRACE_S, kill, wait."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
