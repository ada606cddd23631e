"""The link to the trainer's ranks: one ROUTER socket, one DEALER per rank, one msgpack map per message.

Lives in the orchestrator, which binds; ranks connect, say hello with the run's token, and may come and go before the
first step. Kinds are listed in `shmrl.wire`. A rank that dies is the launcher's business; what is done here about a
silent one is to say, every 30 s after ten minutes, who is awaited.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from shmrl import wire
from shmrl.errors import ProtocolError, RunError

log = logging.getLogger(__name__)

SILENCE_S = 600.0
REPEAT_S = 30.0
LINGER_MS = 5000


class TrainerLink:
    """ROUTER bound at `address`, for `num_ranks` ranks that know `token` (None: any)."""

    def __init__(self, address: str, num_ranks: int, token: str | None) -> None:
        self._num_ranks, self._token = num_ranks, token
        self._peers: dict[int, bytes] = {}  # rank -> its socket's identity
        self._steps: dict[int, int] = {}  # rank -> the step of its hello
        self._sender: int | None = None  # the port where rank 0 broadcasts weights
        self._arrived: dict[tuple[str, int], dict[str, Any]] = {}  # (kind, step or version) -> message
        self._changed = asyncio.Event()
        self._failure: RunError | None = None
        self._training = False
        self.completed = 0  # the last durable step
        self._context = zmq.asyncio.Context()
        self._socket = self._bound(address)
        self._reader = asyncio.create_task(self._read())

    def _bound(self, address: str) -> zmq.asyncio.Socket:
        if address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RunError(f"cannot bind {address} for the trainer's ranks: {error}") from None
        return socket

    # --- in ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                identity, raw = frames
                self._take(identity, wire.unpack(raw))
            except (ProtocolError, ValueError, KeyError, TypeError, OverflowError) as error:
                log.warning("dropped an unreadable message of %d frames from a trainer: %s", len(frames), error)
            self._changed.set()

    def _take(self, identity: bytes, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            self._hello(identity, message)
        elif identity not in self._peers.values():
            log.warning("dropped a %r of a peer that has not said hello", kind)
        elif kind == "published":
            self._arrived[(kind, int(message["version"]))] = message
        elif kind == "report":
            self._arrived[(f"report of {message['mode']}", int(message["step"]))] = message
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _hello(self, identity: bytes, message: dict[str, Any]) -> None:
        if self._token is not None and not hmac.compare_digest(self._token.encode(), str(message["token"]).encode()):
            log.warning("ignored a hello with a wrong token")
            return
        rank, world, step = int(message["rank"]), int(message["world"]), int(message["step"])
        if world != self._num_ranks or not 0 <= rank < world:
            self._failure = RunError(f"rank {rank} of {world} said hello; trainer.ranks = {self._num_ranks}")
        elif self._training and step != self.completed:
            self._failure = RunError(f"rank {rank} came back at step {step}, after step {self.completed} was completed")
        self._peers[rank], self._steps[rank] = identity, step
        if rank == 0:
            self._sender = message.get("sender")

    # --- waits ---------------------------------------------------------------------------------------------------

    async def hellos(self, timeout_s: float) -> None:
        """Wait for every rank, then `completed` is the step they stand at. RunError: not all came, or they disagree."""
        deadline = time.monotonic() + timeout_s
        while len(self._peers) < self._num_ranks:
            try:
                await asyncio.wait_for(self._next_change(), deadline - time.monotonic())
            except TimeoutError:
                missing = sorted(set(range(self._num_ranks)) - set(self._peers))
                raise RunError(f"no hello from trainer ranks {missing} within {timeout_s:g} s") from None
        if len(set(self._steps.values())) > 1:
            raise RunError(f"the trainer's ranks stand at different steps: {dict(sorted(self._steps.items()))}")
        self._training, self.completed = True, self._steps[0]

    async def sender(self) -> int:
        """The port where rank 0 broadcasts weights, once it has said hello."""
        while self._sender is None:
            await self._next_change()
        return self._sender

    async def published(self, version: int) -> str:
        """The directory of policy version `version`, once rank 0 has published it."""
        return str((await self._await("published", version))["path"])

    async def report(self, step: int, mode: str) -> dict[str, float]:
        """Rank 0's metrics of a step ("train") or a warm-up step ("warmup"), which is durable then."""
        message = await self._await(f"report of {mode}", step)
        if mode == "train":
            self.completed = step
        return dict(message["metrics"])

    async def _await(self, kind: str, number: int) -> dict[str, Any]:
        began, said = time.monotonic(), SILENCE_S
        while (kind, number) not in self._arrived:
            try:
                await asyncio.wait_for(self._next_change(), REPEAT_S)
            except TimeoutError:
                if (waited := time.monotonic() - began) >= said:
                    log.warning("waiting for rank 0's %s %d for %.0f s", kind, number, waited)
                    said = waited + REPEAT_S
        return self._arrived.pop((kind, number))

    async def _next_change(self) -> None:
        if self._failure is not None:
            raise self._failure
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    # --- out -----------------------------------------------------------------------------------------------------

    async def send(self, rank: int, raw: bytes) -> None:
        """Send one packed message to one rank. RunError if the rank's connection is gone."""
        try:
            await self._socket.send_multipart([self._peers[rank], raw])
        except zmq.ZMQError as error:
            raise RunError(f"trainer rank {rank} cannot be reached: {error}") from None

    async def broadcast(self, message: dict[str, Any]) -> None:
        """Send one message to every rank that said hello."""
        for rank in sorted(self._peers):
            await self.send(rank, wire.pack(message))

    async def close(self) -> None:
        """Deliver what was sent (5 s at most) and let the address go."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        await asyncio.to_thread(self._context.term)
