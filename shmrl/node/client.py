"""Calls to node servers: connections that are kept, the token, and what is tried again.

Used by ranks, node servers and embedders. Two classes of failure. What may pass (no connection, a broken one, nothing
received for STALL_S, 408, 425, 429 and 5xx) is tried again until `patience_s` have gone without progress; all calls to
one server wait for it together, so that the last of a thousand gives up when the first one does. What will not (another
4xx, a certificate that does not verify) is raised at once. Sockets are opened to the host of the URL: HTTP_PROXY and
its like are not looked at.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from shmrl import wire
from shmrl.errors import ConfigError, NodeError, ProtocolError
from shmrl.node.http import MAX_BODY, STATUS, BadMessage, Head, Stream, message, number

log = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE_S = 60.0  # without progress: as long as a server that died may take to be started again
STALL_S = 20.0
CONNECT_S = 5.0
LONGEST_PAUSE_S = 2.0
MAX_ERROR = 64 << 10  # bytes of an error's text
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_RAISED = {kind.__name__: kind for kind in STATUS}


class Passing(Exception):
    """A failure that may pass; the next attempt has a new connection."""


class Connection:
    """One connection to one server. Requests may be sent ahead; their answers come in the same order."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise NodeError(f"{url!r} is no node server's url: http(s)://host:port")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        sock = socket.create_connection((parts.hostname, port), CONNECT_S)
        sock.settimeout(None)
        try:
            if parts.scheme == "https":
                sock.settimeout(CONNECT_S)
                sock = (tls or ssl.create_default_context()).wrap_socket(sock, server_hostname=parts.hostname)
            self.stream = Stream(sock)
        except BaseException:
            sock.close()
            raise
        self.stream.patience(STALL_S)
        self._fields: dict[str, str | int] = {"Host": parts.netloc, "Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: bytes = b"", asked: str = "") -> None:
        """Sends a request; asked: a Range."""
        more: dict[str, str | int] = {"Content-Length": len(body)} if body else {}
        if asked:
            more["Range"] = asked
        self.stream.send(message(f"{method} {path} HTTP/1.1", self._fields | more, body))

    def answer(self) -> Head:
        """The head of the next answer, if it is a good one; its body is the caller's to receive.

        Passing, NodeError, or the arena's error that the server met.
        """
        head = self.stream.head(STALL_S, STALL_S)
        if head is None:
            raise ConnectionResetError("closed before the answer")
        version, status, phrase = head.start
        code = number(status)
        if not version.startswith("HTTP/1") or code is None:
            raise BadMessage(502, "an answer that is not HTTP/1")
        if code >= 300:
            self._refused(code, phrase, self.body(head, MAX_ERROR).decode(errors="replace")[:500], head)
        self.stream.patience(STALL_S)
        return head

    def _refused(self, status: int, phrase: str, said: str, head: Head) -> None:
        if status in _PASSING:
            raise Passing(f"{status} {phrase}: {said}")
        if (kind := _RAISED.get(head.fields.get("shmrl-error", ""))) is not None:
            raise kind(said)
        hint = "; is it the token of this run (arena.token_file, SHMRL_TOKEN)?" if status == 401 else ""
        raise NodeError(f"{status} {phrase}: {said}{hint}")

    def body(self, head: Head, most: int = MAX_BODY) -> bytes:
        """The answer's body. BadMessage for more than `most` bytes, of which none are received."""
        if head.length > most:
            raise BadMessage(502, f"an answer of {head.length} bytes where {most} are the most")
        return self.stream.body(head.length)


class Client:
    """Calls node servers of one run with its `token`. ca: a file of certificates that https servers are checked by.

    patience_s: how long attempts go on without any progress (PATIENCE_S). Threads may share it. ConfigError: no header
    can carry the token.
    """

    def __init__(self, token: str, *, ca: Path | None = None, patience_s: float | None = None) -> None:
        if not (token.isascii() and token.isprintable()):
            raise ConfigError("the token has characters that a header cannot carry: printable ASCII is expected")
        self._token, self.patience_s = token, PATIENCE_S if patience_s is None else patience_s
        self._tls = None if ca is None else ssl.create_default_context(cafile=str(ca))
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._busy: set[Connection] = set()
        self._silent: dict[str, float] = {}  # servers that were not reached, since when
        self._changing = threading.Lock()
        self._closing = threading.Event()

    def call(self, url: str, path: str, **arguments: Any) -> Any:
        """POST /v1/<path> with these arguments -> what was answered. NodeError, ArenaError."""
        body = wire.pack(arguments)

        def attempt(connection: Connection) -> Any:
            connection.ask("POST", f"/v1/{path}", body)
            return wire.unpack(connection.body(connection.answer()))

        return self.run(url, attempt)

    @property
    def closing(self) -> bool:
        """Whether it is closed: nothing succeeds any more."""
        return self._closing.is_set()

    def run(self, url: str, attempt: Callable[[Connection], T], progress: Callable[[], int] = int) -> T:
        """attempt(connection) until it succeeds. progress: bytes so far; patience counts from the last increase.

        NodeError when the patience is over, or at once for what no further attempt can mend.
        """
        moved, since, tries = progress(), time.monotonic(), 0
        while True:
            began = time.monotonic()
            try:
                return self._once(url, attempt)
            except ssl.SSLCertVerificationError as error:
                raise NodeError(f"{url}: {error}") from error
            except (ProtocolError, ValueError, OverflowError, MemoryError) as error:
                raise NodeError(f"{url}: no node server's answer: {type(error).__name__}: {error}") from error
            except (OSError, BadMessage, Passing) as error:
                if progress() != moved:
                    moved, since, tries = progress(), time.monotonic(), 0
                    self._silent.pop(url, None)
                if isinstance(error, OSError):
                    since = min(since, self._silent.setdefault(url, began))
                waited, tries = time.monotonic() - since, tries + 1
                if waited > self.patience_s or self._closing.is_set():
                    self._forget(url)
                    what = f"{url}: given up after {tries} attempts in {waited:.1f} s"
                    raise NodeError(f"{what}: {type(error).__name__}: {error}") from error
                log.log(logging.WARNING if tries == 3 else logging.DEBUG, "%s, attempt %d: %s", url, tries, error)
            self._closing.wait(min(LONGEST_PAUSE_S, 0.025 * 2 ** min(tries, 10)) * random.uniform(0.5, 1))

    def _once(self, url: str, attempt: Callable[[Connection], T]) -> T:
        """One attempt, and at once another where the first was over a connection that was kept and is dead: that says
        nothing about the server."""
        with self._changing:
            kept = self._idle[url].pop() if self._idle[url] else None
        if kept is not None:
            try:
                return self._over(kept, url, attempt)
            except ConnectionError:
                if self._closing.is_set():
                    raise
                self._forget(url)
        return self._over(Connection(url, self._token, self._tls), url, attempt)

    def _over(self, connection: Connection, url: str, attempt: Callable[[Connection], T]) -> T:
        with self._changing:
            self._busy.add(connection)
        whole = False
        try:
            if self._closing.is_set():
                raise ConnectionAbortedError("closed")
            result = attempt(connection)
            whole = True
            self._silent.pop(url, None)
            return result
        finally:
            with self._changing:
                self._busy.discard(connection)
                if whole and not self._closing.is_set():
                    self._idle[url].append(connection)
                else:
                    connection.stream.close()

    def _forget(self, url: str) -> None:
        """Connections that were kept are of a server that is gone: who asks it again begins with a new one."""
        with self._changing:
            for connection in self._idle.pop(url, ()):
                connection.stream.close()

    def close(self) -> None:
        """Breaks off what is under way and drops kept connections. Idempotent."""
        self._closing.set()
        with self._changing:
            for connection in self._busy:
                connection.stream.shutdown()
            for connection in (connection for kept in self._idle.values() for connection in kept):
                connection.stream.close()
            self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
