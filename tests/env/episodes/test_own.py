"""An environment of shmrl behind `/run`: the recorded requests, results with handles and their leases, failures."""

import asyncio
import json
from dataclasses import replace

import pytest

from shmrl import Arena, assemble, pack
from shmrl.config import dump_toml, load_env_server
from shmrl.env.client import EnvClient
from shmrl.env.episodes import episodes
from shmrl.env.episodes.leases import samples_of
from shmrl.env.episodes.plan import planned
from shmrl.env.episodes.wire import FAILURE_KINDS
from shmrl.errors import ConfigError, TasksetError, WorkerDied
from shmrl.node import fetch
from tests.env.conftest import until
from tests.env.episodes.conftest import DATA, ENVS, episode


def recorded():
    """What the collector of NeMo Gym 0.7 sent to a foreign environment server, and what it made of the answers."""
    lines = (DATA / "foreign_env_server_requests.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def test_the_recorded_requests_are_answered_as_recorded(own):
    async with own() as client:
        told = []
        for request in recorded():
            headers = {key: value for key, value in request["headers"].items() if key in ("Content-Type", "User-Agent")}
            if request["m"] == "GET":
                status, answer = await client.head(request["path"])
                assert "environment_servers:" in answer
            else:
                status, answer = await client.post(request["path"], request["body"], headers=headers)
            assert status == 200
            if request["path"] == "/run":
                body = request["body"]
                assert answer["episode_id"] == body["episode_id"]
                assert answer["task_id"] == body["task"]["task_id"]
                assert ("result" in answer) != ("failure" in answer)
                told.append(answer.get("result") or answer["failure"])
            if request["path"] == "/aggregate_metrics":
                assert answer["agent_metrics"]["mean/reward"] == 1.0
                assert answer["group_level_metrics"][0]["_ng_task_index"] == 0
        rows = [json.loads(line) for line in (DATA / "foreign_env_server_out.jsonl").read_text().splitlines()]
        failures = [json.loads(line) for line in (DATA / "out_failures.jsonl").read_text().splitlines()]
        assert [result["reward"] for result in told[:2]] == [row["reward"] for row in rows] == [1.0, 1.0]
        assert all(row["responses_create_params"] == told[0]["responses_create_params"] for row in rows)
        for failure, row in zip(told[2:], failures, strict=True):
            assert row["_ng_failure_message"] in failure["failure_reason"]
            assert failure["terminal"] == row["_ng_failure_terminal"]
            assert failure["stage"] == "agent"  # the recorded server called it seed; here a model may have been asked
            kind = failure["failure_kind"]
            assert kind in FAILURE_KINDS or kind == "shmrl:env_error"
        assert client.runs() == ["t-ok", "t-ok", "t-fail", "t-fail"]


async def test_a_replayed_request_does_not_run_twice(own):
    async with own() as client:
        body = episode("0-0", "t-ok", task_data={"answer": "abc"})
        first, second = await asyncio.gather(client.run(body), client.run(body))
        assert first == second == await client.run(body)
        assert client.runs() == ["t-ok"]


async def test_a_result_refers_to_arrays_until_its_lease_ends(own):
    async with own(serve="lease_s = 0.5") as client:
        result = (await client.run(episode(task="t-ok", task_data={"answer": "abc"})))["result"]
        assert (result["reward"], result["rewards"], result["metrics"]) == (1.0, {"exact": 1.0}, {"length": 3.0})
        payload = result["shmrl_payload"]
        assert payload["lease_s"] == 0.5
        (sample,) = samples_of(payload)
        assert sample.fields == ("routing",)
        with Arena.attach(payload["arena"]) as arena:
            (batches,) = pack([sample], seq_len=512, num_ranks=1)
            batch = assemble(arena, batches[0])
            assert batch.routing.shape[0] == sample.T
            assert batch.loss_mask.sum() == sample.S
            await until(lambda: arena.stats()["blocks"] == 0)
        assert await client.count("shmrl_leased_blocks") == 0


async def test_what_somebody_adopted_outlives_its_lease(own):
    async with own(serve="lease_s = 0.3") as client:
        result = (await client.run(episode(task="t-ok", task_data={"answer": "abc"})))["result"]
        (sample,) = samples_of(result["shmrl_payload"])
        with Arena.attach(result["shmrl_payload"]["arena"]) as arena:
            arena.adopt(sample.handles)
            await client.counted("shmrl_leased_blocks", 0)
            arena.get(sample.handles[0]).release()
            assert arena.free(sample.handles) == 1


async def test_another_host_fetches_the_blocks(own, monkeypatch):
    token = "0123456789abcdef0123456789abcdef"
    monkeypatch.setenv("SHMRL_TOKEN", token)
    async with own(gym='blocks = "127.0.0.1:0"') as client:
        payload = (await client.run(episode(task="t-ok", task_data={"answer": "abc"})))["result"]["shmrl_payload"]
        (sample,) = samples_of(payload)
        nodes = {sample.handles[0].origin: payload["node"]}
        with Arena.create(capacity="8MiB") as here:
            copies = await asyncio.to_thread(fetch, here, sample.handles, nodes, token=token)
            moved = replace(sample, segments=((copies[0], *sample.segments[0][1:]),))
            (batches,) = pack([moved], seq_len=512, num_ranks=1)
            assert assemble(here, batches[0]).routing.shape[0] == sample.T
            here.free(copies)
            here.unlink()


async def test_a_server_whose_workers_keep_dying_ends(own):
    async def serve():
        async with own(serve="restart_budget = 0") as client:
            failure = (await client.run(episode(task="t-dead", task_data={"answer": "abc"})))["failure"]
            assert failure["failure_kind"] in ("kill_shaped", "shutdown")

    with pytest.raises(WorkerDied, match="restart_budget is 0"):
        await serve()


async def test_tasks_of_the_environments_own_by_number_and_evaluation_with_its_text(own):
    async with own() as client:
        answer = await client.run(episode(task="3", taskset="shmrl_env:train"))
        assert "response" not in answer["result"]
        answer = await client.run(episode(task="2", taskset="shmrl_env:eval"))
        assert client.runs() == ["train-3", "eval-2"]
        assert "shmrl_payload" not in answer["result"]
        (message,) = answer["result"]["response"]["output"]
        assert message["role"] == "assistant"
        assert message["content"][0]["type"] == "output_text"
        for task in ("9", "none"):
            failure = (await client.run(episode(task=task, taskset="shmrl_env:eval")))["failure"]
            assert (failure["stage"], failure["terminal"]) == ("seed", True)


async def test_the_requests_sampling_wins(own, engine):
    async with own() as client:
        params = {"temperature": 0.5, "max_output_tokens": 3, "top_p": None}
        answer = await client.run(episode(task="t-ok", task_data={"answer": "abc"}, responses_create_params=params))
        assert answer["result"]["num_tokens"] <= 3
        assert answer["result"]["responses_create_params"] == params
        bad = {"temperature": -1.0}
        answer = await client.run(episode("0-1", task="t-ok", task_data={"answer": "abc"}, responses_create_params=bad))
        assert answer["failure"]["stage"] == "seed"
        assert "temperature" in answer["failure"]["failure_reason"]


async def test_how_an_environment_fails(own):
    kinds = {"t-fail": ("shmrl:env_error", False), "t-bug": ("agent_run_error", True), "t-dead": ("kill_shaped", False)}
    async with own() as client:
        for number, (task, expected) in enumerate(kinds.items()):
            failure = (await client.run(episode(f"{number}-0", task, task_data={"answer": "abc"})))["failure"]
            assert (failure["failure_kind"], failure["terminal"]) == expected
            assert failure["stage"] == "agent"
        answer = await client.run(episode("9-0", task="t-ok", task_data={"answer": "abc"}))
        assert answer["result"]["reward"] == 1.0  # a worker that died is replaced


@pytest.mark.parametrize("data", ['{"n": 1180591620717411303424}', '{"text": "\\ud800"}', "[" * 900 + "]" * 900])
async def test_a_task_that_cannot_be_sent_is_a_failure_and_the_next_one_runs(own, data):
    async with own() as client:
        raw = json.dumps(episode(task_data="DATA", task="odd")).replace('"DATA"', f'{{"answer": {data}}}')
        status, answer = await client.post("/run", raw.encode())
        assert status == 422 or answer["failure"]["terminal"] is True
        answer = await client.run(episode("0-1", task="t-ok", task_data={"answer": "abc"}))
        assert answer["result"]["reward"] == 1.0


@pytest.mark.parametrize("data", [5, "text", [1]])
async def test_task_data_that_is_no_map_is_said(own, data):
    async with own() as client:
        failure = (await client.run(episode(task="odd", task_data=data)))["failure"]
    assert (failure["stage"], failure["terminal"]) == ("seed", True)
    assert failure["failure_reason"] == f"task_input.task_data is a {type(data).__name__}, not a map"


async def test_a_model_directory_that_is_none_is_refused_at_the_start(own, tmp_path):
    for text, said in ((None, "tokenizer.json: No such file or directory"), ("{", "tokenizer.json cannot be read: ")):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError) as refused:
            async with own(model=tmp_path):
                pass
        assert f"shmrl_env.environment_servers.shmrl: model.tokenizer: {tmp_path}: {said}" in str(refused.value)


