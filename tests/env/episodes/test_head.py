"""The head and the routes around `/run`: what the stock collector and `gym env status` ask."""

import asyncio
import json
import os
import signal
import sys

import pytest
import yaml

from shmrl.env.episodes.plan import planned
from shmrl.env.episodes.server import EpisodeHost
from shmrl.errors import ConfigError, PortInUse
from tests.env.episodes.conftest import DATA, ENVS, episode, nesting

MINE = {
    "mine": {"environment_servers": {"always": {"entrypoint": f"{ENVS}Always"}}},
    "head_server": {"host": "127.0.0.1", "port": 0},
}


async def test_the_head_says_where_everything_is(turns, stub):
    async with turns() as client:
        status, text = await client.head("/global_config_dict_yaml")
        assert status == 200
        tree = yaml.safe_load(text)
        block = tree["turn"]["environment_servers"]["single_agent_turn"]
        assert client.url() == f"http://{block['host']}:{block['port']}"
        assert block["entrypoint"] == "app.py"
        assert tree["agent"]["responses_api_agents"]["simple_agent"]["port"] == stub.ports[1]
        assert client.host.head_url == f"http://127.0.0.1:{tree['head_server']['port']}"


async def test_the_status_has_gyms_keys(turns, stub):
    recorded = json.loads((DATA / "head_server_instances.json").read_text())
    async with turns() as client:
        status, instances = await client.head("/server_instances")
        assert status == 200
        assert [one.keys() for one in instances] == 3 * [recorded[0].keys()]
        here = {one["process_name"]: one for one in instances}
        assert here["turn"]["pid"] == os.getpid()
        assert here["turn"]["url"] == client.url()
        assert here["agent"]["pid"] is None
        assert here["agent"]["url"] == f"http://127.0.0.1:{stub.ports[1]}"
        async with client.http.get(here["turn"]["url"]) as reply:  # how `gym env status` looks whether it is up
            assert reply.status == 200


@pytest.mark.parametrize("path", ["/", "/livez", "/health", "/healthz", "/readyz"])
async def test_life_and_readiness(hosted, path):
    async with hosted(MINE) as client:
        assert await client.get(path) == (200, {"status": "ok"})
        assert await client.head(path) == (200, {"status": "ok"})


async def test_alive_before_it_is_ready_and_requests_wait(written):
    """Ports are taken first: a protocol that is still loading is alive, and not ready."""
    import aiohttp

    host = EpisodeHost(planned([written(MINE)]))
    loaded = asyncio.Event()
    host.fronts["mine"].protocol.start = loaded.wait
    running = asyncio.create_task(host.run())
    await host.bound.wait()
    async with aiohttp.ClientSession() as http:
        url = host.fronts["mine"].url
        statuses = []
        for place in (url + "/livez", url + "/readyz", host.head_url + "/livez", host.head_url + "/readyz"):
            async with http.get(place) as reply:
                statuses.append(reply.status)
        assert statuses == [200, 503, 200, 503]
        asking = asyncio.create_task(http.post(url + "/run", data=json.dumps(episode(reward=2.0))))
        loaded.set()
        async with await asking as reply:
            assert (await reply.json())["result"] == {"reward": 2.0, "task": "t0"}
    host.stop()
    await running


async def test_a_protocol_of_ones_own(hosted):
    async with hosted(MINE) as client:
        assert (await client.run(episode(task="t7")))["result"] == {"reward": 1.0, "task": "t7"}
        failure = (await client.run(episode("0-1", masked=True)))["failure"]
        assert failure == {
            "failure_reason": "no",
            "terminal": True,
            "failure_kind": "always:masked",
            "stage": "verification",
        }
        answer = await client.run(episode("0-2", reward="much"))
        assert answer["failure"]["stage"] == "verification"


