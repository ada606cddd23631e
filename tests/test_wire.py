"""What may travel, and what is refused where it is sent."""

import asyncio
import math

import msgpack
import numpy as np
import pytest

from shmrl import wire
from shmrl.errors import ProtocolError
from shmrl.types import Handle
from shmrl.wire import PIECE, pack, unpack, unpack_in_turns

HANDLE = Handle.pack(node=1, arena=2, slot=3, generation=4, nbytes=2**40 + 5, nonce=b"abcdefgh")


def test_handles_survive_and_cost_35_bytes():
    assert unpack(pack(HANDLE)) == HANDLE
    assert isinstance(unpack(pack([HANDLE]))[0], Handle)
    assert len(pack(HANDLE)) == 35


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ({1: 2}, {1: 2}),
        ((1, "a"), [1, "a"]),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.float32(0.5), 0.5),
        (b"\x00\xff", b"\x00\xff"),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
        (None, None),
        ({"a": [{"b": "\u00e9"}]}, {"a": [{"b": "\u00e9"}]}),
    ],
)
def test_round_trip(sent, received):
    assert unpack(pack(sent)) == received


def test_nan_stays_nan():
    assert math.isnan(unpack(pack({"x": math.nan}))["x"])


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        ({"a": [0, 2**64]}, r"\$\.a\[1\]: 18446744073709551616 is beyond 64 bits"),
        ({"a": -(2**63) - 1}, r"\$\.a: -9223372036854775809"),
        ({"a": {1, 2}}, r"\$\.a: a set"),
        ({"a": np.zeros(3)}, r"\$\.a: a ndarray"),
        ({"a": "\ud800"}, r"\$\.a: text with a lone surrogate"),
        ({(1, 2): 3}, "a tuple as a key"),
        ({"a": object()}, r"\$\.a: a object"),
    ],
)
def test_refused_with_its_path_and_the_next_message_goes_through(sent, path):
    with pytest.raises(ProtocolError, match=path):
        pack(sent)
    assert unpack(pack({"ok": 1})) == {"ok": 1}


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x92\x01", b"\x01\x02", msgpack.packb(msgpack.ExtType(7, b"x"))])
def test_garbage_is_a_typed_error(raw):
    with pytest.raises(ProtocolError):
        unpack(raw)


def test_a_list_nested_in_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ProtocolError):
        pack(loop)


def test_a_message_that_is_too_long_is_refused_by_its_sender(monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE", 1000)
    with pytest.raises(ProtocolError, match="cannot be sent: 1003 bytes; 1000 at most"):
        pack(bytes(1000))
    assert unpack(pack(bytes(997))) == bytes(997)


async def test_a_long_message_is_decoded_while_the_loop_turns():
    sent = {"handle": HANDLE, 1: "x" * 3 * PIECE, "rows": [[i, {"i": i}] for i in range(100_000)], "raw": b"y" * PIECE}
    raw, turns = pack(sent), 0

    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    assert await unpack_in_turns(raw) == sent == unpack(raw)
    assert turns >= len(raw) // PIECE
    turning.cancel()


@pytest.mark.parametrize("nbytes", [100, 3 * PIECE])
@pytest.mark.parametrize("spoil", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: b"\xc1" + raw])
async def test_a_message_of_any_length_that_is_none_is_refused(nbytes, spoil):
    raw = spoil(pack([b"x" * (nbytes // 2), "y" * (nbytes // 2)]))
    said = f"undecodable message of {len(raw)} bytes"
    with pytest.raises(ProtocolError, match=said):
        unpack(raw)
    with pytest.raises(ProtocolError, match=said):
        await unpack_in_turns(raw)
