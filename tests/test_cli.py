"""The command line as a user meets it: exit codes, flags as keys, every problem printed, a light start."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmrl
from shmrl.cli import main, split_flags
from shmrl.config import load_run
from shmrl.errors import ConfigError, RunError, told
from shmrl.node.host import exclusive
from tests.support.runs import ROOT, free_ports

RUN = """
[run]
name = "x"
[model.tiny]
[orchestrator]
batch_size = 32
[[orchestrator.train.source]]
name = "a"
env.id = "reverse-text"
"""


def cli(*arguments, **options):
    command = [sys.executable, "-m", "shmrl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.fixture
def config(tmp_path):
    """A run on two free ports: the env server's, and the one above it for the engine."""
    path, port = tmp_path / "run.toml", free_ports(2)
    text = RUN.replace("batch_size = 32", f"batch_size = 32\nenv_server_base_port = {port}")
    path.write_text(f"{text}[inference]\nport = {port + 1}\n")
    return path


def test_version_is_printed_and_neither_torch_nor_a_role_is_imported():
    done = cli("--version")
    first, *rest = done.stdout.splitlines()
    assert (done.returncode, first) == (0, f"shmrl {shmrl.__version__}")
    assert [line.split()[0] for line in rest] == ["layout", "python", "torch", "vllm", "commit"]
    header = (Path(shmrl.__file__).parents[1] / "csrc" / "arena_layout.h").read_text()
    assert rest[0] == f"layout {re.search(r'define SRL_VERSION +([0-9]+)', header)[1]}"
    code = (
        "import sys; from shmrl.cli import main; main(['--version']); "
        "print([n for n in ('torch', 'numpy', 'zmq', 'pydantic', 'shmrl.orchestrator') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_launcher_imports_no_torch():
    code = (
        "import sys, shmrl.launcher.run, shmrl.launcher.janitor; "
        "print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_keys_are_flags_and_everything_else_is_left_to_the_command():
    rest, flags = split_flags(["run", "a.toml", "--trainer.optimizer.lr", "3e-4", "--resume", "--run.output-dir=x"])
    assert rest == ["run", "a.toml", "--resume"]
    assert flags == {"trainer.optimizer.lr": "3e-4", "run.output-dir": "x"}
    assert split_flags(["--a.top-k", "-1"]) == ([], {"a.top-k": "-1"})


@pytest.mark.parametrize("arguments", [["--run.seed"], ["--run.seed", "--resume"]])
def test_a_flag_without_a_value_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"--run\.seed needs a value"):
        split_flags(arguments)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("runn", "'runn' is no command of `shmrl`; did you mean run?"),
        ("arena lss", "'lss' is no command of `shmrl arena`; did you mean ls?"),
        ("bogus", "'bogus' is no command of `shmrl`: run, node, orchestrator, "),
        ("--versoin", "--versoin is no option of `shmrl`; did you mean --version?"),
        ("run x.toml --resum", "--resum is no option of `shmrl run`; did you mean --resume?"),
        ("arena top --cuont=3", "--cuont is no option of `shmrl arena top`; did you mean --count?"),
        ("run x.toml --max-steps 3", "--max-steps is no option of `shmrl run`; did you mean --run.max-steps?"),
        ("run --no-such-option", "--no-such-option is no option of `shmrl run`: --help, --resume, --clean, --slurm, "),
        ("arena", "Expected one of {ls, stats, top, holders, fsck, tail, gc}."),
        ("eval guess-number", "Missing from shmrl eval: --model STR "),
        ("arena top --count x", "Error parsing --count: invalid literal for int() with base 10: 'x'"),
        ("init a b", "Unrecognized options: b"),
    ],
)
def test_what_is_typed_wrong_is_said_in_a_line(typed, said, capsys):
    assert main(typed.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line[: len(said) + 14] for line in lines] == [f"shmrl: error: {said}"]


def test_an_error_of_ours_is_its_message_and_any_other_has_its_type():
    assert told(RunError("no batch")) == "no batch"
    assert told(RunError()) == "RunError"
    assert told(KeyError("x")) == "KeyError: 'x'"
    assert told(OSError(28, "No space left on device")) == "OSError: [Errno 28] No space left on device"


def test_no_message_for_people_names_a_class_of_ours():
    """The rule is `told`: what is joined by hand would say "RunError: ..." again."""
    joined = re.compile(r"type\((\w+)\)\.__name__\}: \{\1\}")
    foreign = {  # where no error of ours arrives
        "env/chat.py", "env/episodes/leases.py", "env/episodes/servers.py", "env/sandbox/init.py", "config/shape.py",
        "inference/answers.py", "inference/embedded/bodies.py", "inference/embedded/engine.py",
        "inference/embedded/model.py", "inference/vllm/plugin/shmrl_vllm_worker.py", "monitor/log.py",
        "monitor/page/guard.py", "node/client.py", "node/published.py", "orchestrator/loop.py", "payload/header.py",
        "payload/stepfile.py", "trainer/models.py", "trainer/weights.py", "types.py", "wire.py", "errors.py",
    }  # fmt: skip
    root = ROOT / "shmrl"
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if joined.search(path.read_text())}
    assert found <= foreign


