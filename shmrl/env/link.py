"""The link between an env server and one of its workers: msgpack frames over an inherited socket pair.

No name in the file system, and its end is the death signal for both sides. A frame is a 4-byte length and
[number, kind, payload bytes]; payloads pass through the server undecoded. Kinds:

    server -> worker   start (0, settings), run_rollout / run_group / tasks (number, request), cancel (number, b""),
                       prefix (number, samples of the group)
    worker -> server   ready (0, facts), fatal (0, {traceback}), beat (0, facts), reply or failed (number, reply);
                       before a reply: ask (number, b""), tell (number, [samples for the group, handles used]),
                       delta (number, progress)

Session processes (`sessions/`) speak over it too, with kinds of their own and through `BlockingLink`.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from shmrl.errors import ProtocolError
from shmrl.wire import MAX_MESSAGE, pack, unpack

_LENGTH = struct.Struct("<I")


def _length(head: bytes) -> int:
    """How long a frame is. ProtocolError for one that no peer of ours sends."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE:
        raise ProtocolError(f"a frame of {length} bytes was announced; {MAX_MESSAGE} at most")
    return int(length)


def _framed(number: int, kind: str, payload: bytes) -> bytes:
    frame = pack([number, kind, payload])
    return _LENGTH.pack(len(frame)) + frame


class Link:
    """One end. `send` never blocks (frames are small and the peer always reads); `receive` gives None at the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> Link:
        """The link over one end of a socket pair, which it owns from here on."""
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer)

    def send(self, number: int, kind: str, payload: bytes) -> None:
        """Queue one frame; a link whose peer is gone swallows it (its end is noticed elsewhere)."""
        if self._writer.is_closing():
            return
        self._writer.write(_framed(number, kind, payload))

    async def receive(self) -> tuple[int, str, bytes] | None:
        """The next frame, or None when the peer is gone. ProtocolError for what is no frame."""
        try:
            length = _length(await self._reader.readexactly(_LENGTH.size))
            number, kind, payload = unpack(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return number, kind, payload

    async def flush(self) -> None:
        """Wait until the kernel has what was sent."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    async def close(self) -> None:
        """Close this end; the peer reads to the end and then knows."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return


class BlockingLink:
    """One end in a process without an event loop; the same frames."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rb")

    def send(self, number: int, kind: str, payload: bytes) -> None:
        """Write one frame. BrokenPipeError when the peer is gone."""
        self._end.sendall(_framed(number, kind, payload))

    def receive(self) -> tuple[int, str, bytes] | None:
        """The next frame, or None when the peer is gone. ProtocolError for what is no frame."""
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        length = _length(head)
        frame = self._file.read(length)
        if len(frame) < length:
            return None
        number, kind, payload = unpack(frame)
        return number, kind, payload
