"""The connection: what either end does when the other goes away, or is stopped without closing it."""

import asyncio
import json
import signal
import sys

import psutil
import pytest
import zmq
import zmq.asyncio

from shmrl.env import client as clients
from shmrl.env import protocol
from shmrl.env import server as servers
from shmrl.env.client import EnvClient
from shmrl.errors import ServerDied
from shmrl.types import Task
from shmrl.wire import pack
from tests.env.conftest import rollout, server_config, serving, until
from tests.env.test_server import server_process

TIMES = 3
ECHO = "tests.env.environments:Echo"


def play(address, spec):
    """One episode of a client in a process of its own; prints its reward, or what became of the connection."""

    async def run():
        async with EnvClient(address) as client:
            try:
                print((await rollout(client, Task("t", {"text": "ab"}, 1), json.loads(spec))).reward)
            except ServerDied as error:
                print(error)

    asyncio.run(run())


async def playing(server, spec):
    """The process of `play`; `server` is in ours."""
    call = f"from tests.env.test_client import play; play({server.address!r}, {json.dumps(spec)!r})"
    return await asyncio.create_subprocess_exec(sys.executable, "-c", call, stdout=asyncio.subprocess.PIPE)


def connections(server, client):
    """How many connections the server has with this process."""
    port = int(server.address.rpartition(":")[2])
    theirs = {c.laddr for c in psutil.Process(client.pid).net_connections() if c.raddr and c.raddr.port == port}
    ours = psutil.Process().net_connections()
    return sum(c.raddr in theirs and c.status == psutil.CONN_ESTABLISHED for c in ours if c.laddr.port == port)


async def test_a_client_that_is_stopped_for_too_long_is_gone_and_its_episode_dropped(
    arena, spec, engine, monkeypatch, caplog
):
    monkeypatch.setattr(protocol, "PING_MS", 50)
    monkeypatch.setattr(protocol, "SILENCE_MS", 500)
    async with serving(server_config(arena.address, ECHO)) as (_, server):
        engine.open.clear()
        client = await playing(server, spec())
        await until(lambda: engine.running == 1)
        assert connections(server, client) == 1
        client.send_signal(signal.SIGSTOP)
        await until(lambda: connections(server, client) == 0)
        engine.open.set()
        await until(lambda: "the client of run/test/g/0 is gone: its episode is dropped" in caplog.text)
        client.send_signal(signal.SIGCONT)
        output, _ = await client.communicate()
        assert b"the server exited, was silent for too long, or its connection broke" in output
        assert arena.stats()["blocks"] == 0


async def test_a_client_that_is_stopped_for_a_while_gets_its_episode(arena, spec, engine, monkeypatch):
    monkeypatch.setattr(protocol, "PING_MS", 50)
    async with serving(server_config(arena.address, ECHO)) as (_, server):
        engine.open.clear()
        client = await playing(server, spec())
        await until(lambda: engine.running == 1)
        client.send_signal(signal.SIGSTOP)
        engine.open.set()
        await until(lambda: arena.stats()["blocks"] == 1 and not server._requests)
        client.send_signal(signal.SIGCONT)
        output, _ = await client.communicate()
        assert output == b"1.0\n"
    assert arena.discard("run") == 1


async def test_a_server_that_is_stopped_for_too_long_fails_what_it_was_asked(
    tmp_path, arena, spec, engine, monkeypatch
):
    monkeypatch.setattr(protocol, "PING_MS", 50)
    monkeypatch.setattr(protocol, "SILENCE_MS", 500)
    with server_process(tmp_path, server_config(arena.address, ECHO)) as (process, address):
        async with EnvClient(address) as client:
            engine.open.clear()
            flying = asyncio.create_task(rollout(client, Task("t", {"text": "ab"}, 1), spec()))
            await until(lambda: engine.running == 1)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(ServerDied, match="the server exited, was silent for too long, or its connection broke"):
                await flying
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 15) == 128 + signal.SIGTERM


async def test_a_server_that_answers_nothing_else_any_more_is_given_up(arena):
    """Its process and its connection are there; what answers is stuck."""
    async with serving(server_config(arena.address, "reverse-text")) as (client, server):

        async def stuck(*_):
            await asyncio.Event().wait()

        server._take_over = stuck
        with pytest.raises(ServerDied, match=r"no answer to 'take_over' within 0\.2 s"):
            await client._call("take_over", {"run": "run"}, 0.2)
        assert len(await client.tasks("train", 0, 1)) == 1
        for handler in server._handlers:
            handler.cancel()


async def test_a_client_whose_connection_breaks_again_and_again_can_be_closed():
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = EnvClient(f"tcp://127.0.0.1:{port}")
    connecting = asyncio.create_task(client.connect(10))
    for _ in ("hello", "health"):
        peer, number, _, _ = await router.recv_multipart()
        await router.send_multipart([peer, number, pack({"success": True})])
    await connecting
    router.close(0)
    context.term()

    hung_up = asyncio.Semaphore(0)

    async def hang_up(reader, writer):
        writer.close()
        await writer.wait_closed()
        hung_up.release()

    async with await asyncio.start_server(hang_up, "127.0.0.1", port, reuse_address=True):
        for _ in range(TIMES):
            await asyncio.wait_for(hung_up.acquire(), 10)
        with pytest.raises(ServerDied, match="the server exited, was silent for too long, or its connection broke"):
            await client.health()
        for _ in range(TIMES):
            await asyncio.wait_for(hung_up.acquire(), 10)
        await client.close()


async def test_a_reply_that_is_too_long_ends_the_connection_unread(monkeypatch):
    monkeypatch.setattr(clients, "MAX_MESSAGE", 1000)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = EnvClient(f"tcp://127.0.0.1:{port}")
    connecting = asyncio.create_task(client.connect(10))
    peer, number, _, _ = await router.recv_multipart()
    await router.send_multipart([peer, number, pack({"success": True, "noise": bytes(2000)})])
    with pytest.raises(ServerDied, match="its connection broke"):
        await connecting
    router.close(0)
    context.term()


async def test_a_request_that_is_too_long_ends_the_connection_and_the_server_goes_on(arena, monkeypatch):
    monkeypatch.setattr(servers, "MAX_MESSAGE", 1000)
    async with serving(server_config(arena.address, ECHO)) as (client, server):
        async with EnvClient(server.address) as other:
            with pytest.raises(ServerDied, match="its connection broke"):
                await other._call("health", {"noise": bytes(2000)})
        assert (await client.health())["alive"]
