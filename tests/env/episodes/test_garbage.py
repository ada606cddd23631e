"""Bodies of /run that are none: an answer that says so, nothing is begun, and the next one runs."""

import json
import random

import pytest

from tests.env.episodes.conftest import turn
from tests.support.garbage import mutilated

GOOD = json.dumps(turn("7-0"))


async def storm(client, stub, count):
    draw = random.Random(7)
    for number in range(count):
        body = mutilated(draw, GOOD)
        status, answer = await client.post("/run", body if isinstance(body, bytes) else body.encode())
        if status == 200:
            assert ("result" in answer) != ("failure" in answer), (number, body)
        else:
            assert (status, "detail" in answer) == (422, True), (number, body, answer)
    assert (await client.run(turn("8-0")))["result"]["reward"] == 1.0
    assert sorted(stub.opened) == sorted(stub.closed)
    await client.counted("shmrl_episodes_running", 0)


async def test_fifty_malformed_requests(turns, stub):
    async with turns() as client:
        await storm(client, stub, 50)
        for body in (b"[" * (100 << 20), b'{"episode_id":"' + b"x" * (100 << 20)):
            assert (await client.post("/run", body))[0] == 422
        assert (await client.run(turn("9-0")))["result"]["reward"] == 1.0


@pytest.mark.long
async def test_a_thousand_malformed_requests(turns, stub):
    async with turns() as client:
        await storm(client, stub, 1000)
