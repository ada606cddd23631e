"""Messages that are none: a typed answer or the protocol's own close, and the next good client is served."""

import asyncio
import contextlib
import io
import json
import random

import aiohttp
import pytest

from tests.env.sessions.conftest import Socket
from tests.support.garbage import mutilated

GOOD = '{"type":"step","data":{"message":"x"}}'
CODES = {"INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR", "SESSION_ERROR"}
FIXED = [
    ("", "INVALID_JSON"),
    ("{nope", "INVALID_JSON"),
    ('{"type":"step","data":{"message":NaN}}', "INVALID_JSON"),
    ("[" * 100_000, "INVALID_JSON"),
    ('{"type":"reset","data":{"seed":' + "9" * 5000 + "}}", "INVALID_JSON"),
    ("[1,2]", "SESSION_ERROR"),
    ("17", "SESSION_ERROR"),
    ("{}", "UNKNOWN_TYPE"),
    ('{"type":"frob"}', "UNKNOWN_TYPE"),
    ('{"type":["reset"]}', "UNKNOWN_TYPE"),
    ('{"type":"\\ud800"}', "UNKNOWN_TYPE"),
    ('{"type":"reset","zzz":1}', "VALIDATION_ERROR"),
    ('{"type":"reset","data":{"seed":"\\ud800"}}', "VALIDATION_ERROR"),
    ('{"type":"reset","data":{"seed":1e400}}', "INVALID_JSON"),
    ('{"type":"reset","data":{"seed":' + "[" * 900 + "]" * 900 + "}}", "VALIDATION_ERROR"),
    ('{"type":"reset","data":{"seed":18446744073709551616.5}}', "VALIDATION_ERROR"),
    ('{"type":"reset","data":{"row_index":-1}}', "VALIDATION_ERROR"),
    ('{"type":"step"}', "VALIDATION_ERROR"),
    ('{"type":"step","data":{"message":"x"},"request_id":"r"}', "VALIDATION_ERROR"),
    ('{"type":"step","data":{"type":"list_tools"}}', "VALIDATION_ERROR"),
]
"""Texts and the code of their answer."""


async def answered(socket: Socket, message: str | bytes) -> bool:
    """Whether the socket still lives after one message and the answer to it."""
    await (socket.ws.send_bytes(message) if isinstance(message, bytes) else socket.ws.send_str(message))
    received = await socket.ws.receive(timeout=20)
    if received.type is not aiohttp.WSMsgType.TEXT:
        assert isinstance(message, bytes) or socket.ws.close_code in (1000, 1007, 1009)
        return False
    answer = json.loads(received.data)
    code = answer["data"].get("code")
    assert answer["type"] in ("observation", "state", "mcp") or code in CODES
    if code == "SESSION_ERROR":
        assert await socket.closed() == 1000
    return code != "SESSION_ERROR"


async def storm(client, count):
    draw = random.Random(4)
    socket = await client.open()
    for _ in range(count):
        if not await answered(socket, mutilated(draw, GOOD)):
            socket = await client.open()
    await socket.ws.close()
    await client.free()


async def test_known_nonsense(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        socket = await client.open()
        for text, code in FIXED:
            await socket.ws.send_str(text)
            kind, data = await socket.hear()
            assert (kind, data["code"]) == ("error", code), text[:80]
            if code == "SESSION_ERROR":
                assert await socket.closed() == 1000
                socket = await client.open()
        assert (await socket.ask("step", {"message": "x"}))[0] == "observation"
        await socket.ws.send_bytes(b"\x93\x00\x01")
        assert (await socket.hear())[1]["message"] == "messages are texts, not binary"


async def test_a_message_of_100_mb_is_refused_by_the_protocol(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        socket = await client.open()
        with contextlib.suppress(ConnectionError):  # it may hang up before it was sent all of it
            await socket.ws.send_str('{"type":"' + "x" * (100 << 20))
        await client.free(timeout_s=5)
        assert client.server._opened == 1
        fresh = await client.open()
        assert (await fresh.ask("reset", {}))[0] == "observation"


async def test_more_messages_ahead_than_anybody_needs(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        socket = await client.open()
        await socket.ws.send_str('{"type":"step","data":{"message":"sleep 60"}}')
        for _ in range(100):
            await socket.ws.send_str(GOOD)
        kind, data = await socket.hear()
        assert (kind, data["code"]) == ("error", "SESSION_ERROR")
        assert "more than 64 messages" in data["message"]


async def test_fifty_malformed_frames(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        await storm(client, 50)
        fresh = await client.open()
        assert (await fresh.ask("reset", {}))[0] == "observation"
        assert len(client.processes()) == 1


AT_ONCE = 8
ROUTES = {
    "/reset": '{"seed":3,"episode_id":"e","row_index":1}',
    "/step": '{"action":{"message":"hey"},"request_id":"r"}',
}


async def http_storm(client, count):
    """Every answer is JSON with the status of a request that is none, or that was still good."""
    draw = random.Random(5)
    paths = [draw.choice(list(ROUTES)) for _ in range(count)]
    bodies = [mutilated(draw, ROUTES[path]) for path in paths]

    async def ask(number):
        for path, body in list(zip(paths, bodies, strict=True))[number::AT_ONCE]:
            status, answer = await client.get(path, "POST", data=body if isinstance(body, bytes) else body.encode())
            assert (status, "detail" in answer) in ((422, True), (200, False), (500, True)), (body, answer)

    await asyncio.gather(*(ask(number) for number in range(AT_ONCE)))
    assert (await client.get("/step", "POST", json={"action": {"message": "hey"}}))[0] == 200
    await client.free()
    assert client.processes() == []


async def test_fifty_malformed_requests(sessions):
    async with sessions("OpenEcho", max_concurrent_envs=AT_ONCE) as client:
        await http_storm(client, 50)
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # it may hang up before it was sent all of it
            assert (
                await client.http.post(client.server.url + "/reset", data=io.BytesIO(b"[" * (100 << 20)))
            ).status == 413
        assert (await client.get("/state"))[0] == 200


@pytest.mark.long
@pytest.mark.timeout(600)  # a process each
async def test_a_thousand_malformed_requests(sessions):
    async with sessions("OpenEcho", max_concurrent_envs=AT_ONCE) as client:
        await http_storm(client, 1000)


@pytest.mark.long
async def test_a_thousand_malformed_frames(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        await storm(client, 1000)
        fresh = await client.open()
        assert (await fresh.ask("reset", {}))[0] == "observation"
        assert len(client.processes()) == 1
