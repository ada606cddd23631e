"""HTTP/1.1 as node servers and their clients speak it: heads are read whole, bodies go straight to where they belong.

Used on both ends of every connection between nodes, in node servers, ranks and embedders. One request at a time may
be answered, but several may be sent ahead. A body is received into memory of the caller's, and sent from a file by
sendfile(2); under TLS both are copied once more. Nothing here knows proxies, and nothing logs a head: the run's token
is in it.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from dataclasses import dataclass

from shmrl.errors import AlreadyFreed, ArenaError, ArenaFull, ForeignArena, NotOwner, NotSealed, StaleHandle

MAX_HEAD = 16384  # bytes
MAX_BODY = 16 << 20  # bytes of arguments, or of an answer to them
STATUS: dict[type[ArenaError], int] = {
    ForeignArena: 404,
    StaleHandle: 410,
    AlreadyFreed: 410,
    NotSealed: 409,
    NotOwner: 409,
    ArenaFull: 507,
}
"""Errors of an arena that cross a connection: as this status, with their name in the field Shmrl-Error."""
_TIMEVAL = struct.Struct("@ll")


class BadMessage(Exception):
    """What arrived is not HTTP as it is spoken here; `status` is what a server answers."""

    def __init__(self, status: int, problem: str) -> None:
        self.status = status
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class Head:
    """Start line and header fields of a message, names in lower case.

    Example: Head(("GET", "/v1/blocks/h01...", "HTTP/1.1"), {"range": "bytes=4096-"})
    """

    start: tuple[str, str, str]
    fields: dict[str, str]

    @property
    def length(self) -> int:
        """Bytes of the body; BadMessage if that cannot be known."""
        given = number(self.fields.get("content-length", "0"))
        if "transfer-encoding" in self.fields or given is None:
            raise BadMessage(400, "a body needs a Content-Length, in digits, and no Transfer-Encoding")
        return given


class Stream:
    """One end of a connection. Every wait ends: with TimeoutError, after the patience that was set for it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._ahead = b""  # received behind the last head
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def patience(self, seconds: float) -> None:
        """How long one receive or send may take from here on, without a byte moved; at least a millisecond."""
        seconds = max(seconds, 1e-3)  # 0 would be for ever
        if self._tls:
            self._sock.settimeout(seconds)
            return
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def head(self, idle_s: float, within_s: float) -> Head | None:
        """The next head: its first byte within idle_s, the rest within_s later; None if the peer closed instead.

        BadMessage, TimeoutError, ConnectionError.
        """
        data, deadline = self._ahead, time.monotonic() + within_s
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEAD:
                break
            if not data:
                self.patience(idle_s)
            elif (left := deadline - time.monotonic()) > 0:
                self.patience(left)
            else:
                raise TimeoutError(f"a head was not complete after {within_s:g} s")
            more = self._receive()
            if not more and data:
                raise ConnectionResetError("closed within a head")
            if not more:
                return None
            if not data:
                deadline = time.monotonic() + within_s
            data += more
        if not 0 <= end <= MAX_HEAD:
            raise BadMessage(431, f"a head of more than {MAX_HEAD} bytes")
        self._ahead = data[end + 4 :]
        return _parsed(data[:end])

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(MAX_HEAD)
        except BlockingIOError:
            raise TimeoutError("nothing was received in time") from None

    def some(self, into: memoryview) -> int:
        """Receives body bytes to the front of a buffer that is not empty -> how many; 0: the peer closed."""
        if self._ahead:
            n = min(len(self._ahead), len(into))
            into[:n] = self._ahead[:n]
            self._ahead = self._ahead[n:]
            return n
        try:
            return self._sock.recv_into(into, len(into), 0 if self._tls else socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing was received in time") from None

    def body(self, nbytes: int) -> bytes:
        """A short body, whole. ConnectionError if the peer closed before its end."""
        out = bytearray(nbytes)
        with memoryview(out) as view:
            got = 0
            while got < nbytes:
                if not (n := self.some(view[got:])):
                    raise ConnectionResetError(f"closed after {got} of {nbytes} bytes")
                got += n
        return bytes(out)

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Sends all of it; `more` follows at once, and may share a packet."""
        try:
            self._sock.sendall(data, socket.MSG_MORE if more and not self._tls else 0)
        except BlockingIOError:
            raise TimeoutError("the peer took nothing in time") from None

    @property
    def copies(self) -> bool:
        """Whether a block is better sent from the mapping: under TLS, and to a peer on this very host, where sendfile
        takes twice the CPU time (the peer then copies cold memory, page by page)."""
        return self._tls or self._sock.getsockname()[0] == self._sock.getpeername()[0]

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Sends bytes of a file from the page cache. Not under TLS."""
        end = offset + nbytes
        while offset < end:
            try:
                sent = os.sendfile(self._sock.fileno(), fd, offset, end - offset)
            except BlockingIOError:
                raise TimeoutError("the peer took nothing in time") from None
            if not sent:
                raise ConnectionResetError(f"the file ended {end - offset} bytes early")
            offset += sent

    def drain(self, within_s: float) -> None:
        """After the last answer: a close with bytes unread would reset the connection before the peer has read it."""
        deadline = time.monotonic() + within_s
        self._sock.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            self.patience(left)
            if not self._receive():
                return

    def shutdown(self) -> None:
        """Ends what another thread waits for here. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._sock.close()


def number(text: str) -> int | None:
    """What 1 to 18 digits say, which is below 2^63; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _parsed(raw: bytes) -> Head:
    first, *lines = raw.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) != 3:
        raise BadMessage(400, "a start line without three parts")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or name in fields:
            raise BadMessage(400, "a header field that is none, or is there twice")
        fields[name] = value.strip()
    return Head((words[0], words[1], words[2]), fields)


def message(start: str, fields: dict[str, str | int], body: bytes = b"") -> bytes:
    """A whole message, or its head where the body follows by other means (Content-Length is the caller's then).

    Example: message("HTTP/1.1 204 No Content", {})
    """
    lines = [start, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def byte_range(given: str | None, nbytes: int) -> tuple[int, int] | None:
    """[start, stop) of a Range header over nbytes; None: the whole, also for a header that asks for something else.

    BadMessage 416: a range that begins behind the end.

    >>> byte_range("bytes=4096-", 10_000), byte_range("bytes=-100", 10_000), byte_range("bytes=0-0", 10_000)
    ((4096, 10000), (9900, 10000), (0, 1))
    """
    unit, _, spec = (given or "").partition("=")
    first, dash, last = spec.partition("-")
    numbers = [part for part in (first, last) if part]
    if unit.strip() != "bytes" or not dash or not numbers or any(number(part) is None for part in numbers):
        return None
    start = int(first) if first else max(0, nbytes - int(last))
    stop = min(int(last) + 1, nbytes) if first and last else nbytes
    if first and last and int(last) < start:
        return None
    if start >= stop:
        raise BadMessage(416, f"{given} of {nbytes} bytes")
    return start, stop
