"""The README's Python is run as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

from shmrl.env.chat import chat_format
from shmrl.env.model import ModelSpec, ScriptedModel
from shmrl.envs.registry import load
from tests.support.model_dir import write_model_dir
from tests.support.runs import free_ports

README = Path(__file__).parents[1] / "README.md"


def run(code, cwd=None):
    """What `code` prints, in a process of its own that sees this checkout."""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(README.parent)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_arena_in_another_trainer():
    echo, *_, trainer, rank = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "class Echo(Environment)" in echo
    assert run(trainer) == "(100, 4, 2) 99\n"
    assert run(rank) == "3192 0\n"


def test_an_environment_of_your_own(tmp_path):
    echo, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "my_module.py").write_text(echo)
    code = (
        "import asyncio; from shmrl.envs.registry import load; from types import SimpleNamespace as Model\n"
        "async def chat_text(messages): return messages[0]['content']\n"
        "echo = load('my_module:Echo', {}); task = echo.tasks('train')[3]\n"
        "print(asyncio.run(echo.rollout(task, Model(chat_text=chat_text))).reward)"
    )
    assert run(code, cwd=tmp_path) == "1.0\n"


def test_an_environment_is_served_from_python(tmp_path):
    echo, script, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "my_module.py").write_text(echo)
    assert run(script, cwd=tmp_path) == "1 5\n"


async def test_an_environment_with_a_tool(tmp_path, monkeypatch):
    """Its demonstration, played by the model of the warm-up, is a call and then an answer, which is right."""
    _, _, adder, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "my_tools.py").write_text(adder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    env = load("my_tools:Adder", {})
    task = env.tasks("train")[3]
    directory = str(write_model_dir(tmp_path))
    spec = ModelSpec(("http://nowhere",), directory, {"max_tokens": 200})
    model = ScriptedModel(spec, chat_format(directory), lambda messages: env.demonstrate(task, messages))
    episode = await env.rollout(task, model)
    (branch,) = model.branches({})
    assert (episode.reward, model.turns) == (1.0, 2)
    assert [one["role"] for one in branch.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_program_that_a_model_wrote(box):
    _, _, _, program, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert run(program) == "True 42 None\n"


def test_hosting_sessions():
    """The script hosts; the one-line check, in a process of its own, reaches it."""
    text = README.read_text()
    _, _, _, _, script, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    check = re.search(r'python -c "(import asyncio; from shmrl.env.*)"', text)[1]
    port = str(free_ports(1))
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", script.replace("8100", port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as host:
        assert host.stdout.readline() == f"serving http://127.0.0.1:{port}, enter stops it\n"
        assert run(check.replace("8100", port)).startswith(f"http://127.0.0.1:{port}: ok, ")
        host.communicate("\n", timeout=20)
    assert host.returncode == 0
