"""Environments that end their rollout in a way that ends a process, or hides what happened: one failed episode each."""

import re

import pytest

from shmrl.types import Task
from tests.env.conftest import rollout

ENVS = "tests.env.environments:"
SAID = {
    "exit": ("SystemExit", "3"),
    "interrupt": ("KeyboardInterrupt", ""),
    "generator": ("GeneratorExit", ""),
    "speechless": ("Speechless", "(no message: its __str__ raised RuntimeError)"),
    "long": ("ValueError", "x" * (64 << 10) + f"... ({20 << 20} characters)"),
}


@pytest.mark.parametrize("group", [False, True])
async def test_what_ends_a_process_ends_the_episode_alone(hosted, spec, group):
    async with hosted(ENVS + "Misbehaving") as (client, _):
        for index, (name, said) in enumerate(SAID.items()):
            task, tag = Task("0", {"raises": name}), f"run/test/{index}"
            if group:
                results = await client.run_group(task, model=spec(), group_id="g", seeds=[1, 2], keep="train", tag=tag)
            else:
                results = [await rollout(client, task, spec(), index)]
            assert {(one.error.type, one.error.message) for one in results} == {said}
        assert (await rollout(client, Task("0", {}), spec(), 9, keep="eval")).reward == 1.0
        assert (await client.health())["restarts"] == 0


@pytest.mark.parametrize("group", [False, True])
async def test_a_bug_says_where_it_is_and_its_traceback_is_logged_once(hosted, spec, capfd, group):
    """The frame is the environment's own, though a library raised."""
    async with hosted(ENVS + "Raising") as (client, _):
        for index in range(3):
            task, tag = Task("0", {"text": "{"}), f"run/test/{index}"
            if group:
                results = await client.run_group(task, model=spec(), group_id="g", seeds=[1], keep="train", tag=tag)
            else:
                results = [await rollout(client, task, spec(), index)]
            (error,) = [one.error for one in results]
            assert error.type == "JSONDecodeError"
            assert re.fullmatch(r"tests/env/environments\.py:\d+, in demonstrate", error.where)
    if not group:
        log = "".join(capfd.readouterr())
        assert (log.count("Traceback"), log.count("run_rollout failed: JSONDecodeError: ")) == (1, 3)


async def test_a_fork_that_returns_takes_no_request_and_gives_no_reply(hosted, spec):
    async with hosted(ENVS + "Misbehaving") as (client, _):
        for index in range(4):
            task = Task("0", {"forks": index < 2})
            assert (await rollout(client, task, spec(), index, keep="eval")).reward == 1.0
        assert (await client.health())["restarts"] == 0
