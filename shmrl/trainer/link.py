"""A rank's link to the orchestrator: one DEALER socket, one msgpack map per message, hello first on every connection.

The orchestrator may start later than the ranks, and it may be stopped and started again: a connection that breaks is
replaced by a fresh socket, so that nothing of the old one reaches a new orchestrator. Under a launcher (SHMRL_RUN is
set) that starts no new one, a vanished orchestrator is a failed run after 30 s. Used by `loop` in every rank;
`shmrl.wire` lists the kinds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shmrl import wire
from shmrl.errors import RunError

log = logging.getLogger(__name__)

SUPERVISED_PATIENCE_S = 30.0
LINGER_MS = 5000


class OrchestratorLink:
    """Connects to `address` and says `hello()` there, again after every reconnection.

    `patience_s`: how long an orchestrator may stay away, at first and after it has vanished; under a launcher that does
    not start it again (`returning`) the latter is 30 s, or until the file `given_up` appears.
    """

    def __init__(
        self,
        address: str,
        hello: Callable[[], dict[str, Any]],
        patience_s: float,
        *,
        returning: bool = False,
        given_up: Path | None = None,
    ) -> None:
        self._address, self._hello, self._patience_s, self._returning = address, hello, patience_s, returning
        self._given_up = given_up
        self._context = zmq.Context()
        self._away_since: float | None = time.monotonic()
        self._open()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(self._address)
        self.send(self._hello())

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message; it travels as soon as there is a connection."""
        self._socket.send(wire.pack(message))

    def receive(self) -> dict[str, Any]:
        """The next message. RunError when the orchestrator stays away for longer than the patience."""
        while True:
            ready = dict(self._poller.poll(timeout=1000))
            if self._socket in ready:
                message: dict[str, Any] = wire.unpack(self._socket.recv())
                return message
            if self._monitor in ready:
                self._connection(recv_monitor_message(self._monitor)["event"])
            elif self._away_since is not None and time.monotonic() - self._away_since > self._patience_s:
                raise RunError(f"no orchestrator at {self._address} for {self._patience_s:g} s")
            elif self._given_up is not None and self._given_up.exists():
                raise RunError(f"no orchestrator will come back to {self._address}")

    def _connection(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._away_since = None
            return
        if "SHMRL_RUN" in os.environ and not self._returning:
            self._patience_s = SUPERVISED_PATIENCE_S
        log.warning("the orchestrator has gone; waiting for it for %g s", self._patience_s)
        self._away_since = time.monotonic()
        self._close_socket(0)
        self._open()

    def _close_socket(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def close(self) -> None:
        """Deliver what was sent (5 s at most) and let go."""
        self._close_socket(LINGER_MS if self._away_since is None else 0)
        self._context.term()
