"""Wrong configurations, as a user meets them: each line names the file (or flag), the key and what to do; exit 2 for
the configuration, 1 for what is in the way on the machine. All in one process, a few as real commands.
"""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from shmrl.arena import memory
from shmrl.cli import common, main
from tests.support.runs import free_ports

GOOD = """\
[run]
name = "x"
max_steps = 4

[model.tiny]
layers = 2

[arena]
capacity = "64MiB"

[inference]
port = PORT

[orchestrator]
batch_size = 32
env_server_base_port = BASE

[[orchestrator.train.source]]
name = "a"
env = { id = "reverse-text", args = { min_length = 2 } }
"""
SOURCE = "orchestrator.train.source"

# what is typed instead of what, and what the one line says behind the file's name
TYPOS = [
    ("batch_size = 32", "batch_sise = 32", "orchestrator.batch_sise = 32: unknown key; did you mean batch_size?"),
    ("[arena]", "[arenna]", "arenna = {'capacity': '64MiB'}: unknown key; did you mean arena?"),
    ("layers = 2", "layer = 2", "model.tiny.layer = 2: unknown key; did you mean layers?"),
    ('name = "a"', 'name = "a"\nsampling.temprature = 1.0', f"{SOURCE}.0.sampling.temprature = 1.0: unknown key; did"),
    ("port = PORT", 'port = PORT\nbackend = "vlm"', "inference.backend = 'vlm': must be 'embedded' or 'vllm'; did you"),
    ("max_steps = 4", "max_steps 4", "Expected '=' after a key in a key/value pair (at line 3, column 11)"),
    (
        "reverse-text",
        "revers-text",
        "env id 'revers-text' is neither a bundled name nor module:attribute; did you mean",
    ),
    (
        "min_length",
        "min_lenght",
        "source 'a': env.args.min_lenght: ReverseText has no such argument; did you mean min_",
    ),
]
TYPES = [
    ("max_steps = 4", 'max_steps = "four"', "run.max_steps = 'four': must be a valid integer"),
    ("layers = 2", "layers = 2.5", "model.tiny.layers = 2.5: must be a valid integer"),
    ('"64MiB"', '"64 potatoes"', "arena.capacity = '64 potatoes': not a size: '64 potatoes' (examples: 8GiB, "),
    ('"64MiB"', "[64]", "arena.capacity: must be a valid integer or a valid string"),
    (
        "[[orchestrator.train.source]]",
        "[orchestrator.train.source]",
        f"{SOURCE}: must be a list of tables: [[{SOURCE}",
    ),
    ("port = PORT", 'port = PORT\nurls = ["host:1"]', "inference.urls.0 = 'host:1': must be a URL, as \"http://"),
    ('name = "x"', 'name = "two words"', "run.name = 'two words': must be letters, digits, '.', '_' or '-', at most"),
]
RANGES = [
    ("max_steps = 4", "max_steps = 0", "run.max_steps = 0: must be greater than 0"),
    ("port = PORT", "port = 70000", "inference.port = 70000: must be less than or equal to 65535"),
    ('"64MiB"', '"64KiB"', "arena.capacity = '64KiB': is below 1MiB"),
    ("port = PORT", "port = PORT\n[trainer.optimizer]\nlr = -1.0", "trainer.optimizer.lr = -1.0: must be greater than"),
]
IMPOSSIBLE = [
    ("batch_size = 32", "batch_size = 30", "orchestrator.batch_size = 30 is not a multiple of a's group_size = 8"),
    (
        "batch_size = 32",
        "batch_size = 32\ntoken_batch_size = 9",
        "orchestrator: give exactly one of batch_size and tok",
    ),
    ("batch_size = 32", "batch_size = 32\nseq_len = 100", f"{SOURCE}.0.sampling.max_tokens = 128 leaves no room for a"),
    (
        "port = PORT",
        "port = PORT\nmax_model_len = 100",
        f"{SOURCE}.0.sampling.max_tokens = 128 leaves no room for a pr",
    ),
    (
        'name = "a"',
        'name = "a"\nsampling.top_p = 0.9',
        f"{SOURCE}.0.sampling: truncated sampling (top_p = 0.9, min_p =",
    ),
    ("port = PORT", "port = PORT\n[trainer]\nhead = 65", "trainer.head = 65 exceeds the engine's max_logprobs = 64"),
    ("[model.tiny]", '[model]\npath = "m"\n[model.tiny]', "model: give exactly one of model.path and [model.tiny]"),
    ("max_steps = 4", "max_steps = 4\nrestarts.trainer = 1", "run.restarts.trainer = 1: a restarted trainer goes back"),
    ('capacity = "64MiB"', 'on_full = "spill"', "arena.spill_dir (an existing directory) belongs to on_full = 'spil"),
    ("reverse-text", "code-exec", "source 'a': code-exec runs what a model wrote: set serve.sandbox = 'bwrap'"),
]
MACHINE = [
    ("[model.tiny]\nlayers = 2", '[model]\npath = "/nowhere"', "model.path: /nowhere/config.json does not describe"),
    ('capacity = "64MiB"', 'on_full = "spill"\nspill_dir = "/nowhere"', "arena.spill_dir = '/nowhere' is missing or"),
    ("reverse-text", "my_module:Echo", "env id 'my_module:Echo': there is no module 'my_module' on the Py"),
    ("reverse-text", "shmrl.envs.reverse_text:Reverse", "reverse_text.py has no 'Reverse'; did you mean ReverseText?"),
    ("port = PORT", 'port = PORT\nbackend = "vllm"\npython = "/nowhere/python"', "inference.python"),
    ('"64MiB"', '"2048GiB"', "arena.capacity = '2048GiB': "),
    ("max_steps = 4", 'max_steps = 4\noutput_dir = "/proc/x"', "run.output_dir = '/proc/x': No such file or directory"),
    ("[model.tiny]", '[trainer.loss]\nkind = "custom"\npath = "json:lod"\n[model.tiny]', "'json:lod': "),
]


