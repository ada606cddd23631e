"""`serve.sandbox` of an env server: it works or the server does not start; what it says; what environments get."""

import os

import pytest

from shmrl.config import dump_toml
from shmrl.env.server import EnvServer
from shmrl.errors import ConfigError, TasksetError
from tests.env.conftest import rollout, server_config, serving
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
    with pytest.raises(TasksetError, match=r"set serve\.sandbox = 'bwrap'"):
        async with serving(server_config(None, "code-exec")):
            pass


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
