"""The wire of an env server from outside: raw sockets, garbage, tokens; and the size and shape of what travels."""

import os
from contextlib import asynccontextmanager

import msgpack
import pytest
import zmq
import zmq.asyncio

from shmrl.env.protocol import episode_from_wire, episode_to_wire, task_from_wire
from shmrl.errors import ProtocolError
from shmrl.types import EpisodeResult, ErrorInfo, Task
from shmrl.wire import pack, unpack
from tests.env.conftest import server_config, serving

ENVS = "tests.env.environments:"
TOKEN = "0123456789abcdef0123456789abcdef"


class Exchange:
    """A socket that says anything: `await exchange(*frames)` is (request id, reply) of what comes next."""

    def __init__(self, socket):
        self.socket = socket

    async def __call__(self, *frames):
        await self.send(*frames)
        return await self.hear()

    async def send(self, *frames):
        await self.socket.send_multipart(frames)

    async def hear(self):
        assert await self.socket.poll(20_000), "no reply"
        while (frames := await self.socket.recv_multipart()) == [b""]:
            continue
        return frames[0], unpack(frames[1])


@asynccontextmanager
async def raw_client(address, identity=b""):
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    if identity:
        socket.set(zmq.IDENTITY, identity)
    socket.connect(address)
    try:
        yield Exchange(socket)
    finally:
        socket.close(linger=0)
        context.term()


async def test_garbage_gets_a_typed_error_and_the_next_request_works(hosted):
    async with hosted(ENVS + "Echo") as (_, server), raw_client(server.address) as exchange:
        number, reply = await exchange(b"1", b"health", pack({}))
        assert (number, reply["error"]["type"]) == (b"1", "ProtocolError")
        assert "hello" in reply["error"]["message"]
        assert (await exchange(b"2", b"hello", pack({})))[1] == {"success": True}
        for frames, said in (
            ((b"3", b"health", pack({}), b"more"), "4 frames"),
            ((b"4", b"health"), "2 frames"),
            ((b"5",), "1 frames"),
            ((b"6", b"explode", pack({})), "unknown method 'explode'"),
            ((b"7", b"\xff\xfe", pack({})), "unknown method"),
            ((b"8", b"health", b"\xc1\xc1"), "undecodable message of 2 bytes"),
            ((b"9", b"health", pack([1])), "the payload is a list"),
            ((b"10", b"health", msgpack.packb({1: 2})), "text keys"),
            ((b"11", b"run_rollout", pack({})), "tag is missing"),
            ((b"11b", b"run_rollout", pack({"tag": "run"})), "tag 'run' is not run/source/group"),
            ((b"12", b"run_rollout", pack({"tag": "a/b/c/d"})), "task is missing"),
            ((b"13", b"tasks", pack({"split": "train", "start": "0", "n": 1})), "start is a str"),
            ((b"13b", b"tasks", pack({"split": "train", "start": -1, "n": 1})), "both count from 0"),
            ((b"13c", b"tasks", pack({"split": "train", "start": 0, "n": 1025})), "n = 1025 at once; at most 1024"),
            ((b"14", b"cancel", pack({})), "request_id is missing"),
            ((b"14b", b"take_over", pack({})), "run is missing"),
            (
                (
                    b"15",
                    b"run_rollout",
                    pack({"tag": "a/b/c", "task": [1, {}, 0], "model": {}, "seed": 0, "keep": "train"}),
                ),
                "task",
            ),
        ):
            number, reply = await exchange(*frames)
            assert number == frames[0]
            assert (reply["success"], reply["error"]["type"]) == (False, "ProtocolError"), reply
            assert said in reply["error"]["message"]
        number, reply = await exchange(b"16", b"tasks", pack({"split": "train", "start": 0, "n": 1}))
        assert reply == {"success": True, "tasks": [["train-0", {"text": "ab"}, 0]]}


async def test_the_token_is_required(arena, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    config = server_config(arena.address, ENVS + "Echo", arena={"token_file": str(tmp_path / "token")})
    with pytest.raises(ProtocolError, match="wrong token"):
        async with serving(config, token=TOKEN.replace("0", "1")):
            pass


async def test_a_client_with_the_token_is_let_in(arena, monkeypatch):
    monkeypatch.setenv("SHMRL_TOKEN", TOKEN)
    async with serving(server_config(arena.address, ENVS + "Echo"), token=TOKEN) as (client, server):
        assert (await client.info())["env_id"] == ENVS + "Echo"
        async with raw_client(server.address) as exchange:
            assert "wrong token" in (await exchange(b"1", b"hello", pack({"token": TOKEN[:-1]})))[1]["error"]["message"]
            assert "hello" in (await exchange(b"2", b"info", pack({})))[1]["error"]["message"]


async def test_two_thousand_requests_at_once_all_reply(hosted):
    async with hosted(ENVS + "Echo") as (_, server):
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(server.address)
        await socket.send_multipart([b"hello", b"hello", pack({})])
        sent = {os.urandom(8) for _ in range(2000)}
        for number in sent:
            await socket.send_multipart([number, b"info", pack({})])
        got = set()
        while len(got) < len(sent) + 1:
            assert await socket.poll(20_000)
            got.add((await socket.recv_multipart())[0])
        assert got == sent | {b"hello"}
        socket.close(linger=0)
        context.term()


def test_episodes_survive_the_wire():
    failed = EpisodeResult(
        False, "t", error=ErrorInfo("EngineError", "503", ("ClientError: refused",), "a.py:7, in f"), wire_bytes=7
    )
    assert episode_from_wire(unpack(pack(episode_to_wire(failed))), 7) == failed
    good = EpisodeResult(True, "t", 0.0, {"a": 0.5}, {}, "stop", 2, 17, 3, 4, wire_bytes=9)
    assert episode_from_wire(unpack(pack(episode_to_wire(good))), 9) == good


def test_an_error_with_a_lone_surrogate_can_be_told():
    failed = EpisodeResult(False, "t", error=ErrorInfo("ValueError", "bad \ud800"))
    assert episode_from_wire(unpack(pack(episode_to_wire(failed))), 0).error.message == "bad ?"


def test_tasks_are_checked():
    assert task_from_wire({"id": "1", "data": {}, "seed": 3}) == Task("1", {}, 3)
    for bad in ({}, ["1", {}], ["1", [], 0], "x", None):
        with pytest.raises(ProtocolError, match="task"):
            task_from_wire(bad)
