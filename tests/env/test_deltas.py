"""What a client is told before the reply: how episodes get on, and the episodes of an evaluation."""

import asyncio

import pytest

from shmrl.errors import EnvError, ProtocolError
from shmrl.types import Task
from tests.env.conftest import until

ENVS = "tests.env.environments:"


async def test_an_episode_tells_how_it_gets_on(hosted, spec, arena):
    async with hosted(ENVS + "Turns") as (client, _):
        told = []
        asked = {"model": spec(), "group_id": "g", "seed": 0, "keep": "train", "tag": "run/test/g/0"}
        result = await client.run_rollout(Task("0", {"turns": 2}), **asked, on_delta=told.append)
        phases = ["model", "environment", "model", "environment", "scoring", "storing"]
        assert [delta.phase for delta in told] == phases
        assert [delta.turns for delta in told] == [0, 1, 1, 2, 2, 2]
        assert told[-1].tokens == result.num_tokens > told[1].tokens > 0
        assert {delta.messages for delta in told} == {()}  # what is trained on is in the block
        arena.discard("run")


async def test_an_evaluation_tells_its_messages_as_they_come(hosted, spec):
    async with hosted(ENVS + "Turns") as (client, _):
        told = []
        asked = {"model": spec(), "group_id": "g", "seed": 0, "keep": "eval", "tag": "run/test/g/0"}
        result = await client.run_rollout(Task("0", {"turns": 3}), **asked, on_delta=told.append)
        assert [len(delta.messages) for delta in told] == [0, 2, 0, 2, 0, 2, 0]
        assert tuple(message for delta in told for message in delta.messages) == result.messages


async def test_a_group_tells_which_episode_it_is(hosted, spec, arena):
    async with hosted(ENVS + "Echo") as (client, _):
        told = []
        asked = {"model": spec(), "group_id": "g", "seeds": [1, 2, 3], "keep": "train", "tag": "run/test/g"}
        await client.run_group(Task("0", {"text": "a"}), **asked, on_delta=told.append)
        assert {delta.episode for delta in told if delta.phase == "scoring"} == {0, 1, 2}
        arena.discard("run")


async def test_a_callback_that_raises_keeps_nobody_waiting(hosted, spec, arena, caplog):
    async with hosted(ENVS + "Echo") as (client, _):
        asked = {"model": spec(), "group_id": "g", "seed": 0, "keep": "train", "tag": "run/test/g/0"}
        result = await client.run_rollout(Task("0", {"text": "a"}), **asked, on_delta=lambda delta: 1 / 0)
        assert (result.success, "ZeroDivisionError" in caplog.text) == (True, True)
        arena.discard("run")


async def test_evaluate_plays_tasks_several_times(hosted, spec, arena, engine):
    async with hosted(ENVS + "IteratedTasks", workers=2) as (client, _):
        ended = []
        results = await client.evaluate(
            model=spec(), n=8, rollouts=3, concurrency=4, on_episode=lambda *which: ended.append(which[:2])
        )
        assert [len(rollouts) for rollouts in results] == [3] * 5  # the set ends
        assert [rollouts[0].task_id for rollouts in results] == [f"eval-{i}" for i in range(5)]
        assert sorted(ended) == [(task, rollout) for task in range(5) for rollout in range(3)]
        assert all(result.success and result.messages for rollouts in results for result in rollouts)
        assert len({request["sampling_params"]["seed"] for request in engine.requests}) == 15
        assert arena.stats()["blocks"] == 0
        with pytest.raises(ProtocolError, match="rollouts = 0: at least 1"):
            await client.evaluate(model=spec(), n=1, rollouts=0)


async def test_a_cancelled_evaluation_ends_its_episodes(hosted, spec, engine):
    engine.open.clear()
    async with hosted(ENVS + "Echo") as (client, server):
        running = asyncio.create_task(client.evaluate(model=spec(), n=9, rollouts=2, concurrency=6))
        await until(lambda: engine.running == 6)
        running.cancel()
        await until(lambda: engine.running == 0 and not server._evaluations)
        assert len(engine.requests) == 6
        assert (await client.health())["sessions"] == 0


async def test_an_evaluation_ends_when_its_run_is_taken_over(hosted, spec, engine):
    from shmrl.env.client import EnvClient

    engine.open.clear()
    async with hosted(ENVS + "Echo") as (client, server), EnvClient(server.address) as before:
        running = asyncio.create_task(before.evaluate(model=spec(), n=9, concurrency=3, tag="run/test/held"))
        await until(lambda: engine.running == 3)
        assert await client.take_over("run") == 1
        with pytest.raises(EnvError, match="cancelled"):
            await running
