"""`Clients`: who has said hello to an env server, and whose run another one has taken over.

Owned by `server.py`, in the env-server process. A ROUTER socket does not say that a client left: it is noticed when
something cannot be sent to it. So whenever another one comes, all that are known are sent an empty frame, which clients
ignore; as many are remembered as are there, and those that left since the last hello.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shmrl.env.protocol import run_of
from shmrl.errors import ProtocolError


class Clients:
    """By the identities that the socket gave them. `send` says whether a client got its frames."""

    def __init__(self, send: Callable[[bytes, bytes], Awaitable[bool]]) -> None:
        self._send = send
        self._here: set[bytes] = set()
        self._superseded: dict[str, set[bytes]] = {}  # run/ -> the clients before the one that took it over

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._here

    async def welcome(self, identity: bytes) -> None:
        """It has shown the token. ProtocolError for an identity of its own: whoever came later under the same one would
        be taken for it."""
        if identity[:1] != b"\0":
            raise ProtocolError("hello: the socket has an identity (ZMQ_IDENTITY); let the server give it one")
        self._here.add(identity)
        await self._forget_the_gone(identity)

    def gone(self, identity: bytes) -> None:
        """Nothing can be sent to it."""
        self._here.discard(identity)
        for run, before in list(self._superseded.items()):
            before.discard(identity)
            if not before:
                del self._superseded[run]

    async def take_over(self, run: str, identity: bytes) -> None:
        """From now on the run ("orc/") is this client's and of those that come later."""
        await self._forget_the_gone(identity)
        self._superseded[run] = self._here - {identity}

    def is_superseded(self, identity: bytes, tag: str) -> bool:
        """Whether another client has taken over the run of this tag."""
        return identity in self._superseded.get(run_of(tag), ())

    async def _forget_the_gone(self, here: bytes) -> None:
        others = list(self._here - {here})
        got_it = await asyncio.gather(*(self._send(other, b"") for other in others))
        for other, there in zip(others, got_it, strict=True):
            if not there:
                self.gone(other)
