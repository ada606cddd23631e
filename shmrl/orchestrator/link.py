"""The link to the trainer's ranks: one ROUTER socket, one DEALER per rank, one msgpack map per message.

Lives in the orchestrator, which binds; ranks connect, say hello with the run's token, and may come and go before the
first step. Kinds are listed in `shmrl.wire`. A rank that says hello at step s is sent every shipped step after s, the
same bytes each time: so a trainer that was restarted catches up, and so does an orchestrator's successor with ranks of
which only some had heard of the last step. Starting a dead rank again is the launcher's business; what is done here
about a silent one is to say, every 30 s after ten minutes, who is awaited.
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
from shmrl.config import JobConfig
from shmrl.config.rundir import make_private
from shmrl.errors import ProtocolError, RunError
from shmrl.node.published import Addresses
from shmrl.orchestrator.shipped import ShippedSteps

log = logging.getLogger(__name__)

SILENCE_S = 600.0
REPEAT_S = 30.0
LINGER_MS = 5000


class TrainerLink:
    """ROUTER bound at `address`, for `num_ranks` ranks that know `token` (None: any).

    steps: those that can be sent again. returning: a rank that cannot be reached is being restarted, it will say hello.
    shares: the origin of the arena that every rank has to be in; None: blocks may be fetched. job: address has port 0,
    and ranks on other nodes of it learn from an address file which one was taken.
    """

    def __init__(
        self,
        address: str,
        num_ranks: int,
        token: str | None,
        steps: ShippedSteps,
        *,
        returning: bool = False,
        shares: str | None = None,
        job: JobConfig | None = None,
    ) -> None:
        self.steps = steps
        self._num_ranks, self._token, self._returning, self._shares = num_ranks, token, returning, shares
        self._peers: dict[int, bytes] = {}  # rank -> its socket's identity
        self._had: dict[int, int] = {}  # rank -> the last step that it has completed or was sent
        self._finished: set[int] = set()  # ranks that have written their last checkpoint
        self._standing = b""  # what every rank is told, whenever it comes
        self._sender: int | None = None  # the port where rank 0 broadcasts weights
        self.unreported: int | None = None  # the step that an orchestrator before this one shipped and had no report of
        self.begun = False  # some rank serves a run that has begun: this orchestrator has come after another one
        self.saved = False  # the ranks start from a checkpoint
        self.warmed_up = False  # a warm-up was sent: nobody can start from the initial weights any more
        self._arrived: dict[tuple[str, int], dict[str, Any]] = {}  # (kind, step or version) -> message
        self._changed = asyncio.Event()
        self._failure: RunError | None = None
        self._training = False
        self.completed = 0  # the last durable step
        self._context = zmq.asyncio.Context()
        if job is None:
            self._socket = self._bound(address)
        else:
            published = Addresses(job)
            self._socket = self._bound(address.removesuffix("0") + str(published.port("trainer", "trainer")))
            published.publish("trainer", "trainer", str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)))
        self._reader = asyncio.create_task(self._read())

    def _bound(self, address: str) -> zmq.asyncio.Socket:
        if address.startswith("ipc://"):
            make_private(Path(address.removeprefix("ipc://")).parent)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
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
                message = wire.unpack(raw)
                self._take(identity, message)
                if message["kind"] == "hello" and self._peers.get(message["rank"]) == identity:
                    await self._welcome(message["rank"])
            except RunError as error:
                self._failure = error
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
            self._heard_version(int(message["version"]), message["path"])
        elif kind == "report":
            self._heard_report(int(message["step"]), str(message["mode"]), message["metrics"])
        elif kind == "finished":
            self._finished.add(int(message["rank"]))
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _hello(self, identity: bytes, message: dict[str, Any]) -> None:
        if self._token is not None and not hmac.compare_digest(self._token.encode(), str(message["token"]).encode()):
            log.warning("ignored a hello with a wrong token")
            return
        rank, world, step = int(message["rank"]), int(message["world"]), int(message["step"])
        if world != self._num_ranks or not 0 <= rank < world:
            raise RunError(f"rank {rank} of {world} said hello; trainer.ranks = {self._num_ranks}")
        origin = str(message["origin"])
        if self._shares not in (None, origin):
            raise RunError(
                f"trainer rank {rank} is in arena {origin}, the run's blocks are in {self._shares}, and "
                "arena.transport = 'required' allows shared memory alone"
            )
        phase = str(message["phase"])
        if self._training:
            self._check_return(rank, step, phase)
        elif phase == "warming":
            raise RunError(f"rank {rank} is in a warm-up whose orchestrator is gone: there is nothing to go on from")
        else:
            self.begun |= phase == "begun"
            self.saved |= phase == "saved"
        self._peers[rank], self._had[rank] = identity, step
        self._finished.discard(rank)
        if rank == 0:
            self._sender = message["sender"]
        if (report := message["report"]) is not None:
            self._heard_version(step, report["path"])
            self._heard_report(step, "train", report["metrics"])

    def _check_return(self, rank: int, step: int, phase: str) -> None:
        """RunError if a rank that comes back cannot go on from where it stands."""
        where = f"rank {rank} came back at step {step}, after step {self.completed} was completed"
        lost = [number for number in range(step + 1, self.completed + 1) if number not in self.steps]
        if lost or (step > self.completed and step not in self.steps):
            raise RunError(f"{where}; steps {list(self.steps)} can be sent again (arena.retain_steps)")
        if self.warmed_up and phase == "new":
            raise RunError(f"{where}, with the weights from before the warm-up: there is no checkpoint of it")

    def _heard_version(self, version: int, path: str) -> None:
        """Steps that are done once more publish and report what is accounted for already."""
        if version >= self.completed:
            self._arrived["published", version] = {"path": path}

    def _heard_report(self, step: int, mode: str, metrics: Any) -> None:
        if mode != "train" or step > self.completed:
            self._arrived[f"report of {mode}", step] = {"metrics": metrics}

    async def _welcome(self, rank: int) -> None:
        await self.catch_up(rank)
        if self._standing:
            await self._reach(rank, self._standing)

    # --- waits ---------------------------------------------------------------------------------------------------

    async def hellos(self, timeout_s: float) -> None:
        """Wait for every rank; then `completed` is the step they stand at, or the one before if that is `unreported`.
        RunError: not all came, or they disagree."""
        deadline = time.monotonic() + timeout_s
        while len(self._peers) < self._num_ranks:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._next_change()
            except TimeoutError:
                missing = sorted(set(range(self._num_ranks)) - set(self._peers))
                raise RunError(f"no hello from trainer ranks {missing} within {timeout_s:g} s") from None
        if len(set(self._had.values())) > 1:
            raise RunError(f"the trainer's ranks stand at different steps: {dict(sorted(self._had.items()))}")
        self._training, self.completed = True, self._had[0] - (self._had[0] == self.unreported)

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
                async with asyncio.timeout(REPEAT_S):
                    await self._next_change()
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

    async def begin(self, version: int, state: dict[str, Any]) -> str:
        """Every rank starts from `version`; its directory, once rank 0 has published it."""
        await self._tell_all(wire.pack({"kind": "begin", "version": version, "state": state}))
        path = await self.published(version)
        self._standing = b""
        return path

    async def catch_up(self, rank: int) -> None:
        """Send a rank the shipped steps that it has not had."""
        while (step := self._had[rank] + 1) in self.steps:
            self._had[rank] = step
            await self._reach(rank, self.steps[step].messages[rank])

    async def _reach(self, rank: int, raw: bytes) -> None:
        """Send, unless the rank is about to come back: its hello brings it the same."""
        try:
            await self.send(rank, raw)
        except RunError as error:
            if not self._returning:
                raise
            log.warning("%s; it is awaited", error)

    async def _tell_all(self, raw: bytes) -> None:
        """Send every rank the same, those that come back later too."""
        self._standing = raw
        for rank in sorted(self._peers):
            await self._reach(rank, raw)

    async def finish(self) -> None:
        """Every rank writes its last checkpoint and leaves. Where one may be restarted, wait until all have."""
        await self._tell_all(wire.pack({"kind": "finish"}))
        while self._returning and len(self._finished) < self._num_ranks:
            await self._next_change()

    async def close(self) -> None:
        """Deliver what was sent (5 s at most) and let the address go."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        await asyncio.to_thread(self._context.term)
