"""`serve_sidecar`: an env server in a process of its own for as long as a block of code runs.

Used by evaluation and by embedders, in their process. The server takes a free port and a token of its own, and stops
when this process is gone (`child.py`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shmrl.config import EnvServerConfig
from shmrl.config.sources import EnvSpec
from shmrl.env.child import Child, EnvServerChild
from shmrl.env.client import EnvClient
from shmrl.errors import ShmrlError, told

_SERVING = re.compile(r"Serving (\S+) \(up to")


@asynccontextmanager
async def serve_sidecar(
    env_id: str, args: dict[str, Any] | None = None, *, config: EnvServerConfig | None = None
) -> AsyncIterator[EnvClient]:
    """A connected client of a new server on a free port, with an arena of its own.

    config: everything else (workers, max_turns, sandbox, arena...); its own env and address are not used.

    Raises ProcessFailed with the server's last lines if it cannot serve, TasksetError
    if its environment cannot load, ConfigError where that needs another configuration.

    Example: async with serve_sidecar("reverse-text", {"seed": 1}) as client: print(await client.info())
    """
    spec = EnvSpec(id=env_id, args=args or {}, max_turns=config.env.max_turns if config else None)
    config = config.model_copy(update={"env": spec}) if config else EnvServerConfig(env=spec)
    serve = config.serve.model_copy(update={"address": "tcp://127.0.0.1:0"})
    token = secrets.token_hex(16)
    server = EnvServerChild(config.model_copy(update={"serve": serve}), _SERVING, {"SHMRL_TOKEN": token})
    async with announced(server) as found:
        client = EnvClient(found[1], token)
        try:
            await client.connect()
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def announced(child: Child) -> AsyncIterator[re.Match[str]]:
    """Where the child says that it serves; it ends with the block, and does not repeat an error that leaves the block.
    Raises ProcessFailed if it never serves."""
    known = ""
    try:
        yield await asyncio.to_thread(child.serving)
    except ShmrlError as error:
        known = told(error)
        raise
    finally:
        await asyncio.to_thread(child.stop, known)
