"""`resolve_env` from scripts, and the env server as a process: nothing of it stays."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from shmrl.config import EnvServerConfig, load_env_server
from shmrl.env import RemoteEnv, resolve_env, serve_sidecar
from shmrl.errors import ConfigError, ProcessFailed
from tests.env.conftest import rollout, server_config, serving, until
from tests.env.sessions.conftest import ENVS
from tests.env.test_server import alive

SCRIPT = """
from shmrl.env import resolve_env

url, server = resolve_env("my_game:make", {"high": 7, "system_prompt": "be brief"}, max_concurrent_envs=2)
print(url, flush=True)
try:
    input()
finally:
    server.stop()
"""
GAME = """
from shmrl.envs.guess_number import GuessNumber

def make(high):
    return GuessNumber(high)
"""


def hosting_script(tmp_path):
    """A script without a `__main__` guard, run from elsewhere, and the URL it prints."""
    (tmp_path / "host.py").write_text(SCRIPT)
    (tmp_path / "my_game.py").write_text(textwrap.dedent(GAME))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "host.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    )
    return process, process.stdout.readline().strip()


async def first_of(url):
    async with RemoteEnv(url).session() as session:
        return await session.reset(seed=1)


def test_a_script_without_a_main_guard_hosts_a_module_beside_it(tmp_path):
    process, url = hosting_script(tmp_path)
    with process:
        first = asyncio.run(first_of(url))
        assert first.text == "1-7"
        assert first.info == {"system_prompt": "be brief"}
        process.communicate("\n", timeout=20)
    assert process.returncode == 0


def test_a_killed_script_takes_its_server_along(tmp_path):
    process, url = hosting_script(tmp_path)
    with process:
        assert asyncio.run(first_of(url)).text == "1-7"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        process.kill()
    asyncio.run(until(lambda: not any(alive(one) for one in family)))


def test_beyond_loopback_the_url_has_a_token():
    url, server = resolve_env("guess-number", host="0.0.0.0", advertise_host="127.0.0.1", token="chosen-by-hand")
    with server:
        assert url == f"http://127.0.0.1:{server.port}/chosen-by-hand"
        assert asyncio.run(first_of(url)).text == "1-9"
        with pytest.raises(Exception, match="answers 401; the URL needs the server's token"):
            asyncio.run(first_of(url.rpartition("/")[0]))


async def test_an_env_server_of_a_url_shows_its_token_nowhere(sessions, spec, capfd):
    """Not in its log or its errors, while the other server is full or refuses its arguments, nor in process titles."""
    token = "a-token-of-16-ch"
    async with sessions("TextEcho", max_concurrent_envs=1, token=token) as client:
        url = f"{client.server.url}/{token}"
        config = EnvServerConfig(env={"url": url, "max_turns": 3})
        async with RemoteEnv(url).session(), serve_sidecar(config.env.id, config=config) as remote:
            (task,) = await remote.tasks("train", 0, 1)
            result = await rollout(remote, task, spec())
            processes = psutil.Process().children(recursive=True)
            shown = [str(await remote.info()), str(result.error), *(str(process.cmdline()) for process in processes)]
        with pytest.raises(ConfigError) as failed:
            async with serve_sidecar(config.env.id, {"no_such_argument": 1}, config=config) as remote:
                await remote.info()
    said = capfd.readouterr().err
    assert "Server at capacity: 1/1" in said
    assert "no_such_argument" in str(failed.value)
    assert any("shmrl:env-worker" in title for title in shown)
    assert [text for text in (*shown, said, str(failed.value)) if token in text] == []


def test_gems_own_factory_with_programs_in_our_sandbox(box, monkeypatch):
    """The shape of AgileRL's tutorial."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "support/fake_gem")
    arguments = {"env_id": "code:Double", "sandbox_type": "bwrap"}

    async def play(url):
        async with RemoteEnv(url).session() as session:
            await session.reset(seed=1)
            return await session.step(message="print(2 * int(input()))")

    url, server = resolve_env("gem:make", arguments, max_concurrent_envs=2)
    with server:
        answer = asyncio.run(play(url))
    assert (answer.reward, answer.done) == (1.0, True)


def test_a_url_is_somebody_elses():
    assert resolve_env("http://10.0.0.1:8000") == ("http://10.0.0.1:8000", None)


def test_what_cannot_be_configured_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"serve\.max_concurrent_envs = 0: must be greater than 0"):
        resolve_env("guess-number", max_concurrent_envs=0)
    with pytest.raises(ConfigError, match=r"serve\.idle_timeout = 5: unknown key; did you mean idle_timeout_s?"):
        resolve_env("guess-number", idle_timeout=5)


def test_what_cannot_be_hosted_fails_with_its_last_lines(capfd):
    with pytest.raises(ProcessFailed) as failed:
        resolve_env(ENVS + "Raising")
    assert "the data set moved to the moon" in failed.value.tail
    with pytest.raises(ProcessFailed) as failed:
        resolve_env("reverse-text")
    assert failed.value.code == 2
    assert "ReverseText has no reset and step" in failed.value.tail


def test_kill_9_of_the_server_leaves_no_process_not_even_in_a_step(tmp_path):
    url, server = resolve_env(ENVS + "TextEcho")

    async def hang():
        async with RemoteEnv(url).session() as session:
            stepping = asyncio.create_task(session.step(message="sleep 600"))
            await asyncio.sleep(0)
            children = psutil.Process(server._child.process.pid).children(recursive=True)
            assert len(children) == 2
            os.kill(server._child.process.pid, signal.SIGKILL)
            with pytest.raises(Exception, match="the session is lost"):
                await stepping
            await until(lambda: not any(alive(child) for child in children))

    with server:
        asyncio.run(hang())


async def test_sessions_beside_the_native_protocol(arena):
    config = server_config(
        arena.address,
        "guess-number",
        serve={"address": "tcp://127.0.0.1:0", "http": "127.0.0.1:0", "protocols": ["openenv"]},
    )
    async with serving(config) as (client, server):
        (task,) = await client.tasks("train", 0, 1)
        await server.sessions.bound.wait()
        async with RemoteEnv(server.sessions.url).session() as session:
            assert (await session.reset(seed=task.seed)).text == "1-9"


def test_a_file_with_http_and_no_address_serves_sessions_alone(tmp_path):
    file = tmp_path / "env.toml"
    file.write_text('[env]\nid = "guess-number"\n[serve]\nhttp = "127.0.0.1:0"\nprotocols = ["openenv"]\n')
    assert load_env_server([file]).serve.address is None
    command = [sys.executable, "-m", "shmrl", "env-server", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        served = next(found for line in process.stderr if (found := re.search(r"Serving (http\S+) \(up to 64 ", line)))
        assert asyncio.run(RemoteEnv(served[1]).check()).startswith(f"{served[1]}: ok, ")
        process.terminate()
        process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
