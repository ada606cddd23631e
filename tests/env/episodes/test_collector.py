"""The stock collector of NeMo Gym 0.7 against our servers. `.ci/run clients` makes its environment; by hand, set
SHMRL_NEMO_GYM_PYTHON."""

import asyncio
import json
import os
import socket
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import pytest

from shmrl import Arena
from shmrl.config.gym import SERVER_TYPES
from shmrl.env.episodes.wire import FAILURE_KINDS, Stage
from tests.env.conftest import until
from tests.env.episodes.conftest import DATA, episode, nesting
from tests.env.episodes.stub import RESPONSE
from tests.env.episodes.test_legacy import recorded_calls

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


async def gym(*command, cwd, stdin=""):
    """What a program of Gym's environment printed; it must succeed."""
    python = os.environ.get("SHMRL_NEMO_GYM_PYTHON")
    if python is None:
        pytest.skip("SHMRL_NEMO_GYM_PYTHON is not set")
    program = [str(Path(python).with_name("gym"))] if command[0] != "python" else [python]
    process = await asyncio.create_subprocess_exec(
        *program,
        *(command[1:] if command[0] == "python" else command),
        cwd=cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate(stdin.encode())
    assert process.returncode == 0, out.decode()[-3000:]
    return out.decode()


def head_of(client):
    """Where the head is, as Gym is told."""
    host, _, port = client.host.head_url.removeprefix("http://").partition(":")
    return f"+head_server.host={host}", f"+head_server.port={port}"


async def collect(client, directory, rows, *more):
    """(results, failures, what was printed) of `gym eval run` over these rows, each twice."""
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    out = await gym(
        *("eval", "run", "--no-serve", *more, *head_of(client), "--input", "rows.jsonl", "--output", "out.jsonl"),
        *("--num-repeats", "2", "--concurrency", "4"),
        cwd=directory,
    )
    found = []
    for name in ("out.jsonl", "out_failures.jsonl"):
        path = directory / name
        found.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
    return *found, out


@asynccontextmanager
async def cutting(port, runs):
    """A proxy in front of `port` that breaks the first connection of every `/run`, when its episode has begun (`runs`
    has one more).

    Yields (its port, the list of what it has broken).
    """
    broken = []
    tasks = set()

    async def pass_on(reader, writer):
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        head = await reader.read(1 << 16)
        there, to = await asyncio.open_connection("127.0.0.1", port)
        to.write(head)
        await to.drain()
        if head.startswith(b"POST /run"):
            while b"\r\n\r\n" not in head or not head.rstrip().endswith(b"}"):
                more = await reader.read(1 << 16)
                head += more
                to.write(more)
            body = head.partition(b"\r\n\r\n")[2]
            if body not in broken:
                broken.append(body)
                await to.drain()
                await until(lambda: len(runs()) >= len(broken))
                to.close()
                writer.transport.abort()
                return
        await asyncio.gather(pass_on(reader, to), pass_on(there, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], broken
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_collector_gets_results_and_handled_failures(own, tmp_path):
    rows = [json.loads(line) for line in (DATA / "rows.jsonl").read_text().splitlines()]
    (tmp_path / "routes.yaml").write_text((DATA / "cfg.yaml").read_text())
    async with own(serve="lease_s = 3") as client:
        front = client.host.fronts["shmrl_env"]
        async with cutting(int(front.url.rpartition(":")[2]), client.runs) as (port, broken):
            client.host.nesting.instances["shmrl_env"].block["port"] = port
            results, failures, out = await collect(
                client, tmp_path, rows, "--config", "routes.yaml", "+environment_routing_mode=taskset"
            )
        assert [(one["_ng_task_id"]["task_id"], one["reward"]) for one in results] == 2 * [("t-ok", 1.0)]
        assert {one["_ng_environment_server"] for one in results} == {"shmrl_env"}
        assert {one["_ng_result_type"] for one in results} == {"shmrl"}
        assert len(failures) == 2
        for failure in failures:
            assert failure["_ng_task_id"]["task_id"] == "t-fail"
            assert failure["_ng_failure_class"] == "environment_server_failed"
            assert failure["_ng_failure_stage"] == "agent"
            assert failure["_ng_failure_terminal"] is False
            assert "sandbox died" in failure["_ng_failure_message"]
        # its connections broke, it asked again, and nothing ran twice
        assert len(broken) == 4
        assert sorted(client.runs()) == ["t-fail", "t-fail", "t-ok", "t-ok"]
        metrics = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
        assert "mean/reward" in json.dumps(metrics)
        with Arena.attach(results[0]["shmrl_payload"]["arena"]) as arena:
            await until(lambda: arena.stats()["blocks"] == 0)  # the leases of what the collector wrote down
        print(out[-1500:])


async def test_gym_env_status_lists_it(own, tmp_path):
    async with own() as client:
        out = await gym("env", "status", *head_of(client), cwd=tmp_path)
        print(out)
        assert "✓ shmrl_env (environment_servers/shmrl)" in out
        assert "1 servers found (1 healthy, 0 unhealthy)" in out


async def test_rows_of_an_agent_are_collected_over_a_relay(turns, stub, tmp_path):
    rows = [{"responses_create_params": {"input": "hi"}, "agent_ref": {"name": "agent"}, "task_source": "weather"}]
    async with turns("legacy_agent") as client:
        results, failures, _ = await collect(client, tmp_path, rows)
        assert not failures
        assert [one["reward"] for one in results] == [0.5, 0.5]
        assert stub.paths.count("/run") == 2


async def test_single_turns_are_collected(turns, stub, tmp_path):
    task = {"task_id": {"taskset": "stub:weather", "task_id": "0"}}
    rows = [{**task, "task_input": {"responses_create_params": {"input": "hi"}, "task_data": {"city": "SF"}}}]
    (tmp_path / "routes.yaml").write_text('environment_server_routes: {"stub:weather": turn}\n')
    async with turns() as client:
        results, failures, _ = await collect(
            client, tmp_path, rows, "--config", "routes.yaml", "+environment_routing_mode=taskset"
        )
        assert not failures
        assert [(one["reward"], one["city"]) for one in results] == 2 * [(1.0, "SF")]
        assert stub.closed
        assert sorted(stub.closed) == sorted(stub.opened)


@asynccontextmanager
async def gyms_own(tree, directory, *names):
    """Servers of Gym's own, of a nesting: as Gym starts them, without Ray."""
    python = os.environ.get("SHMRL_NEMO_GYM_PYTHON")
    if python is None:
        pytest.skip("SHMRL_NEMO_GYM_PYTHON is not set")
    where = await gym("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory)
    (site,) = where.split()
    text, processes = json.dumps({**tree, "dry_run": False}), []
    try:
        for name in names:
            ((kind, group),) = tree[name].items()
            process = await asyncio.create_subprocess_exec(
                *(python, "app.py"),
                cwd=Path(site) / kind / next(iter(group)),
                env={**os.environ, "NEMO_GYM_CONFIG_DICT": text, "NEMO_GYM_CONFIG_PATH": name},
                stderr=asyncio.subprocess.STDOUT,
                stdout=asyncio.subprocess.PIPE,
            )
            processes.append(process)
        for process in processes:
            while b"Uvicorn running" not in (line := await process.stdout.readline()):
                assert line, "a server of Gym ended"
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await process.communicate()


def calls_a_tool(body):
    """A model that calls the tool once, and then says what it learned."""
    if any(item.get("type") == "function_call_output" for item in body["input"]):
        return RESPONSE
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather", "status": "completed"}
    return {**RESPONSE, "output": [{**call, "arguments": '{"city": "SF"}'}]}


async def test_gyms_own_resources_and_agent_behind_a_single_turn(stub, hosted, tmp_path):
    """Gym's example with its weather tool: its sessions, signed cookies, tool access and verdict."""
    tree = nesting(stub, resources_tool_transports=["direct_http"])
    weather, agent = (tree["weather"]["resources_servers"], tree["agent"]["responses_api_agents"])
    weather["example_single_tool_call"] = weather.pop("example") | {"port": free_port()}
    agent["simple_agent"] |= {
        "port": free_port(),
        "resources_server": {"type": "resources_servers", "name": "weather"},
        "model_server": {"type": "responses_api_models", "name": "model"},
    }
    there = {"entrypoint": "app.py", "host": "127.0.0.1", "port": stub.ports[0]}
    tree["model"] = {"responses_api_models": {"openai_model": there}}
    stub.on["/v1/responses"] = calls_a_tool
    request = next(body for path, body, status, _ in recorded_calls() if path == "/run" and status == 200)
    async with gyms_own(tree, tmp_path, "weather", "agent"), hosted(tree) as client:
        result = (await client.run(request))["result"]
        assert result["reward"] == 1.0
        kinds = [item["type"] for item in result["response"]["output"]]
        assert kinds == ["function_call", "function_call_output", "message"]
        assert "is cold" in result["response"]["output"][1]["output"]
        for call in ("/seed_session", "/v1/agent_sessions", "/v1/responses", "/verify", "/close_session"):
            assert await client.count(f'shmrl_server_calls_total{{outcome="200",route="{call}"') == 1
        out = await gym("env", "status", *head_of(client), cwd=tmp_path)
        print(out)
        assert "4 servers found (4 healthy, 0 unhealthy)" in out
        stub.on["/v1/responses"] = 500
        request["episode_id"]["attempt"] = 1
        failure = (await client.run(request))["failure"]
        assert (failure["stage"], failure["terminal"]) == ("agent", False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_the_list_of_types_is_the_installed_ones(turns, stub, tmp_path):
    """And so are its words for failures; its models accept our answers."""
    async with turns() as client:
        answers = [await client.run(episode("0-0", responses_create_params={"input": "hi"}))]
        stub.on["/verify"] = 503
        answers.append(await client.run(episode("0-1", responses_create_params={"input": "hi"})))
        answers[1]["failure"].pop("partial_response")  # of the single turn's own model
    lines = "\n".join(map(json.dumps, answers))
    out = await gym("python", str(Path(__file__).with_name("gym_facts.py")), cwd=tmp_path, stdin=lines)
    facts = json.loads(out.splitlines()[-1])
    print(f"nemo_gym {facts['version']}: {', '.join(facts['server_types'])}")
    assert facts["version"].startswith("0.7")
    assert sorted(facts["server_types"]) == sorted(facts["telemetry_types"]) == sorted(SERVER_TYPES)
    assert facts["failure_kinds"] == sorted(FAILURE_KINDS)
    assert facts["stages"] == list(get_args(Stage))
