"""`serve.sandbox` of an env server: it works or the server does not start; what it says; what environments get."""

import asyncio
import os

import pytest

from shmrl.config import dump_toml
from shmrl.env.client import EnvClient
from shmrl.env.server import EnvServer
from shmrl.env.sessions.server import SessionServer
from shmrl.errors import ConfigError
from tests.env.conftest import rollout, server_config
from tests.env.sessions.conftest import serving_sessions
from tests.test_cli import cli

SANDBOXED = {"sandbox": "bwrap"}


async def test_an_env_server_says_which_limits_hold_and_its_environment_has_a_sandbox(box, hosted, spec, caplog):
    caplog.set_level("INFO")
    async with hosted("code-exec", {"tests": 2}, serve=SANDBOXED) as (client, _):
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec(max_tokens=4), keep="eval")
    assert f"sandbox: {box.active()}" in caplog.messages
    assert (result.success, result.reward, result.stop_reason) == (True, 0.0, "done")
    assert len(result.messages[-1]["content"].splitlines()) == 2


async def test_a_session_has_the_sandbox_too(box):
    async with serving_sessions("code-exec", {"tests": 2}, **SANDBOXED) as client:
        socket = await client.open()
        _, first = await socket.ask("reset", {"seed": 5})
        assert "Write a Python program" in str(first["observation"])
        _, answer = await socket.ask("step", {"message": "import os; print(os.getpid())"})
        assert (answer["reward"], answer["done"], "wrong" in str(answer["observation"])) == (0.0, True, True)


async def test_without_a_sandbox_an_environment_that_needs_one_does_not_load():
    config = server_config(None, "code-exec")
    server = EnvServer("code-exec", config=config)
    with pytest.raises(ConfigError, match=r"^code-exec runs what a model wrote: set serve\.sandbox = 'bwrap'$"):
        await server.run()
    assert not server.bound.is_set()
    sessions = server_config(None, "code-exec", serve={"http": "127.0.0.1:0", "protocols": ["openenv"]})
    with pytest.raises(ConfigError, match=r"set serve\.sandbox = 'bwrap'"):
        await SessionServer(sessions).run()


async def test_another_environment_that_asks_for_a_sandbox_is_one_line_without_a_traceback(capfd):
    """It says so itself, in its worker; the server ends with that, and so does who waits for it."""
    config = server_config(None, "tests.env.environments:Boxed")
    server = EnvServer(config.env.id, config=config)
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    client = EnvClient(server.address)
    for awaited in (client.connect(60), running):
        with pytest.raises(ConfigError, match=r"^this environment executes what the model writes: set serve\.sandbox"):
            await awaited
    await client.close()
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_a_server_without_bwrap_refuses_to_start(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    config = server_config(None, "code-exec", serve=SANDBOXED)
    with pytest.raises(ConfigError, match="bubblewrap is not installed: apt-get install -y bubblewrap"):
        await EnvServer("code-exec", config=config).run()


def test_the_commands_refusal_is_a_line_and_exit_code_2(tmp_path):
    file = tmp_path / "env.toml"
    file.write_text(dump_toml(server_config(None, "code-exec", serve=SANDBOXED)))
    done = cli("env-server", file, env={**os.environ, "PATH": str(tmp_path)})
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "apt-get install -y bubblewrap" in done.stderr
