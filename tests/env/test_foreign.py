"""Workers of another interpreter: how shmrl gets there, and what is said of one that cannot run them."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shmrl.arena import Arena
from shmrl.env import foreign
from shmrl.env.server import EnvServer
from shmrl.errors import ConfigError
from tests.env.conftest import rollout, server_config

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def interpreter(tmp_path):
    """interpreter("command"): an executable that runs it in a shell."""

    def make(command):
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{command}\n")
        file.chmod(0o755)
        return file

    return make


async def test_its_workers_run_this_shmrl_from_where_it_lies(hosted, spec, arena, interpreter, tmp_path):
    """The interpreter sees its own packages and nothing of ours but shmrl itself."""
    python = interpreter(f'echo "$@" > {tmp_path}/called; unset PYTHONPATH; cd /; exec {sys.executable} "$@"')
    async with hosted("reverse-text", {"seed": 3}, serve={"python": python}) as (client, _):
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec())
        assert result.success, result.error
        assert result.samples[0].fields == ("routing", "head", "mask")
    assert str(foreign.PACKAGE) in (tmp_path / "called").read_text()
    arena.discard("run")


def test_a_file_beside_it_is_not_taken_for_one_of_its_own(tmp_path):
    """The working directory counts, as for any Python; shmrl's own directories do not."""
    (tmp_path / "mine.py").write_text("import sys, shmrl, mine2; print(sorted(map(str, sys.path)), shmrl.__file__)")
    (tmp_path / "mine2.py").touch()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        foreign.command(sys.executable, "mine"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    path, _, file = done.stdout.rstrip().rpartition(" ")
    assert file == str(foreign.PACKAGE / "__init__.py")
    assert str(foreign.PACKAGE) not in path


def test_a_worker_needs_what_is_listed_and_no_more():
    """The list is part of the project's own dependencies; the others of these are missing here."""
    needed = set(foreign.NEEDED.values())
    assert needed <= set(PROJECT["dependencies"])
    others = ["rich", "tyro", "prometheus_client", "torch", "transformers", "safetensors", "Cython"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({others!r}))\n"
        "import shmrl.env.worker, shmrl.envs.registry, shmrl.env.endpoint, shmrl.envs.verifiers.records"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f'exec {sys.executable} -S "$@"', "python -m pip install 'aiohttp>=3.10' 'jinja2>=3.1' 'msgpack>=1.0.7' 'num"),
        (f'exec {sys.executable} "$@"', "'nosuch:Env': there is no module 'nosuch' on the Python path"),
        ("echo first >&2; echo not a Python >&2; exit 3", "does not work: not a Python"),
        ("exit 3", "does not work: it exits with 3"),
        ("echo hello", "does not work: it answered 'hello'"),
        ("exec sleep 30", "did not answer within 0.5 s"),
    ],
)
def test_what_is_wrong_with_an_interpreter_is_one_sentence(interpreter, command, said):
    python = interpreter(command)
    limit_s = 0.5 if "sleep" in command else 30
    ((found,),) = foreign.problems([(python, "nosuch:Env", {})], limit_s)
    assert said in found
    assert found.startswith(f"serve.python = {str(python)!r}")
    assert "\n" not in found


def test_a_missing_interpreter_and_an_old_one(tmp_path):
    ((found,),) = foreign.problems([(tmp_path / "nothing", "reverse-text", {})])
    assert "does not run: No such file" in found
    old = f"import sys; sys.version_info = (3, 10, 1)\n{foreign._BOOT}"
    done = subprocess.run([sys.executable, "-c", old, "x", "y"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "it is Python 3.10, and shmrl needs 3.11 or later\n")


def test_several_are_asked_at_once_and_each_once(interpreter, tmp_path):
    python = interpreter(f'echo asked >> {tmp_path}/log; exec {sys.executable} "$@"')
    asked = [(python, "reverse-text", {}), (python, "reverse-text", {}), (python, "reverse-text", {"sed": 1})]
    found = foreign.problems(asked, 60)
    assert found[:2] == [[], []]
    assert "env.args.sed: ReverseText has no such argument; did you mean seed?" in found[2][0]
    assert (tmp_path / "log").read_text() == "asked\n" * 2


async def test_a_server_says_so_before_it_listens(arena, interpreter):
    config = server_config(arena.address, "reverse-text", serve={"python": interpreter("echo not here >&2; exit 1")})
    with pytest.raises(ConfigError, match="does not work: not here"):
        await EnvServer(config.env.id, config.env.args, config=config).run()
    assert Arena.attach(arena.address).close() is None


async def test_nor_does_it_listen_for_an_environment_that_is_not_there(arena):
    config = server_config(arena.address, "reverse-txt")
    with pytest.raises(ConfigError, match=r"'reverse-txt' is neither a bundled name .* did you mean reverse-text"):
        await EnvServer(config.env.id, config.env.args, config=config).run()