def test_every_configuration_problem_is_a_line_on_stderr(config):
    config.write_text(RUN.replace("batch_size = 32", "batch_sise = 32") + "[traner]\n")
    done = cli("run", config)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert any("orchestrator.batch_sise = 32: unknown key; did you mean batch_size?" in line for line in lines)
    assert any("traner" in line and "did you mean trainer?" in line for line in lines)


def test_a_missing_file_list_and_a_missing_file_are_named():
    assert "give at least one TOML file" in cli("run").stderr
    done = cli("orchestrator", "/nowhere/run.toml")
    assert (done.returncode, "/nowhere/run.toml" in done.stderr) == (2, True)


def test_dry_run_writes_configs_prints_the_table_and_starts_nothing(config, tmp_path):
    out = tmp_path / "out"
    done = cli("run", config, "--dry-run", "--run.output-dir", out, "--trainer.ranks", "2")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["role", "count", "address", "log"]
    port = load_run([config]).orchestrator.env_server_base_port
    assert lines[1][:4] == ["env-server", "train/a", "1", f"tcp://127.0.0.1:{port}"]
    assert [line[0] for line in lines[2:5]] == ["orchestrator", "inference", "trainer"]
    assert lines[4][1] == "2"
    assert " available; at most " in done.stdout
    assert "bytes per token: 20.2" in done.stdout  # 12.2 + routing 4 layers x top-2 x 1 byte
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    roles = {f"configs/{role}.toml" for role in ("orchestrator", "trainer", "inference")}
    assert written == {*roles, "configs/envs/train/a.toml"}


def test_a_dry_run_refuses_a_used_directory_as_the_run_does_and_keeps_off_a_run_that_goes_on(config, tmp_path):
    out = tmp_path / "out"
    (out / "weights").mkdir(parents=True)
    done, run = (cli("run", config, *more, "--run.output-dir", out) for more in (["--dry-run"], []))
    assert (done.returncode, run.returncode) == (2, 2)
    assert done.stderr == run.stderr
    assert f"{out} was used before (it has weights): continue it with" in done.stderr
    assert "bytes per token: 20.2" in done.stdout  # the plan is printed all the same
    assert cli("run", config, "--dry-run", "--resume", "--run.output-dir", out).returncode == 0
    with exclusive(load_run([config], {"run.output-dir": str(out)}).absolute()):
        done = cli("run", config, "--dry-run", "--run.output-dir", out)
    assert (done.returncode, "is in use by another run" in done.stderr) == (1, True)


def test_help_shows_files_and_switches_as_they_are_typed():
    text = cli("run", "--help").stdout
    assert "FILE... [--resume] [--clean] [--slurm] [--dry-run]" in text
    assert "default:" not in text


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
def test_a_role_without_an_arena_says_where_the_address_comes_from(role, config, tmp_path):
    done = cli(role, config, "--run.output-dir", tmp_path / "out")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("shmrl: error: arena.address is not set: `shmrl run` and `shmrl node` create the arena")


def test_a_role_whose_arena_is_gone_asks_for_its_host(config, tmp_path):
    done = cli("trainer", config, "--run.output-dir", tmp_path / "out", "--arena.address", f"shm:{'0' * 32}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("is its `shmrl run` or `shmrl node` alive?")


@pytest.mark.parametrize("command", [["run"], ["run", "--dry-run"], ["trainer"], ["inference"], ["node"]])
def test_without_the_extra_train_nothing_is_started_and_the_extra_is_named(command, config, tmp_path):
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest); "
        "from shmrl.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "out"
    arguments = [*command, str(config), "--run.output-dir", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, out.exists()) == (2, False)
    assert done.stderr == (
        "shmrl: error: torch: not installed; the engine and the trainer need the extra 'train' "
        "(pip install -c constraints.txt -e '.[train]')\n"
    )


def test_a_source_tree_that_hides_the_installed_package_is_named(config, tmp_path):
    """Roles are started with `python -m`, which looks into the working directory first."""
    (tmp_path / "shmrl").mkdir()
    (tmp_path / "shmrl" / "__init__.py").touch()
    code = "import sys; sys.path.remove(''); from shmrl.cli import main; sys.exit(main())"
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "timeout": 60}
    done = subprocess.run(
        [sys.executable, "-c", code, "run", config], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"shmrl: error: {tmp_path}/shmrl hides the installed package ({ROOT}/shmrl) from")


def test_what_is_no_arena_address_is_a_usage_error():
    done = cli("arena", "stats", "xyz")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "not an arena address: 'xyz'" in done.stderr


def test_doctor_and_arena_commands_answer_in_json():
    for command in (["doctor"], ["arena", "ls"], ["arena", "stats"], ["arena", "gc"]):
        done = cli(*command, "--json")
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


@pytest.mark.parametrize(("variables", "colors"), [({"NO_COLOR": "1"}, False), ({}, True)])
def test_help_on_a_terminal_has_colors_unless_it_shall_not(variables, colors):
    ours, theirs = pty.openpty()
    environment = (
        {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | variables
    )
    command = [sys.executable, "-m", "shmrl", "arena", "gc", "--help"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment, close_fds=True):
        os.close(theirs)
        told = b""
        with contextlib.suppress(OSError):  # the other side is gone
            while part := os.read(ours, 4096):
                told += part
    os.close(ours)
    assert b"usage: shmrl arena gc" in re.sub(rb"\x1b\[[0-9;]*m", b"", told)
    assert (b"\x1b[" in told) == colors
