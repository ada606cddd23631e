"""What is none of the native protocol: a typed error each, nothing is left of it, and the next request works."""

import random

import msgpack
import pytest

from shmrl.wire import pack
from tests.env.conftest import until
from tests.env.test_protocol import raw_client

ENVS = "tests.env.environments:"
TASK = ["train-0", {"text": "ab"}, 0]
RUN = {"task": TASK, "model": {"urls": ["http://127.0.0.1:9"], "tokenizer": "/nowhere", "sampling": {"max_tokens": 1}}}
GOOD = {
    "health": {},
    "info": {},
    "tasks": {"split": "train", "start": 0, "n": 2},
    "run_rollout": {**RUN, "group_id": "g", "seed": 1, "keep": "train", "tag": "run/test/g/0"},
    "run_group": {**RUN, "group_id": "g", "seeds": [1, 2], "keep": "eval", "tag": "run/test/g"},
    "cancel": {"request_id": b"1", "tag": "run/test/g/0"},
    "take_over": {"run": "elsewhere"},
}
VALUES = (None, True, -1, 2**64 - 1, float("nan"), float("inf"), "", "x", b"\xff", [], [[]], {}, {1: 2}, TASK, "a/b/c")
RAW = (b"\xa3\xed\xa0\x80", b"\xc1", b"\xd9\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc7\x03\x01abc", b"")
"""A lone surrogate, a byte that is no msgpack, text, maps and lists without their end, a short handle, nothing."""


def malformed(draw):
    """The frames of a request, spoiled in one way, which a few of them survive."""
    method = draw.choice(list(GOOD))
    payload, frames = GOOD[method], [method.encode(), b""]
    kind = draw.randrange(6)
    if kind == 0:
        return [*draw.choice(([], [method.encode()], [method.encode(), pack(payload), b"more"]))]
    if kind == 1:
        frames[1] = draw.choice(RAW)
    elif kind == 2:
        frames[1] = pack(payload)[: -draw.randint(1, 3)]
    elif kind == 3:
        frames[1] = msgpack.packb(draw.choice(([payload], 3, "x", None, {**payload, 1: 2}, {**payload, b"k": 2})))
    elif kind == 4:
        changed = {**payload, draw.choice([*payload, "model", "wait"]): draw.choice(VALUES)}
        changed.pop(draw.choice(["", *payload]), None)
        frames[1] = msgpack.packb(changed)
    else:
        frames = [draw.randbytes(draw.randrange(9)), draw.randbytes(draw.randrange(60))]
    return frames


async def storm(hosted, arena, count):
    draw = random.Random(6)
    async with hosted(ENVS + "Echo") as (client, server), raw_client(server.address) as exchange:
        assert (await exchange(b"hello", b"hello", pack({})))[1]["success"]
        for number in range(count):
            asked = [b"%d" % number, *malformed(draw)]
            told, reply = await exchange(*asked)
            assert told == asked[0]
            assert reply["success"] or reply["error"]["type"] in ("ProtocolError", "EnvError"), (asked, reply)
        for head in (b"\xdb\xff\xff\xff\xff", b"\x81\xa1k\xc6\x06\x40\x00\x01", b"\xde"):
            _, reply = await exchange(b"100 MB", b"info", head + b"y" * (100 << 20))
            assert reply["error"]["type"] == "ProtocolError"
        _, reply = await exchange(b"next", b"tasks", pack({"split": "train", "start": 0, "n": 1}))
        assert reply == {"success": True, "tasks": [TASK]}
        await until(lambda: not server._handlers)
        health = await client.health()
        assert (health["sessions"], health["waiting"], health["restarts"]) == (0, 0, 0)
        assert (len(server._requests), len(server._episodes), len(server._evaluations)) == (0, 0, 0)
        assert arena.stats()["blocks"] == 0


async def test_a_hundred_malformed_requests(hosted, arena):
    await storm(hosted, arena, 100)


@pytest.mark.long
async def test_a_thousand_malformed_requests(hosted, arena):
    await storm(hosted, arena, 1000)


async def test_nothing_long_is_decoded_of_somebody_without_the_token(hosted, monkeypatch):
    async with hosted(ENVS + "Echo") as (_, server), raw_client(server.address) as exchange:
        monkeypatch.setattr("shmrl.env.protocol.unpack_in_turns", None)
        for method, said in ((b"info", "say hello"), (b"run_rollout", "say hello"), (b"hello", "4096 at most")):
            _, reply = await exchange(b"1", method, pack({"token": "y" * 5000}))
            assert said in reply["error"]["message"]
        monkeypatch.undo()


async def test_a_cancel_does_not_overtake_the_long_request_that_it_is_about(hosted, spec, engine, arena):
    """It is decoded in many turns of the loop; the cancel behind it in one."""
    engine.open.clear()
    asked = {**GOOD["run_rollout"], "model": spec(), "task": ["0", {"text": "a", "rows": list(range(1 << 20))}, 0]}
    async with hosted(ENVS + "Echo") as (_, server), raw_client(server.address) as exchange:
        await exchange(b"hello", b"hello", pack({}))
        await exchange.send(b"long", b"run_rollout", pack(asked))
        replies = dict([await exchange(b"short", b"cancel", pack({"request_id": b"long", "tag": asked["tag"]}))])
        replies |= dict([await exchange.hear()])
        assert replies[b"short"] == {"success": True, "cancelled": True}
        assert replies[b"long"]["error"]["type"] == "Cancelled"
    assert arena.stats()["blocks"] == 0
