"""Who has said hello: the server remembers those that are there, and knows each of them from every other."""

import asyncio

from shmrl.wire import pack
from tests.env.test_protocol import raw_client

ENVS = "tests.env.environments:"


async def test_clients_that_left_are_forgotten(hosted):
    async with hosted(ENVS + "Echo") as (client, server):
        for _ in range(20):
            async with raw_client(server.address) as exchange:
                assert (await exchange(b"1", b"hello", pack({})))[1]["success"]
                assert await client.take_over("run") == 0
        async with asyncio.timeout(30):
            while len(server._clients) > 2 or server._clients._superseded:
                async with raw_client(server.address) as exchange:
                    await exchange(b"1", b"hello", pack({}))
        assert (await client.info())["name"] == "test"


async def test_an_identity_of_ones_own_is_refused_and_lets_nobody_in(hosted):
    """The next socket of that name would need no token."""
    async with hosted(ENVS + "Echo") as (_, server):
        for _ in range(2):
            refused, then = await hello_as(server.address, b"me")
            assert (refused["type"], "ZMQ_IDENTITY" in refused["message"]) == ("ProtocolError", True)
            assert "say hello" in then["message"]
        assert len(server._clients) == 1


async def hello_as(address, identity):
    """The errors of a hello and of a request after it.

    A socket gets no answers while the one before it is still connected under the same identity.
    """
    async with asyncio.timeout(60):
        while True:
            async with raw_client(address, identity=identity) as exchange:
                await exchange.send(b"1", b"hello", pack({}))
                if await exchange.socket.poll(500):
                    refused = (await exchange.hear())[1]["error"]
                    return refused, (await exchange(b"2", b"info", pack({})))[1]["error"]
