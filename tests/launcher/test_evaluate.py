"""`shmrl eval`: every rollout once, in a file that the same command completes; what it counts; what it refuses."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from shmrl.config import TinyModel, load_eval
from shmrl.env import resolve_env
from shmrl.errors import ConfigError, EngineError, ProcessFailed, RunError, TasksetError
from shmrl.launcher.evaluate import Plan, _fingerprint, _while_lives, evaluate, render, summary
from shmrl.launcher.rollout_file import Key, RolloutFile
from tests.env.conftest import model_dir, until  # noqa: F401
from tests.test_cli import cli

CONFIGS = Path(__file__).parents[2] / "configs"
ENVIRONMENT = """
import asyncio
import time
from pathlib import Path

from shmrl.env import Environment, Episode
from shmrl.types import Task


class Graded(Environment):
    def __init__(self, hang=False):
        self.hang = hang

    def tasks(self, split):
        return [Task(f"{split}-{i}", {"reward": reward}, i) for i, reward in enumerate((1.0, 0.5, None, 0.25))]

    async def rollout(self, task, model):
        await model.chat_text([{"role": "user", "content": task.id}])
        while self.hang and task.data["reward"] != 1.0:
            time.sleep(600) if self.hang == "block" else await asyncio.sleep(600)
        if task.data["reward"] is None and not Path("mended").exists():
            raise RuntimeError("no reward today")
        return Episode(task.data["reward"] or 0.0)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the environment `graded:Graded`."""
    (tmp_path / "graded.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(place, model_dir):  # noqa: F811
    """An evaluation of `Graded` with an engine that someone else runs."""
    command = [sys.executable, "-m", "tests.support.fake_engine"]
    with subprocess.Popen(command, cwd=CONFIGS.parent, stdout=subprocess.PIPE, text=True) as engine:
        url = engine.stdout.readline().strip()
        yield Plan(load_eval("graded:Graded"), url, 2, 2, 3, place / "out" / "eval.jsonl", tokenizer=model_dir)
        engine.terminate()


def rows(plan):
    return [json.loads(line) for line in plan.out.read_text().splitlines()]


def keys(plan):
    return sorted((row["source"], row["number"], row["rollout"]) for row in rows(plan))


def test_every_rollout_is_a_line_and_the_table_has_both_measures(plan, capsys):
    plan = replace(plan, sources=[*plan.sources, *load_eval("reverse-text", {"sampling.max-tokens": "8"})])
    assert evaluate(plan) == 0
    assert keys(plan) == [(name, i, k) for name in ("graded-Graded", "reverse-text") for i in (0, 1) for k in (0, 1)]
    assert len({row["seed"] for row in rows(plan)}) == 8
    assert {row["task"] for row in rows(plan)} == {"eval-0", "eval-1"}
    assert all(row["messages"][0]["role"] == "user" for row in rows(plan) if row["source"] == "reverse-text")
    header, graded, _, last = capsys.readouterr().out.splitlines()
    assert last == f"rollouts: {plan.out}"
    assert header.split() == ["source", "tasks", "rollouts", "failed", "avg@2", "pass@2"]
    assert graded.split() == ["graded-Graded", "2", "4", "0", "0.7500", "0.5000"]


def test_the_same_command_completes_a_file_that_was_cut(plan):
    evaluate(plan)
    whole = plan.out.read_bytes()
    lines = whole.splitlines(keepends=True)
    plan.out.write_bytes(b"".join(lines[:2]) + lines[2][:50])
    assert evaluate(plan) == 0
    assert plan.out.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert sorted(plan.out.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_a_server_of_someone_else_is_evaluated_by_its_url_and_its_token_is_kept_nowhere(plan, capfd):
    url, server = resolve_env("guess-number", {"high": 3}, token="a-token-of-16-ch")
    with server:
        assert url.endswith("/a-token-of-16-ch")
        sources = load_eval(f"openenv:{url}", {"env.max-turns": "2", "sampling.max-tokens": "4"})
        assert evaluate(replace(plan, sources=sources)) == 0
    assert keys(plan) == [(sources[0].name, i, k) for i in (0, 1) for k in (0, 1)]
    assert {row["messages"][0]["content"] for row in rows(plan)} == {"1-3"}
    assert sources[0].name == f"openenv-http-127.0.0.1-{server.port}"
    assert "a-token" not in "".join([*capfd.readouterr(), plan.out.read_text()])


def test_rollouts_that_failed_are_told_and_tried_again(plan, place, capsys):
    plan = replace(plan, tasks=99)
    assert evaluate(plan) == 1
    assert capsys.readouterr().out.split()[-8:-2] == ["graded-Graded", "4", "8", "2", "0.4375", "0.2500"]
    assert {row.get("where") for row in rows(plan)} == {None, "graded.py:22, in rollout"}
    assert {row.get("error") for row in rows(plan)} == {None, "RuntimeError: no reward today"}
    (place / "mended").touch()
    assert evaluate(plan) == 0
    assert capsys.readouterr().out.split()[-8:-2] == ["graded-Graded", "4", "8", "0", "0.4375", "0.2500"]
    assert len(rows(plan)) == 10


COMMON = {"model": "m", "base_seed": 0, "served": {"id": "policy", "root": "r", "version": "4"}}
DONE = {"task": "eval-1", "success": True, "reward": 1.0}


def add(path, config, number=1, **row):
    with RolloutFile(path) as file:
        file.expect(**COMMON)
        file.add(Key("reverse-text", number, 0), {**DONE, **row}, config)


def test_a_file_of_something_else_is_refused(tmp_path):
    (config,), path = load_eval("reverse-text"), tmp_path / "eval.jsonl"
    add(path, config)
    with RolloutFile(path) as file:
        file.check(config, ["eval-0", "eval-1"])
        file.check(config, ["eval-0"])  # a smaller n
        with pytest.raises(ConfigError, match="with task = 'eval-1', not 'other-1': name another file by --out"):
            file.check(config, ["other-0", "other-1"])
        with pytest.raises(ConfigError, match=r"with sampling = .*'temperature': 1\.0.* not .*'temperature': 0\.5"):
            file.check(load_eval("reverse-text", {"sampling.temperature": "0.5"})[0], ["eval-0", "eval-1"])
        file.expect(**COMMON)
        for name, value in {"model": "other", "base_seed": 7, "served": {**COMMON["served"], "version": "5"}}.items():
            with pytest.raises(ConfigError, match=rf"rollouts of reverse-text with {name} = .*, not .*: name another"):
                file.expect(**{name: value})


def test_a_file_is_of_rollouts_and_has_one_writer(tmp_path):
    with (
        RolloutFile(tmp_path / "eval.jsonl"),
        pytest.raises(ConfigError, match="in use by another evaluation"),
    ):
        RolloutFile(tmp_path / "eval.jsonl")


@pytest.mark.parametrize(
    "content", [b'{"a": 1}\n', b"my only copy", b"[" * 9999, b'{"a": 1}', b"\xff\n", b"7\n", b"\n"]
)
def test_a_file_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path, content):
    other = tmp_path / "other.jsonl"
    other.write_bytes(content)
    with pytest.raises(ConfigError, match=r"other\.jsonl, line 1, is no rollout"):
        RolloutFile(other)
    assert other.read_bytes() == content


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": ["a"]},
        {"number": "1"},
        {"number": -1},
        {"rollout": 1.5},
        {"success": 1},
        {"reward": None},
        {"reward": "1"},
        {"env": None},
        {"served": "m"},
        {"task": 3},
    ],
)
def test_a_line_with_a_value_of_another_type_is_no_rollout(tmp_path, wrong):
    path = tmp_path / "eval.jsonl"
    add(path, load_eval("reverse-text")[0], **wrong)
    with pytest.raises(ConfigError, match="line 1, is no rollout"):
        RolloutFile(path)


@pytest.mark.parametrize("missing", ["env", "sampling", "task", "served", "base_seed", "reward"])
def test_a_line_without_what_it_is_compared_by_is_no_rollout(tmp_path, missing):
    path = tmp_path / "eval.jsonl"
    add(path, load_eval("reverse-text")[0])
    row = json.loads(path.read_text())
    del row[missing]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="line 1, is no rollout"):
        RolloutFile(path)


@pytest.mark.parametrize("kept", [3, 12, 40])
def test_a_first_line_that_was_cut_short_is_removed(tmp_path, kept):
    path = tmp_path / "eval.jsonl"
    add(path, load_eval("reverse-text")[0])
    path.write_bytes(path.read_bytes()[:kept])
    with RolloutFile(path) as file:
        assert not file.rows
    assert path.read_bytes() == b""


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """The limit on a file's size stands for it: a part of the line is written, then none."""
    (config,), path = load_eval("reverse-text"), tmp_path / "eval.jsonl"
    add(path, config)
    whole, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, limits[1]))
    try:
        with pytest.raises(
            RunError, match=rf"eval\.jsonl cannot be written behind its {len(whole):,} B: File too large"
        ):
            add(path, config, number=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == whole


def test_other_weights_behind_the_same_url_and_another_seed_are_refused(plan, caplog):
    assert evaluate(plan) == 0
    caplog.clear()
    assert evaluate(plan) == 0
    assert f"nothing was run: {plan.out} had all of these 4 rollouts" in caplog.messages
    before = plan.out.read_bytes()
    with pytest.raises(ConfigError, match="with base_seed = 0, not 7: name another file by --out"):
        evaluate(replace(plan, seed=7))
    urlopen(Request(f"{plan.model}/update_weight_version", b'{"new_version": "5"}'), timeout=10).close()
    with pytest.raises(ConfigError, match=r"with served = \{.*'version': '0'\}, not \{.*'version': '5'\}"):
        evaluate(plan)
    assert plan.out.read_bytes() == before


def test_what_the_file_says_is_known_before_an_engine_starts(plan, place, monkeypatch, caplog):
    monkeypatch.setattr("shmrl.launcher.evaluate._engine", None)
    (place / "config.json").touch()
    plan = replace(plan, model=str(place))
    with RolloutFile(plan.out) as file:
        file.expect(model=plan.model, base_seed=0, served={"weights": _fingerprint(place)})
        for number, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
            row = {"task": f"eval-{number}", "success": True, "reward": 1.0}
            file.add(Key("graded-Graded", number, k), row, plan.sources[0])
    assert evaluate(plan) == 0
    assert f"nothing was run: {plan.out} had all of these 4 rollouts" in caplog.messages
    monkeypatch.setattr("shmrl.launcher.evaluate._run", None)
    with pytest.raises(ConfigError, match=r"with sampling = .*, not .*'temperature': 0\.5"):
        evaluate(replace(plan, sources=load_eval("graded:Graded", {"sampling.temperature": "0.5"})))


def test_a_directory_of_other_weights_has_another_fingerprint(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    first = _fingerprint(tmp_path)
    assert _fingerprint(tmp_path) == first
    weights.write_bytes(b"more")
    longer = _fingerprint(tmp_path)
    os.utime(weights, ns=(1, 1))
    assert len({first, longer, _fingerprint(tmp_path)}) == 3


def test_an_engine_that_is_not_there_is_not_waited_for(plan, monkeypatch):
    monkeypatch.setattr("shmrl.launcher.evaluate.ANSWER_S", 0.2)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1 is not healthy: .*[Cc]onnect"):
        evaluate(replace(plan, model="http://127.0.0.1:1"))


def test_what_cannot_be_evaluated_is_refused_before_anything_starts(plan, place):
    with pytest.raises(ConfigError, match="neither an engine's URL nor a directory with a config"):
        evaluate(replace(plan, model=str(place)))
    with pytest.raises(ConfigError, match="serves policy of 'someone/policy', and someone/policy has no tokenizer"):
        evaluate(replace(plan, tokenizer=None))
    with pytest.raises(ConfigError, match="the same name: graded-Graded, graded-Graded"):
        evaluate(replace(plan, sources=[*plan.sources, *plan.sources]))
    assert not plan.out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "m"], "give at least one env id, TOML file or --url"),
        (["reverse-text", "--model", "m", "-n", "0"], "-n 0 -r 3 -c 16: each is at least 1"),
        (["reverse-text", "--model", "m", "--sampling.top-q", "1"], "did you mean top_p?"),
        (
            ["--url", "http://a:1", "--model", "m"],
            "--url: http://a:1 is someone else's environment; give --env.max-turns N",
        ),
        (["nowhere.toml", "--model", "m"], "nowhere.toml"),
        (
            ["code-exec", "--model", "m"],
            "error: code-exec: code-exec runs what a model wrote: set serve.sandbox = 'bwrap'",
        ),
        (["reverse-text", "--model", "m"], "--model m: neither an engine's URL nor a directory with a config.json"),
    ],
)
def test_the_commands_refusals(arguments, said, place):
    done = cli("eval", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not (place / "eval.jsonl").exists()


@pytest.mark.parametrize("how", ["sleep", "block"])
def test_a_rollout_that_hangs_ends_at_its_deadline(plan, how):
    flags = {"env.args.hang": f'"{how}"', "serve.request_timeout_s": "3"}
    assert evaluate(replace(plan, sources=load_eval("graded:Graded", flags), rollouts=1, concurrency=1)) == 1
    done, late = rows(plan)
    assert (done["reward"], late["error"]) == (1.0, "Timeout: no end within 3 s (serve.request_timeout_s)")


def test_an_interruption_says_what_is_kept_and_ends_it(plan, model_dir):  # noqa: F811
    command = [sys.executable, "-m", "shmrl", "eval", "graded:Graded", "--env.args.hang", "true", "-n", "2", "-r", "1"]
    command += ["--model", plan.model, "--tokenizer", str(model_dir), "--out", str(plan.out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as one:
        asyncio.run(until(lambda: plan.out.exists() and plan.out.read_bytes().count(b"\n") == 1))
        one.send_signal(signal.SIGINT)
        said = one.communicate(timeout=60)[1]
    assert one.returncode == -signal.SIGINT
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "interrupted: " in line]
    kept = f"interrupted: 1 of 2 rollouts are done and kept in {plan.out}: the same command goes on with them; 1 run, "
    assert kept in line
    assert ": graded-Graded, task eval-1 (ended after serve.request_timeout_s = 300)" in line
    assert len(rows(plan)) == 1


def test_a_task_set_that_cannot_be_read_ends_it(plan, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for the server's process
    with pytest.raises(TasksetError, match="rotten"):
        evaluate(replace(plan, sources=load_eval("tests.env.environments:RaisingLater")))


@pytest.mark.parametrize(
    ("name", "code", "said", "tracebacks"),
    [
        ("unloadable:Failing", 1, "unloadable:Failing: RuntimeError: no data (unloadable.py:6, in __init__)", 1),
        ("tests.env.environments:Boxed", 2, "this environment executes what the model writes: set serve.sandbox", 0),
    ],
)
def test_an_environment_that_cannot_load_is_told_once(
    plan,
    model_dir,  # noqa: F811
    place,
    monkeypatch,
    name,
    code,
    said,
    tracebacks,
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for the server's process
    (place / "unloadable.py").write_text(
        "from shmrl.env import Environment\n\n\nclass Failing(Environment):\n    def __init__(self):\n"
        "        raise RuntimeError('no data')\n\n    def tasks(self, split): ...\n"
        "    async def rollout(self, task, model): ...\n"
    )
    done = cli("eval", name, "--model", plan.model, "--tokenizer", model_dir)
    assert done.returncode == code
    assert done.stderr.count("Traceback (most recent call last)") == tracebacks
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("shmrl: error: ")]
    assert line.startswith(f"shmrl: error: {said}")


def test_environments_come_by_id_from_a_servers_file_and_from_a_run(tmp_path):
    (by_id,) = load_eval("my_module:Echo", {"env.args.size": "3"})
    assert (by_id.name, by_id.env.id, by_id.env.args, by_id.split) == (
        "my_module-Echo",
        "my_module:Echo",
        {"size": 3},
        "eval",
    )
    file = tmp_path / "env.toml"
    file.write_text('name = "mine"\nenv.id = "reverse-text"\nserve.sandbox = "bwrap"\nsampling.max_tokens = 7\n')
    (served,) = load_eval(str(file))
    assert (served.name, served.serve.sandbox, served.sampling.max_tokens) == ("mine", "bwrap", 7)
    (held_out,) = load_eval(str(CONFIGS / "reverse-text.toml"))
    assert held_out.name == "reverse-text-eval"
    assert held_out.sampling.max_tokens < 128


def test_the_measures():
    done = [
        {"number": 0, "success": True, "reward": 0.0},
        {"number": 0, "success": True, "reward": 1.0},
        {"number": 1, "success": True, "reward": 0.5},
        {"number": 1, "success": False},
        {"number": 2, "success": False},
    ]
    line = {"source": "a", "tasks": 3, "rollouts": 5, "failed": 2, "avg": 0.3, "pass": 1 / 3}
    assert summary("a", done) == line
    assert render([summary("a", done[3:])], 2).splitlines()[1].split() == ["a", "2", "2", "2", "0.0000", "0.0000"]


async def test_it_does_not_wait_for_an_engine_that_died():
    with (
        subprocess.Popen("false") as engine,  # noqa: ASYNC220
        pytest.raises(ProcessFailed, match="engine exited with code 1"),
    ):
        await _while_lives(engine, asyncio.Event().wait())


async def test_with_a_model_directory_it_brings_an_engine_that_ends_with_it(place):
    """Killed half-way: what was done is in the file, and no process is left."""
    from shmrl.inference.embedded.tiny import write_tiny

    write_tiny(TinyModel(layers=1), place / "model", 0)
    command = [sys.executable, "-m", "shmrl", "eval", "graded:Graded", "--env.args.hang", "true", "-n", "2", "-r", "2"]
    command += ["--model", str(place / "model"), "--sampling.max-tokens", "4"]
    out = place / "eval.jsonl"
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as killed:  # noqa: ASYNC220
        await until(lambda: out.exists() and out.read_bytes().count(b"\n") == 2, 120)
        family = psutil.Process(killed.pid).children(recursive=True)
        os.kill(killed.pid, signal.SIGKILL)
    assert len(family) >= 3
    assert {(row["number"], row["reward"]) for row in map(json.loads, out.read_text().splitlines())} == {(0, 1.0)}
    await until(lambda: not any(process.is_running() and process.status() != "zombie" for process in family))