async def test_aggregates(hosted):
    results = [
        {"reward": 1.0, "num_turns": 2, "_ng_task_index": 0, "_ng_rollout_index": 0},
        {"reward": 0.0, "num_turns": 4, "_ng_task_index": 0, "_ng_rollout_index": 1, "done": True},
        {"reward": 0.5, "num_turns": 3, "_ng_task_index": 3, "_ng_rollout_index": 0},
        {"reward": 9.0, "_ng_task_index": 3, "_ng_rollout_index": 1, "mask_sample": True},
    ]
    async with hosted(MINE) as client:
        status, found = await client.post("/aggregate_metrics", {"verify_responses": results})
        assert status == 200
        assert found["agent_metrics"]["mean/reward"] == 0.5
        assert found["agent_metrics"]["max/num_turns"] == 4
        assert found["agent_metrics"]["masked_rollouts"] == 1
        assert found["key_metrics"] == {"mean/reward": 0.5}
        assert [group["_ng_task_index"] for group in found["group_level_metrics"]] == [0, 3]
        assert [group["mean/reward"] for group in found["repeat_level_metrics"]] == [0.75, 0.0]
        empty = (await client.post("/aggregate_metrics", {"verify_responses": []}))[1]
        recorded = (DATA / "raw_calls.txt").read_text().strip().splitlines()[-1]
        assert empty == json.loads(recorded)
        for body in ({}, {"verify_responses": [1]}, b"x"):
            assert (await client.post("/aggregate_metrics", body))[0] == 422


async def test_a_token_where_there_is_one(hosted, monkeypatch):
    monkeypatch.setenv("SHMRL_TOKEN", "0123456789abcdef")
    tree = json.loads(json.dumps(MINE))
    tree["mine"]["environment_servers"]["always"]["host"] = "0.0.0.0"
    async with hosted(tree) as client:
        assert (await client.post("/run", episode()))[0] == 401
        bearer = {"Authorization": "Bearer 0123456789abcdef"}
        assert (await client.post("/run", episode(), headers=bearer))[0] == 200


def test_beyond_loopback_a_token_is_needed(written, monkeypatch):
    monkeypatch.delenv("SHMRL_TOKEN", raising=False)
    tree = json.loads(json.dumps(MINE))
    tree["mine"]["environment_servers"]["always"]["host"] = "0.0.0.0"
    with pytest.raises(ConfigError, match="can be reached from elsewhere"):
        EpisodeHost(planned([written(tree)]))


async def test_a_port_that_is_taken_is_said_with_its_holder(hosted, written):
    async with hosted(MINE) as client:
        tree = json.loads(json.dumps(MINE))
        tree["mine"]["environment_servers"]["always"]["port"] = int(client.url().rpartition(":")[2])
        with pytest.raises(PortInUse, match=f"pid {os.getpid()}"):
            await EpisodeHost(planned([written(tree)])).run()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_the_command(written, stub, number, code):
    """From the file to the answer, and a signal that ends it with nothing left."""
    file = written({**nesting(stub), **MINE})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shmrl", "env-server", str(file)), stderr=asyncio.subprocess.PIPE
    )
    said = ""
    while "the head is at" not in said:
        line = await process.stderr.readline()
        assert line, said
        said += line.decode()
    assert "turn, environment_servers/single_agent_turn" in said
    assert "mine, environment_servers/always" in said
    process.send_signal(number)
    _, rest = await process.communicate()
    assert process.returncode == code, rest.decode()


async def test_a_kill_leaves_nothing(written, engine, model_dir, tmp_path):
    """No worker, port, segment (fixtures look) or file of the command outlives a kill -9."""
    model = {"urls": [engine.url], "tokenizer": str(model_dir)}
    own = {"env": {"id": f"{ENVS}Recorded"}, "model": model, "arena": {"backing": "memfd", "capacity": "8MiB"}}
    file = written({**MINE, "own": {"environment_servers": {"shmrl": own}}})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shmrl", "env-server", str(file)),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    while b"the head is at" not in (line := await process.stderr.readline()):
        assert line
    process.kill()
    await process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


async def test_the_command_refuses_without_a_traceback(written):
    file = written({"turn": {"environment_servers": {"single_agent_turn": {"entrypoint": "app.py"}}}})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shmrl", "env-server", str(file)), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert "Traceback" not in said.decode()
    assert (
        f"shmrl: error: {file}:1: turn.environment_servers.single_agent_turn: resources_server: missing"
        in said.decode()
    )
