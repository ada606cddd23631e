"""`serve_sidecar`: an env server in a process of its own for as long as a block of code runs.

Used by evaluation and by embedders, in their process. The server takes a free port and a token of its own, and stops
when this process is gone, however it went (it holds the other end of a pipe).
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shmrl.config import EnvServerConfig, dump_toml
from shmrl.config.tree import EnvSpec
from shmrl.env.client import EnvClient
from shmrl.env.server import DEATH_PIPE
from shmrl.errors import ProcessFailed

GRACE_S = 8.0
"""From SIGTERM to SIGKILL: the server itself gives its workers 5 s."""
_SERVING = re.compile(rb"Serving (\S+) \(up to")


@asynccontextmanager
async def serve_sidecar(
    env_id: str, args: dict[str, Any] | None = None, *, config: EnvServerConfig | None = None
) -> AsyncIterator[EnvClient]:
    """A connected client of a new server on a free port, with an arena of its own.

    config: everything else (workers, max_turns, sandbox, arena...); its own env and address are not used.

    Raises ProcessFailed with the server's last lines if it cannot serve, TasksetError if its environment cannot load.

    Example: async with serve_sidecar("reverse-text", {"seed": 1}) as client: print(await client.info())
    """
    spec = EnvSpec(id=env_id, args=args or {}, max_turns=config.env.max_turns if config else None)
    config = config.model_copy(update={"env": spec}) if config else EnvServerConfig(env=spec)
    serve = config.serve.model_copy(update={"address": "tcp://127.0.0.1:0"})
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="shmrl-") as directory:
        file = Path(directory) / "env.toml"
        file.write_text(dump_toml(config.model_copy(update={"serve": serve})))
        read_end, write_end = os.pipe()
        environment = {"SHMRL_TOKEN": token, DEATH_PIPE: str(read_end), "SHMRL_LOG_LEVEL": "info"}
        command = [sys.executable, "-m", "shmrl", "env-server", str(file)]
        try:
            async with announced("env-server", command, _SERVING, environment, pass_fds=[read_end]) as (_, found):
                client = EnvClient(found[1].decode(), token)
                try:
                    await client.connect()
                    yield client
                finally:
                    await client.close()
        finally:
            os.close(read_end)
            os.close(write_end)


@asynccontextmanager
async def announced(
    name: str, command: Sequence[str], pattern: re.Pattern[bytes], environment: dict[str, str], **popen: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, re.Match[bytes]]]:
    """A process that says on stderr where it serves, and `pattern`'s match there. Its stderr goes to ours; it ends
    with the block, by SIGTERM, after GRACE_S by SIGKILL. ProcessFailed with its last lines if it never serves."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        **popen,
    )
    tail: deque[bytes] = deque(maxlen=20)
    try:
        found = await _found(process, pattern, tail)
        if found is None:
            raise ProcessFailed(name, await process.wait(), tail=b"".join(tail).decode(errors="replace"))
        relay = asyncio.create_task(_found(process, None, tail))
        try:
            yield process, found
        finally:
            await _stop(process)
            await relay
    finally:
        await _stop(process)


async def _found(
    process: asyncio.subprocess.Process, pattern: re.Pattern[bytes] | None, tail: deque[bytes]
) -> re.Match[bytes] | None:
    """Relay what the process says up to the line with the pattern, or, without one, to the end: None."""
    assert process.stderr is not None
    while line := await process.stderr.readline():
        tail.append(line)
        sys.stderr.write(line.decode(errors="replace"))
        if pattern is not None and (found := pattern.search(line)):
            return found
    return None


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
