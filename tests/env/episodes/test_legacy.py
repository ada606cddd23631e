"""Rows of before there were episodes: an episode of the configured pair, or relayed to the agent that they name."""

import asyncio
import json
import re

import pytest

from tests.env.episodes.conftest import DATA, turn
from tests.env.episodes.stub import LIFE

ROW = {
    "responses_create_params": {"input": "how cold is it?"},
    "city": "SF",
    "_ng_task_index": 4,
    "_ng_rollout_index": 2,
}


def recorded_calls():
    """(path, body, status) of what was recorded of Gym's own `single_agent_turn_legacy`."""
    text = (DATA / "raw_calls.txt").read_text()
    found = re.findall(r"### POST http://127.0.0.1:13079(/\S+)\n(\{.*\})\n--> (\d+) .*\n(.*)", text)
    return [(path, json.loads(body), int(status), json.loads(answer)) for path, body, status, answer in found]


async def test_the_recorded_calls_are_answered_alike(turns, stub):
    """Gym answers a bad body with 500 and a repr; here it is 422, and says where the fault is."""
    calls = recorded_calls()
    assert [status for _, _, status, _ in calls] == [200, 500, 200, 500, 200]
    async with turns("single_agent_turn_legacy") as client:
        agent = next(one["agent_ref"]["name"] for _, _, status, one in calls if status == 200 and "agent_ref" in one)
        for path, body, status, recorded in calls:
            got, answer = await client.post(path, json.loads(json.dumps(body).replace(agent, "agent")))
            assert got == (422 if status == 500 else status)
            if path == "/run" and status == 200:
                assert answer["reward"] == recorded["reward"]
                assert answer["agent_ref"] == {"name": "agent"}
                assert {"responses_create_params", "response", "mask_sample"} <= answer.keys() & recorded.keys()
            if path == "/aggregate_metrics":
                assert answer["agent_metrics"] == {"mean/reward": 0.25}  # the resources server's own


async def test_a_flat_row_is_an_episode_of_the_pair(turns, stub):
    async with turns("single_agent_turn_legacy") as client:
        answer = await client.run({**ROW, "_ng_attempt_index": 1, "task_source": "weather"})
        assert (answer["reward"], answer["city"], answer["agent_ref"]) == (1.0, "SF", {"name": "agent"})
        seed = stub.of("/seed_session").body
        assert seed["episode_id"] == {"rollout_id": "4-2", "attempt": 1}
        assert seed["task_id"] == {"taskset": "weather", "task_id": "4"}
        assert seed["task_data"] == {"city": "SF"}
        assert stub.paths == LIFE


async def test_a_failure_of_a_flat_row_is_told_flat(turns, stub):
    stub.on["/verify"] = 503
    async with turns("single_agent_turn_legacy") as client:
        answer = await client.run(ROW)
        assert answer["_ng_failure_class"] == "environment_server_failed"
        assert (answer["_ng_failure_stage"], answer["_ng_failure_terminal"]) == ("verification", False)
        assert answer["_ng_failure_partial_response"]["id"] == "resp_1"
        assert answer["agent_ref"] == {"name": "agent"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task_source": "elsewhere"}, "task_source 'elsewhere'"),
        ({"agent_ref": {"name": "another"}}, "another"),
        ({"_ng_task_index": None}, "_ng_task_index"),
        ({"task_id": {"taskset": "a"}}, "episode_id"),
        ({"_ng_rollout_id": "x-a1"}, "-a<N>"),
    ],
)
async def test_a_row_of_another_pair_is_refused(turns, stub, change, said):
    async with turns("single_agent_turn_legacy") as client:
        status, answer = await client.post("/run", {**ROW, **change})
        assert status == 422
        assert said in str(answer["detail"])
        assert not stub.calls


@pytest.mark.parametrize("implementation", ["legacy_agent", "single_agent_turn"])
async def test_a_row_that_names_its_agent_is_relayed_as_it_is(turns, stub, implementation):
    row = {**ROW, "agent_ref": {"name": "agent"}}
    async with turns(implementation) as client:
        raw = json.dumps(row, indent=1).encode()
        async with client.http.post(client.url("/run"), data=raw, headers={"X-Trace": "7"}) as reply:
            assert reply.status == 200
            assert reply.headers.getall("X-Agent") == ["yes"]
            assert reply.cookies == {}
            assert await reply.json() == {**row, "reward": 0.5}
        (call,) = stub.calls
        assert (call.path, call.body, call.headers["X-Trace"]) == ("/run", row, "7")


async def test_a_relay_passes_on_what_the_agent_says_and_says_when_it_is_not_there(turns, stub):
    stub.on["/run"] = 418
    async with turns("legacy_agent") as client:
        assert await client.post("/run", ROW) == (418, {"detail": "/run is out of order"})
        stub.on["/run"] = "drop"
        status, answer = await client.post("/run", {**ROW, "_ng_rollout_index": 3})
        assert status == 502
        assert "agent/run" in answer["detail"]


async def test_a_relayed_row_that_says_which_it_is_runs_once(turns, stub):
    async with turns("legacy_agent") as client:
        await asyncio.gather(client.run(ROW), client.run(ROW))
        assert stub.paths == ["/run"]
        nameless = {"x": 1}  # two of the same are two
        await asyncio.gather(client.run(nameless), client.run(nameless))
        assert stub.paths == 3 * ["/run"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[1]", "a list"),
        (b"{", "no JSON"),
        (b'{"a": "\xff"}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"episode_id": NaN}', "no number of JSON"),
        ({"x": 1}, "agent_ref.name"),
        ({"agent_ref": {"name": "nobody"}}, "nobody"),
        ({"agent_ref": {"name": "weather"}}, "one of resources_servers"),
        (turn("0-0", attempt=-1), "attempt"),
        (turn("no spaces"), "rollout_id"),
        (turn("0-0-a2"), "-a<N>"),
        ({**turn(), "more": 1}, "more"),
        (
            {**turn(), "task": {"task_id": {"taskset": "a", "task_id": "b"}, "task_input": {}}},
            "responses_create_params",
        ),
    ],
)
async def test_a_body_that_is_no_request_is_refused_and_the_next_one_runs(turns, stub, body, said):
    async with turns() as client:
        status, answer = await client.post("/run", body)
        assert status == 422
        assert said in json.dumps(answer["detail"])
        assert not stub.calls
        assert (await client.run(turn()))["result"]["reward"] == 1.0
