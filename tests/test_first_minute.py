"""What a new user types first: nothing, --help, init, keys, doctor, completion."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shmrl.cli import common, main
from shmrl.config import EnvServerConfig, RunTree, keys, load_run
from shmrl.launcher import init, machine
from shmrl.launcher.machine import Machine

GIB = 1 << 30


def typed(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as done:
        code = done.code
    return code, *capsys.readouterr()


def test_alone_it_says_what_to_type(capsys):
    code, _, err = typed(capsys)
    assert code == 2
    assert "shmrl init " in err
    assert "shmrl --help" in err


@pytest.mark.parametrize(
    "command",
    [
        [], ["run"], ["node"], ["orchestrator"], ["trainer"], ["inference"], ["env-server"], ["eval"], ["arena"],
        *(["arena", name] for name in ("ls", "stats", "top", "holders", "fsck", "gc", "tail")),
        ["replay"], *(["replay", name] for name in ("export", "show", "assemble")), ["init"], ["keys"], ["doctor"],
    ],
)  # fmt: skip
def test_help_on_every_level_says_what_each_option_means(command, capsys):
    code, out, _ = typed(capsys, *command, "--help")
    assert code == 0
    lines = [line.strip("│ ") for line in out.splitlines() if line.startswith("│")]
    for number, line in enumerate(lines):  # its meaning stands beside an option, or below a long one
        assert not line.startswith("-") or " " in line.replace(", ", ",") or not lines[number + 1].startswith("-"), line


def test_every_key_has_a_type_and_a_meaning():
    for tree in (RunTree, EnvServerConfig):
        for key in keys.keys(tree):
            assert key.meaning.endswith("."), f"{key.dotted}: the sentence below a key says what it means"
            assert key.type, key.dotted


def test_keys_are_found_by_table_by_name_and_as_they_are_typed_as_flags(capsys):
    code, out, _ = typed(capsys, "keys", "run")
    assert code == 0
    assert out.splitlines()[0] == "[run]"
    assert "  run.max_steps   int > 0   100         Optimizer steps of the run." in out
    assert "[[orchestrator.train.source]]" in typed(capsys, "keys", "ratio")[1]
    assert typed(capsys, "keys", "--trainer.optimizer.lr", "--flags")[0] == 2  # that is a flag without a value
    assert typed(capsys, "keys", "max-tokens", "--flags")[1].splitlines() == [
        "--orchestrator.train.source.0.sampling.max-tokens",
        "--orchestrator.eval.source.0.sampling.max-tokens",
    ]
    (key,) = json.loads(typed(capsys, "keys", "inference.port", "--json")[1])
    assert (key["type"], key["default"]) == ("int >= 0 <= 65535", "8000")
    assert typed(capsys, "keys", "optimiser")[::2] == (
        2,
        "shmrl: error: no key has 'optimiser' in it; did you mean optimizer?\n",
    )


def test_init_writes_what_runs_here_on_ports_that_are_free(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "begin", lambda role, log: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = taken.getsockname()[1]
        monkeypatch.setattr(init, "ENGINE_PORT", wanted)
        code, out, _ = typed(capsys, "init")
        assert (code, out.splitlines()[1]) == (0, "next:  shmrl run shmrl.toml --dry-run")
        assert load_run([Path("shmrl.toml")]).inference.port > wanted
        assert typed(capsys, "run", "shmrl.toml", "--dry-run")[0] == 0
    before = Path("shmrl.toml").read_text()
    code, _, err = typed(capsys, "init")
    assert (code, err) == (
        2,
        "shmrl: error: shmrl.toml is there already: name another file, or replace it with --force\n",
    )
    assert typed(capsys, "init", "--force")[0] == 0
    assert before.count("\n") > 50


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (Machine(1, (), 64 * GIB, 128 * GIB), {"ranks": 1, "device": "cpu", "capacity": "1024MiB", "backing": "shm"}),
        (Machine(64, (), 64 << 20, 8 * GIB), {"ranks": 2, "device": "cpu", "capacity": "1024MiB", "backing": "memfd"}),
        (Machine(16, ("H200",), GIB, GIB), {"ranks": 1, "device": "cuda", "capacity": "512MiB", "backing": "shm"}),
        (Machine(96, ("H200",) * 8, GIB, GIB), {"ranks": 7, "device": "cuda", "capacity": "512MiB", "backing": "shm"}),
    ],
)
def test_init_fits_other_machines(here, expected, tmp_path):
    path = tmp_path / "shmrl.toml"
    path.write_text(init.text(path, here))
    tree = load_run([path])
    assert expected == {
        "ranks": tree.trainer.ranks,
        "device": tree.trainer.device,
        "capacity": tree.arena.capacity,
        "backing": tree.arena.backing,
    }
    assert tree.inference.device == (f"cuda:{len(here.gpus) - 1}" if here.gpus else "cpu")


def test_gpus_are_counted_without_torch(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number in range(2):
        folder = tmp_path / "proc/driver/nvidia/gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   1\n")
    assert machine.gpus(tmp_path) == ["NVIDIA H200"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.gpus(tmp_path) == ["NVIDIA H200"]
    assert machine.gpus(tmp_path / "none") == []


def test_doctor_has_a_line_for_everything_and_advice_for_what_is_off(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Path(__file__).parents[1] / "configs" / "reverse-text.toml"
        port = str(taken.getsockname()[1])
        code, out, _ = typed(capsys, "doctor", str(config), "--inference.port", port, "--vllm", "/nowhere", "--json")
    found = {one["name"]: one for one in json.loads(out)}
    assert code == 1
    wanted = {"python", "torch", "cores", "GPU", "vLLM", "bwrap", "ports", "/dev/shm", "open files", "huge pages, shm"}
    assert wanted <= found.keys()
    assert all(one["fix"] for one in found.values() if one["status"] != "ok")
    assert found["vLLM"]["status"] == found["ports"]["status"] == "fail"
    assert "free now: --inference.port " in found["ports"]["fix"]
    code, out, _ = typed(capsys, "doctor", str(config), "--arena.capacity", "900TiB", "--arena.backing", "memfd")
    assert (code, out.splitlines()[-1].split(":")[0]) == (1, "1 fail")
    assert re.search(r"^fail +run .* needed, .* available of .*\n +-> make the arena smaller", out, re.MULTILINE)
    assert "arena.backing = 'memfd'" in out
    last = typed(capsys, "doctor")[1].splitlines()[-1]
    assert last == "nothing is in the way of a run" or re.match(r"[0-9]+ (warn|fail): ", last)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell, capsys):
    code, out, _ = typed(capsys, "completion", shell)
    assert code == 0
    assert "env-server" in out


def test_bash_completes_commands_options_and_keys(tmp_path):
    """In a real bash, with the script that `shmrl completion bash` prints."""
    script = (
        f'shmrl() {{ {sys.executable} -m shmrl "$@"; }}; source <(shmrl completion bash)\n'
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()\n'
        '_shmrl_with_keys shmrl; echo "${COMPREPLY[*]}"; }\n'
        "ask shmrl ar; ask shmrl run x.toml --dr; ask shmrl run x.toml --trainer.opt"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    commands, options, flags = done.stdout.splitlines()
    assert "arena" in commands.split()
    assert "--dry-run" in options.split()
    assert "--trainer.optimizer.weight-decay" in flags.split()