async def test_an_engine_that_is_not_there_may_come_back(own, engine):
    async with own(gym="default_episode_timeout_seconds = 1.0") as client:
        await engine.stop()
        failure = (await client.run(episode(task="t-ok", task_data={"answer": "abc"})))["failure"]
        assert (failure["stage"], failure["terminal"]) == ("agent", False)


async def test_a_client_that_leaves_cancels_its_episode(own, monkeypatch):
    monkeypatch.setattr(episodes, "ABANDONED_S", 0.0)
    gym = "max_concurrent_episodes = 1\nqueue_timeout_seconds = 20"
    async with own(gym=gym) as client:
        asking = asyncio.create_task(client.run(episode(task="t-hang", task_data={"answer": "abc"})))
        await until(lambda: client.runs() == ["t-hang"])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        answer = await client.run(episode("0-1", task="t-ok", task_data={"answer": "abc"}))  # gets its place
        assert answer["result"]["reward"] == 1.0


async def test_the_native_protocol_beside_it(own):
    async with own(serve='address = "tcp://127.0.0.1:0"') as client:
        server = client.host.fronts["shmrl_env"].protocol._server
        async with EnvClient(server.address) as native:
            assert (await native.info())["env_id"] == f"{ENVS}Recorded"


async def test_an_environment_that_cannot_load_ends_the_server(own):
    with pytest.raises(TasksetError, match="moved to the moon"):
        async with own("tests.env.environments:RaisingTasks", {}):
            pass


def test_the_file_of_an_own_environment_means_the_same_as_its_block(tmp_path, model_dir):
    file = tmp_path / "env.toml"
    file.write_text(f"""
name = "rev"
[env]
id = "reverse-text"
[serve]
http = "127.0.0.1:11051"
protocols = ["gym"]
token = "not-for-the-head"
pool.workers = 2
[gym]
max_concurrent_episodes = 4
queue_timeout_seconds = 60
model = {{ urls = ["http://127.0.0.1:8000"], tokenizer = "{model_dir}" }}
""")
    config = load_env_server([file])
    (hosted,) = planned([file]).hosted
    again = hosted.table.env_server_config(hosted.instance, planned([file]).nesting)
    assert dump_toml(again) == dump_toml(config)
    assert hosted.token == "not-for-the-head"
    assert "not-for-the-head" not in str(planned([file]).nesting.as_dict())