@pytest.fixture(autouse=True)
def unnamed(monkeypatch, tmp_path):
    """Nothing of this process changes its log or title; runs are written below the test's directory."""
    monkeypatch.setattr(common, "begin", lambda role, log: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ports():
    return free_ports(2)


@pytest.fixture
def typed(tmp_path, capsys, ports):
    """Writes the good file with one change and runs `shmrl run FILE --dry-run ...`: exit code, lines on stderr."""

    def run(before="", after="", *flags):
        text = GOOD.replace(before, after, 1) if before else GOOD
        assert before == "" or text != GOOD
        path = tmp_path / "wrong.toml"
        path.write_text(text.replace("PORT", str(ports)).replace("BASE", str(ports + 1)))
        code = main(["run", str(path), "--dry-run", *flags])
        return code, capsys.readouterr().err.splitlines()

    return run


def test_the_good_file_is_good(typed):
    assert typed() == (0, [])


@pytest.mark.parametrize(("before", "after", "says"), [*TYPOS, *TYPES, *RANGES, *IMPOSSIBLE, *MACHINE])
def test_one_line_names_the_file_the_key_and_what_is_allowed(typed, tmp_path, before, after, says):
    code, lines = typed(before, after)
    assert code == 2
    assert all(line.startswith(f"shmrl: error: {tmp_path}/wrong.toml: ") for line in lines), lines
    assert any(says in line for line in lines), lines


def test_every_fault_of_a_file_is_said_at_once(typed):
    code, lines = typed("max_steps = 4", "max_steps = 0\nsead = 1\n[log]\nlevel = 'loud'\n[monitor]\nconsole = 7")
    assert (code, len(lines)) == (2, 4)


def test_a_fault_of_an_environment_is_said_with_the_others(typed):
    code, lines = typed('id = "reverse-text"', 'id = "revers-text"', "--orchestrator.batch-size", "30")
    assert (code, len(lines)) == (2, 2)
    assert "batch_size" in lines[0]
    assert "revers-text" in lines[1]
    assert "orchestrator.train.source" in lines[1]


def test_a_key_of_a_table_below_is_meant(typed):
    code, (line,) = typed("", "", "--trainer.lr", "1e-3")
    assert (code, line.endswith("unknown key; did you mean trainer.optimizer.lr?")) == (2, True)


def test_a_flag_is_named_as_it_was_typed(typed):
    code, (line,) = typed("", "", "--trainer.optimiser.lr", "1e-3")
    assert code == 2
    assert line.startswith("shmrl: error: --trainer.optimiser.lr: trainer.optimiser = ")
    assert line.endswith("unknown key; did you mean optimizer?")


def test_a_missing_file_is_named(typed, capsys):
    assert main(["run", "no.toml"]) == 2
    assert capsys.readouterr().err == "shmrl: error: no.toml: No such file or directory\n"


def test_busy_ports_are_all_named_with_key_holder_and_a_free_one(typed, tmp_path, ports):
    with socket.create_server(("127.0.0.1", ports)), socket.create_server(("127.0.0.1", ports + 1)):
        code, lines = typed()
    assert (code, len(lines)) == (1, 2)
    for line, key in zip(lines, ("orchestrator.env_server_base_port", "inference.port"), strict=True):
        assert line.startswith(f"shmrl: error: {tmp_path}/wrong.toml: ")
        assert f"(pid {os.getpid()})" in line
        assert f"{key} = " in line
        free = int(line.rpartition(" ")[2].rstrip(")"))
        assert f"--{key.replace('_', '-')} {free}" in line
        socket.create_server(("127.0.0.1", free)).close()


@pytest.mark.parametrize("flags", [[], ["--slurm"]])
def test_a_dry_run_in_a_used_directory_ends_as_the_run_would_and_writes_nothing_there(typed, tmp_path, flags):
    out = tmp_path / "used"
    where = ["--run.output-dir", str(out), *flags]
    assert typed("", "", *where) == (0, [])
    (out / "metrics.jsonl").touch()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    code, (line,) = typed("max_steps = 4", "max_steps = 5", *where)
    assert code == 2
    assert "was used before (it has metrics.jsonl): continue it with --resume, remove it with --clean, or" in line
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    code, (line,) = typed("", "", *where, "--clean")
    assert (code, "but no run.json of a run: --clean leaves them alone" in line) == (2, True)
    code, (line,) = typed("", "", *where, "--clean", "--resume")
    assert (code, "give one of them" in line) == (2, True)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (out / "run.json").write_text('{"status": "finished"}')
    assert typed("", "", *where, "--clean") == (0, [])
    assert (out / "metrics.jsonl").exists()


def test_a_small_shared_memory_names_the_key_and_the_mount(typed, tmp_path, monkeypatch):
    small = SimpleNamespace(f_blocks=16 << 20, f_bavail=16 << 20, f_frsize=1)
    monkeypatch.setattr(memory.os, "statvfs", lambda _: small)
    code, (line,) = typed()
    assert code == 2
    assert line.startswith(f"shmrl: error: {tmp_path}/wrong.toml: arena.capacity = '64MiB': ")
    assert "--shm-size=" in line


@pytest.mark.parametrize(
    ("change", "code"),
    [(("max_steps = 4", "max_stepz = 4"), 2), (("batch_size = 32", "batch_size = 30"), 2), (("PORT", "TAKEN"), 1)],
)
def test_as_a_command_it_is_over_before_anything_starts(tmp_path, ports, change, code):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = GOOD.replace(*change, 1).replace("TAKEN", str(taken.getsockname()[1]))
        (tmp_path / "wrong.toml").write_text(text.replace("PORT", str(ports)).replace("BASE", str(ports + 1)))
        began = time.monotonic()
        command = [sys.executable, "-m", "shmrl", "run", "wrong.toml"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert "wrong.toml: " in line
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - began < 20  # it takes 0.3 s
