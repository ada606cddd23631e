"""The server as a process: ports, signals, its own arena, sidecars; nothing of it stays."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shmrl.arena import Arena
from shmrl.config import EnvServerConfig, dump_toml
from shmrl.env import EnvServer, serve_sidecar
from shmrl.env.client import EnvClient
from shmrl.errors import ConfigError, EnvError, PortInUse, ProcessFailed, ServerDied, TasksetError
from shmrl.node import fetch
from shmrl.node.client import Client
from shmrl.payload.header import read_header
from shmrl.types import Task
from tests.env.conftest import rollout, server_config, serving, until
from tests.env.environments import Echo, Positional, Remembering

ENVS = "tests.env.environments:"
TOKEN = "0123456789abcdef" * 2


@contextmanager
def server_process(tmp_path, config, **popen):
    """`shmrl env-server` and the address it says it serves."""
    file = tmp_path / "env.toml"
    file.write_text(dump_toml(config))
    command = [sys.executable, "-m", "shmrl", "env-server", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **popen) as process:
        try:
            for line in process.stderr:
                if found := re.search(r"Serving (\S+) \(up to (\d+) concurrent sessions\)", line):
                    yield process, found[1]
                    break
            else:
                pytest.fail("the server did not say that it serves")
        finally:
            process.kill()


async def test_facts(hosted, arena):
    async with hosted("reverse-text", workers=2) as (client, _):
        await until_ready(client, 2)
        info = await client.info()
        assert (info["name"], info["env_id"], info["split"], info["workers"]) == ("test", "reverse-text", "train", 2)
        assert (info["arena"], info["node"], info["max_concurrent"]) == (arena.address, None, 1024)
        assert (info["fields"], info["demonstrates"], info["scores_groups"]) == (
            ["routing", "head", "mask"],
            True,
            False,
        )
        health = await client.health()
        assert (health["alive"], health["ready"], health["workers"], health["lagging"]) == (True, 2, 2, 0)
        assert health["arena"] == {"blocks": 0, "used_bytes": 0, "capacity_bytes": 32 << 20}
        assert health["rss_bytes"] > 50 << 20


async def until_ready(client, n):
    async with asyncio.timeout(30):
        while (await client.health())["ready"] < n:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_server_without_an_arena_makes_one_and_removes_it():
    async with serving(server_config(None, ENVS + "Echo")) as (client, _):
        address = (await client.info())["arena"]
        Arena.attach(address).close()
    with pytest.raises(Exception, match=address.partition(":")[2][:8]):
        Arena.attach(address)


async def test_blocks_of_a_server_with_an_arena_of_its_own_are_fetched_from_elsewhere(arena, spec, monkeypatch):
    monkeypatch.setenv("SHMRL_TOKEN", TOKEN)
    config = server_config(None, "reverse-text", serve={"http": "127.0.0.1:0"})
    async with serving(config, TOKEN) as (client, _):
        info = await client.info()
        (task,) = await client.tasks("train", 0, 1)
        (sample,) = (await rollout(client, task, spec())).samples
        assert {handle.origin for handle in sample.handles} == {info["origin"]}
        nodes = {info["origin"]: info["node"]}
        copies = await asyncio.to_thread(fetch, arena, sample.handles, nodes, token=TOKEN)
        assert read_header(arena, copies[0]).meta["source"] == "test"
        with Client(TOKEN) as owner:
            await asyncio.to_thread(owner.call, info["node"], "blocks/adopt", handles=list(sample.handles))
            freed = await asyncio.to_thread(owner.call, info["node"], "blocks/free", handles=list(sample.handles))
        assert freed == len(copies)
        assert (await client.health())["arena"]["blocks"] == 0


async def test_blocks_are_not_served_without_a_token(monkeypatch):
    monkeypatch.delenv("SHMRL_TOKEN", raising=False)
    config = server_config(None, ENVS + "Echo", serve={"http": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match=r"serve\.http needs a token"):
        await EnvServer(config.env.id, None, config=config).run()


async def test_an_address_that_others_can_reach_needs_a_token(arena):
    config = server_config(arena.address, ENVS + "Echo", serve={"address": "tcp://0.0.0.0:0"})
    with pytest.raises(ConfigError, match=r"tcp://0\.0\.0\.0:0 can be reached from elsewhere"):
        await EnvServer(config.env.id, None, "tcp://0.0.0.0:0", config=config).run()


async def test_servers_on_port_0_do_not_meet(arena):
    servers = [EnvServer(ENVS + "Echo", config=server_config(arena.address, ENVS + "Echo")) for _ in range(32)]
    sockets = [server._bind() for server in servers]
    assert len({server.address for server in servers}) == 32
    for server, bound in zip(servers, sockets, strict=True):
        bound.close(linger=0)
        server._context.term()


async def test_a_port_in_use_is_named_with_its_holder(arena):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EnvServer("reverse-text", None, f"tcp://127.0.0.1:{port}")
        with pytest.raises(PortInUse) as refused:
            await server.run()
    said = str(refused.value)
    assert said.startswith(f"serve.address = 'tcp://127.0.0.1:{port}': port {port} ")
    assert re.search(rf"is in use by .*pid {os.getpid()}\); free now: --serve\.address tcp://127\.0\.0\.1:\d+", said)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_signal_leaves_nothing(tmp_path, arena, spec, engine, how):
    config = server_config(arena.address, ENVS + "Echo", workers=2)
    with server_process(tmp_path, config) as (process, address):
        client = EnvClient(address)
        await client.connect(60)
        await until_ready(client, 2)
        (task,) = await client.tasks("train", 0, 1)
        await rollout(client, task, spec())
        engine.open.clear()
        flying = asyncio.create_task(rollout(client, task, spec(), 1))
        await until(lambda: engine.running == 1)
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        process.send_signal(how)
        code = await asyncio.to_thread(process.wait, 15)
        assert code == (-9 if how == signal.SIGKILL else 128 + how)
        if how == signal.SIGKILL:
            with pytest.raises(ServerDied, match="exited, was silent for too long, or its connection broke"):
                await flying
        else:
            assert (await flying).error.type == "Cancelled"
        await until(lambda: not any(alive(worker) for worker in workers))
        await client.close()
        arena.discard("run")
        arena.sweep()
        assert arena.stats()["blocks"] == 0


async def test_a_killed_server_takes_its_own_arena_along(tmp_path):
    """Its workers remove it; while it lives, one that ends leaves it where it is."""
    config = server_config(None, ENVS + "Echo", workers=2)
    with server_process(tmp_path, config) as (process, address):
        client = EnvClient(address)
        await client.connect(60)
        await until_ready(client, 2)
        made = (await client.info())["arena"]
        workers = psutil.Process(process.pid).children()
        workers[0].kill()
        await until(lambda: not alive(workers[0]))
        Arena.attach(made).close()
        process.kill()
        await asyncio.to_thread(process.wait, 15)
        await until(lambda: not (alive(workers[1]) or any(made[4:] in one.name for one in Path("/dev/shm").iterdir())))
        await client.close()


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_server_that_is_not_there_is_waited_for_and_then_given_up(free_port):
    client = EnvClient(f"tcp://127.0.0.1:{free_port}")
    with pytest.raises(ServerDied, match="not ready after 1 s"):
        await client.connect(1)
    await client.close()
    with pytest.raises(ServerDied, match="the client was closed"):
        await client.health()


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_sidecar_serves_for_a_block_of_code(spec):
    async with serve_sidecar("reverse-text", {"seed": 4}) as client:
        (task,) = await client.tasks("eval", 0, 1)
        result = await rollout(client, task, spec(), keep="eval")
        assert result.success, result.error
        assert result.messages[0]["content"] == task.data["text"]


async def test_a_sidecar_that_cannot_serve_says_why():
    with pytest.raises(TasksetError, match="the data set moved to the moon"):
        async with serve_sidecar(ENVS + "RaisingTasks"):
            pass
    with pytest.raises((ProcessFailed, TasksetError)):
        async with serve_sidecar("no-such-environment"):
            pass


async def test_a_sidecar_ends_with_its_parent(tmp_path):
    script = (
        "import asyncio\n"
        "from shmrl.env import serve_sidecar\n"
        "async def main():\n"
        "    async with serve_sidecar('reverse-text') as client:\n"
        "        print((await client.health())['pids'], flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:  # noqa: ASYNC220
        line = await asyncio.to_thread(parent.stdout.readline)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) >= 2, line
        parent.kill()
    await until(lambda: not any(alive(process) for process in family))


async def test_an_environment_serves_itself_with_what_it_was_made_with(spec):
    env = Remembering("ab", times=2, more=[1])
    client = await env.start_server()
    try:
        assert (await client.tasks("train", 0, 5))[0].data == {"word": "ab", "times": 2, "more": [1]}
        async with EnvClient(client.address, client.token) as other:
            assert (await other.info())["env_id"] == "tests.env.environments:Remembering"
        with pytest.raises(EnvError, match="serves already"):
            await env.start_server()
    finally:
        await env.stop_server()
    with pytest.raises(ServerDied, match="the client was closed"):
        await client.health()
    await env.stop_server()


async def test_what_cannot_be_made_again_elsewhere_does_not_serve():
    class Local(Echo):
        pass

    with pytest.raises(EnvError, match=r"Local of tests\.env\.test_server cannot be imported"):
        await Local().start_server()
    with pytest.raises(EnvError, match="argument words has no keyword"):
        await Positional("a", "b").start_server()
    assert await Echo().stop_server() is None


async def test_the_log_of_a_server_and_its_workers_goes_to_a_file(tmp_path):
    table = {"file": str(tmp_path / "env.log"), "level": "info"}
    config = EnvServerConfig.model_validate({"env": {"id": "reverse-text"}, "log": table})
    async with serve_sidecar("tests.env.environments:Echo", config=config) as client:
        asked = {"model": {}, "group_id": "g", "seed": 0, "keep": "eval", "tag": "run/test/g/0"}
        assert not (await client.run_rollout(Task("0", {}), **asked)).success
    said = (tmp_path / "env.log").read_text()
    assert "Serving tcp://127.0.0.1:" in said
    assert "env/0 shmrl.env.worker: run_rollout failed: model: missing ['sampling', 'tokenizer', 'urls']" in said


def test_the_orchestrators_imports_stay_light():
    """The client pulls in no tokenizer, no engine and no torch."""
    heavy = ("torch", "transformers", "tokenizers", "jinja2")
    script = f"import sys, shmrl.env.client; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
