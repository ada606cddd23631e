"""`shmrl env-server` from a configuration to an exit code: which server it is, and until when it runs.

In the server's process. What serves is in `server.py`, `sessions/server.py` and `episodes/server.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Protocol

from shmrl.config import EnvServerConfig
from shmrl.env.server import EnvServer
from shmrl.env.sessions.server import SessionServer
from shmrl.monitor import exposition

DEATH_PIPE = "SHMRL_DEATH_PIPE"
"""Environment variable with a descriptor at whose end the server stops: how a sidecar follows its parent."""


class Stoppable(Protocol):
    """A server that runs until it is told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


async def serve(config: EnvServerConfig) -> int:
    """Run a configured server; see `until_signal`."""
    if config.serve.address is None:
        return await until_signal(SessionServer(config))
    server = EnvServer(config.env.id, config.env.args, config.serve.address, config=config)
    exposition.also(server.counts)
    return await until_signal(server)


async def until_signal(server: Stoppable) -> int:
    """Run a server until SIGTERM, SIGINT or the end of the death pipe; the number of the signal, or 0."""
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        received.append(number)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    if DEATH_PIPE in os.environ:
        pipe = int(os.environ[DEATH_PIPE])

        def orphaned() -> None:  # readable means closed: nobody writes to it
            loop.remove_reader(pipe)
            stop(0)

        loop.add_reader(pipe, orphaned)
    await server.run()
    return received[0] if received else 0


def main(config: EnvServerConfig) -> None:
    """What `shmrl env-server` runs. Exits with 128 + the signal that stopped it; its errors leave as they are."""
    number = asyncio.run(serve(config))
    if number:
        sys.exit(128 + number)
