"""What exists once per host and run: token, socket directory, arena, and `shmrl node` as a process."""

import functools
import os
import signal
import stat
import subprocess
import sys

import psutil
import pytest

from shmrl.arena import Arena, unlink
from shmrl.config import NodeConfig, load_env_server, load_run
from shmrl.errors import ArenaError, ConfigError, RunError
from shmrl.node import host
from shmrl.node.client import Client
from shmrl.node.host import exclusive, hosted, read_token
from tests.support import leftovers
from tests.support.runs import free_ports

RUN = """
[model.tiny]
layers = 1
hidden = 32
heads = 2
kv_heads = 1
experts = 4
[arena]
capacity = "16MiB"
[orchestrator]
batch_size = 8
seq_len = 256
[[orchestrator.train.source]]
name = "a"
env.id = "reverse-text"
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    return load_run([tmp_path / "run.toml"], {"run.output-dir": str(tmp_path / "out")}).absolute()


def test_a_hosted_run_has_arena_token_and_private_sockets_and_leaves_nothing(tree):
    with exclusive(tree) as directory, hosted(tree, directory, "ab" * 16) as (arena, named):
        assert directory == tree.socket_dir
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert named.arena.address == arena.address
        assert stat.S_IMODE(named.arena.token_file.stat().st_mode) == 0o600
        token = read_token(named.arena)
        assert len(bytes.fromhex(token)) == 16
        with Arena.attach(named.arena.address) as second:
            second.free([second.put(b"x", tag="t")])
    assert not directory.exists()
    with pytest.raises(ArenaError):
        Arena.attach(named.arena.address)


def test_the_token_may_come_from_the_environment_and_is_checked(tree, monkeypatch):
    monkeypatch.setenv("SHMRL_TOKEN", "0123456789abcdef" * 2)
    with exclusive(tree) as directory, hosted(tree, directory, "ab" * 16) as (_, named):
        assert read_token(named.arena) == "0123456789abcdef" * 2
    assert read_token(tree.arena) == "0123456789abcdef" * 2
    monkeypatch.setenv("SHMRL_TOKEN", "short")
    with exclusive(tree) as directory, pytest.raises(ConfigError, match="32 lower-case"), hosted(tree, directory, "x"):
        pass


def test_a_token_that_is_gone_says_whose_it_was(tree, tmp_path):
    arena = tree.arena.model_copy(update={"token_file": tmp_path / "nowhere"})
    with pytest.raises(RunError, match=r"nowhere.*shmrl node"):
        read_token(arena)


def test_one_directory_serves_one_run_at_a_time(tree):
    with exclusive(tree):
        with pytest.raises(RunError, match=rf"in use by another run \(pid {os.getpid()}\)"), exclusive(tree):
            pass
        assert tree.socket_dir.exists()
    with exclusive(tree):
        pass


def test_what_a_killed_run_left_in_its_socket_directory_is_removed(tree):
    tree.socket_dir.mkdir(mode=0o700, parents=True)
    (tree.socket_dir / "token").write_text("old")
    (tree.socket_dir / "trainer.sock").touch()
    with exclusive(tree) as directory:
        assert [path.name for path in directory.iterdir()] == ["lock"]


def test_a_socket_directory_that_others_can_enter_is_refused(tree):
    tree.socket_dir.mkdir(mode=0o755, parents=True)
    tree.socket_dir.chmod(0o755)
    try:
        with pytest.raises(RunError, match="not a private directory"), exclusive(tree):
            pass
    finally:
        tree.socket_dir.rmdir()


def test_a_path_too_long_for_a_socket_is_refused(tree, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match="too long for a unix socket"), exclusive(tree):
        pass


class Node:
    """`shmrl node` as a process; entering waits for its commands, leaving ends it with the signal `how`."""

    def __init__(self, directory, *options, how=signal.SIGTERM):
        self.how, self.out = how, directory / "out"
        config = str(directory / "run.toml")
        command = [sys.executable, "-m", "shmrl", "node", config, f"--run.output-dir={self.out}", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        self.lines = [self.process.stdout.readline() for _ in range(6)]
        self.arena = load_env_server([self.out / "configs" / "envs" / "train" / "a.toml"]).arena
        return self

    def __exit__(self, *_):
        self.process.send_signal(self.how)
        self.code = self.process.wait(10)
        self.process.stdout.close()


def segments_of(arena):
    return [name for name in leftovers.segments() if arena.address.removeprefix("shm:") in name]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_node_hosts_by_hand_prints_the_commands_and_removes_everything_at_a_signal(tree, tmp_path, how):
    with Node(tmp_path, how=how) as node:
        assert f"  shmrl env-server {node.out}/configs/envs/train/a.toml\n" in node.lines
        assert f"  shmrl orchestrator {node.out}/configs/orchestrator.toml\n" in node.lines
        assert (node.out / "weights" / "step_0" / "model.safetensors").exists()
        assert load_run([tmp_path / "run.toml", node.out / "node.toml"]).arena == node.arena
        Arena.attach(node.arena.address).close()
        assert psutil.Process(node.process.pid).children() == []  # one node needs no server
        assert len(read_token(node.arena)) == 32
    assert node.code == 128 + how
    assert not (node.out / "node.toml").exists()
    assert not tree.socket_dir.exists()
    assert segments_of(node.arena) == []


def test_a_node_with_an_address_has_a_server_that_is_started_again_and_shows_no_token(tmp_path, capfd):
    """And that ends with the node, however that ends. Without a tiny model to be made the node is up at once."""
    (tmp_path / "run.toml").write_text("[model]\npath = '.'" + RUN[RUN.index("\n[arena]") :])
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with Node(tmp_path, f"--node.address=127.0.0.1:{port}", "--log.level=debug", how=signal.SIGKILL) as node:
        token = read_token(node.arena)
        with Arena.attach(node.arena.address) as arena, Client(token, patience_s=20) as client:
            handle = arena.put(b"x")
            for _ in range(2):
                assert client.call(url, "blocks/adopt", handles=[handle]) is None
                commands = [process.cmdline() for process in leftovers.processes()]
                assert not any(token in word for command in commands for word in command)
                (server,) = psutil.Process(node.process.pid).children()
                assert server.name().startswith("shmrl:node")
                server.kill()
                server.wait()
            assert client.call(url, "blocks/discard", tag_prefix="none") == 0
        (server,) = psutil.Process(node.process.pid).children()
    server.wait(10)
    said = capfd.readouterr().err
    assert said.count("is started again") == 2
    assert "POST /v1/blocks/adopt: 200" in said
    assert token not in said
    unlink(node.arena.address)
    with exclusive(load_run([tmp_path / "run.toml"], {"run.output-dir": str(node.out)})):
        pass


def test_what_a_killed_node_left_is_removed_by_the_next(tree, tmp_path):
    with Node(tmp_path) as first:
        first.process.kill()
        first.process.wait()
        assert segments_of(first.arena)
        assert (tree.socket_dir / "token").exists()
        with Node(tmp_path, "--resume") as second:
            assert segments_of(first.arena) == []
            assert second.arena.address != first.arena.address
    assert not tree.socket_dir.exists()


def test_a_node_server_that_does_not_end_at_sigterm_is_killed(tree, monkeypatch):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    monkeypatch.setattr(host, "node_command", lambda _: [sys.executable, "-c", code])
    monkeypatch.setattr(host, "GRACE_S", 0.05)
    served = tree.model_copy(update={"node": NodeConfig(address="127.0.0.1:1")})
    out, into = os.pipe()
    with monkeypatch.context() as patch, os.fdopen(out) as said:
        patch.setattr(host.subprocess, "Popen", functools.partial(subprocess.Popen, stdout=into))
        beside = host._Server(served, None)
        os.close(into)
        assert said.readline() == "up\n"
        beside.close()
    assert beside._process.returncode == -signal.SIGKILL
