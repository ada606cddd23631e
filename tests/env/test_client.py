"""The client's connection: what it does when the server goes away and something else answers in its place."""

import asyncio

import pytest
import zmq
import zmq.asyncio

from shmrl.env.client import EnvClient
from shmrl.errors import ServerDied
from shmrl.wire import pack

TIMES = 3


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
        with pytest.raises(ServerDied, match="the server exited, or its connection broke"):
            await client.health()
        for _ in range(TIMES):
            await asyncio.wait_for(hung_up.acquire(), 10)
        await client.close()
