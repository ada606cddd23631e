"""Frames between an env server and its workers: what is too long is refused before any of it is received."""

import socket
import struct

import pytest

from shmrl.env.link import BlockingLink, Link
from shmrl.errors import ProtocolError
from shmrl.wire import MAX_MESSAGE

ANNOUNCED = struct.pack("<I", MAX_MESSAGE + 1)


@pytest.fixture
def ends():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


async def test_a_frame_announced_too_long_is_refused_without_waiting_for_it(ends):
    ours, theirs = ends
    link = await Link.over(ours)
    theirs.sendall(ANNOUNCED)
    with pytest.raises(ProtocolError, match=r"a frame of 268435457 bytes was announced; 268435456 at most"):
        await link.receive()
    await link.close()


def test_a_blocking_link_refuses_it_as_well_and_takes_what_comes_before(ends):
    ours, theirs = ends
    BlockingLink(theirs).send(7, "reply", b"abc")
    theirs.sendall(ANNOUNCED)
    link = BlockingLink(ours)
    assert link.receive() == (7, "reply", b"abc")
    with pytest.raises(ProtocolError, match="268435456 at most"):
        link.receive()
