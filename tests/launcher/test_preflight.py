"""What must fail before a process starts: with the numbers and names a person needs, and all at once."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmrl.arena import memory
from shmrl.config import load_run
from shmrl.config.shape import ModelShape
from shmrl.errors import ConfigError, PortInUse
from shmrl.launcher import preflight
from shmrl.launcher.preflight import arena_budget, check
from shmrl.node import host
from shmrl.node.host import available_memory
from shmrl.units import size
from tests.env.sessions.conftest import serving_sessions
from tests.support.runs import free_ports

RUN = """
[model.tiny]
[orchestrator]
batch_size = 32
[[orchestrator.train.source]]
name = "a"
env.id = "reverse-text"
"""
DENSE = {"num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 2048}


@pytest.fixture
def load(tmp_path):
    def build(text=RUN, **flags):
        path = tmp_path / "run.toml"
        path.write_text(text)
        port = free_ports(2)
        ports = {"orchestrator.env_server_base_port": port, "inference.port": port + 1}
        given = {key.replace("__", "."): value for key, value in flags.items()}
        return load_run([path], {key: str(value) for key, value in {**ports, **given}.items()})

    return build


@pytest.fixture
def dense(tmp_path, load):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DENSE))
    text = RUN.replace("[model.tiny]", f'[model]\npath = "{tmp_path}/model"')
    return lambda **flags: load(text, **flags)


def problems(tree):
    with pytest.raises(ConfigError) as caught:
        check(tree)
    return caught.value.problems


def test_router_replay_on_a_dense_model_names_the_field_and_the_keys_looked_for(dense, tmp_path):
    (line,) = problems(dense())
    assert "'routing'" in line
    assert "num_experts, num_local_experts, n_routed_experts" in line
    assert f"{tmp_path}/model/config.json" in line
    check(dense(trainer__router_replay="false"))


def test_a_head_wider_than_the_vocabulary_and_a_context_longer_than_the_model(dense):
    flags = {"trainer__router_replay": "false", "trainer__head": 301, "inference__max_logprobs": 400}
    found = problems(dense(**flags, inference__max_model_len=4096))
    assert any("trainer.head = 301 exceeds the vocabulary" in line and "300" in line for line in found)
    assert any("4096 exceeds max_position_embeddings = 2048" in line for line in found)


def test_a_sandbox_without_bwrap_is_refused_before_anything_starts(load, monkeypatch, tmp_path):
    sandboxed = RUN + 'serve.sandbox = "bwrap"\n'
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = problems(load(sandboxed))
    assert line.startswith("orchestrator.train.source 'a': serve.sandbox = 'bwrap': bubblewrap is not installed")
    assert "apt-get install -y bubblewrap" in line


def test_a_path_without_a_model_is_named(load, tmp_path):
    (line,) = problems(load(RUN.replace("[model.tiny]", f'[model]\npath = "{tmp_path}"')))
    assert line.startswith(f"model.path: {tmp_path}/config.json does not describe a model: No such file or directory")


def test_unknown_environments_are_named_with_their_source_all_at_once(load):
    text = (
        RUN.replace("reverse-text", "revers-text") + '[[orchestrator.eval.source]]\nname = "b"\nenv.id = "no.such:Env"'
    )
    first, second = problems(load(text))
    assert first.startswith("orchestrator.train.source 'a': ")
    assert "did you mean reverse-text?" in first
    assert second.startswith("orchestrator.eval.source 'b': ")


def test_sixteen_gibibytes_of_heads_do_not_fit_an_arena_of_eight(load, monkeypatch):
    roomy = [memory.Limit("/dev/shm", 64 << 30, 64 << 30)]
    monkeypatch.setattr(memory, "limits", lambda _: roomy)
    shape = {"orchestrator__seq_len": 16384, "inference__max_model_len": 16384, "model__tiny__max_positions": 16384}
    head = {"trainer__head": 128, "inference__max_logprobs": 128, "trainer__router_replay": "false"}
    tree = load(**shape, **head, orchestrator__max_inflight=1024, arena__capacity="8GiB")
    budget = arena_budget(tree, ModelShape(4, tuple(range(4)), 8, 2, 264, 16384))
    assert budget.per_token["head"] == 1024
    assert budget.needed > 16 << 30
    (line,) = problems(tree)
    assert "max_inflight 1,024 x 16,384 tokens x 1,036.2 B = 16.2 GiB, arena.capacity is 8.0 GiB (configured)" in line


def test_retained_steps_take_their_part_of_the_arena(load):
    flags = {"arena__capacity": "2MiB", "orchestrator__batch_size": 8, "orchestrator__group_size": 8}
    check(load(**flags))
    (line,) = problems(load(**flags, arena__retain_steps=19))
    assert "max_inflight 16 x 1,024 tokens and retain_steps 19 x 8,192 tokens, x 20.2 B = 3.3 MiB" in line
    assert "orchestrator.seq_len, arena.retain_steps or trainer.head" in line


def test_what_does_not_fit_the_arena_may_fit_the_spill_directory(load, tmp_path, monkeypatch):
    flags = {"arena__capacity": "1MiB", "orchestrator__max_inflight": 1024}
    (line,) = problems(load(**flags))
    assert line.endswith("or let what does not fit go to a disk: arena.on_full = 'spill' with arena.spill_dir")
    spilling = load(**flags, arena__on_full="spill", arena__spill_dir=tmp_path)
    check(spilling)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    (line,) = problems(spilling)
    assert "arena.capacity is 1.0 MiB (configured), arena.spill_dir has 3.0 MiB free: raise it, or lower" in line


def test_a_dev_shm_that_cannot_be_written_to_is_named(load, monkeypatch):
    monkeypatch.setattr(host, "SHM", Path("/proc/sys"))  # read-only for everybody
    (line,) = problems(load(arena__capacity="16MiB"))
    assert "/proc/sys is missing or cannot be written to, and the arena is made there" in line
    assert check(load(arena__capacity="16MiB", arena__backing="memfd")).capacity == 16 << 20


def test_a_small_dev_shm_names_both_sizes_and_the_flag(load, monkeypatch):
    small = 64 << 20
    monkeypatch.setattr(memory.os, "statvfs", lambda _: SimpleNamespace(f_blocks=small, f_bavail=small, f_frsize=1))
    assert check(load(arena__capacity="64MiB")).capacity == small
    (line,) = problems(load(arena__capacity=small + 1))
    assert f"{small + 1} bytes (64.0 MiB) are needed, /dev/shm has {small} bytes (64.0 MiB) available" in line
    assert "--shm-size=65m" in line
    assert check(load(arena__capacity=small + 1, arena__backing="memfd")).capacity == small + 1


def test_a_file_arena_is_bounded_by_its_own_mount(load, tmp_path):
    free = memory.limits(tmp_path)[0].free
    found = problems(load(arena__capacity=free + (1 << 30), arena__backing="file", arena__base=tmp_path))
    assert any(f"{tmp_path} has " in line and "free space there" in line for line in found)
    (line,) = problems(load(arena__capacity="16MiB", arena__backing="file", arena__base=tmp_path / "none"))
    assert f"{tmp_path}/none is missing" in line


def test_the_default_capacity_is_half_of_what_is_free(load):
    tree = load()
    assert check(tree).capacity == pytest.approx(available_memory(tree.arena) // 2, rel=0.1)


def test_a_taken_port_names_port_and_holder(load):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key, who in (
            ("orchestrator__env_server_base_port", "env-server train/a"),
            ("inference__port", "inference"),
        ):
            with pytest.raises(PortInUse) as caught:
                check(load(**{key: port}))
            assert f"{who}: port {port} is in use by" in str(caught.value)
            assert f"(pid {os.getpid()})" in str(caught.value)


def test_two_roles_on_one_port_are_refused(load):
    port = free_ports(1)
    with pytest.raises(PortInUse, match=f"inference and env-server train/a would both bind port {port}"):
        check(load(inference__port=port, orchestrator__env_server_base_port=port))
    with pytest.raises(PortInUse, match=f"inference and the node server would both bind port {port}"):
        check(load(inference__port=port, node__address=f"127.0.0.1:{port}"))


@pytest.mark.parametrize(("nbytes", "text"), [(17, "17 B"), (1536, "1.5 KiB"), (3 << 29, "1.5 GiB")])
def test_sizes_as_people_read_them(nbytes, text):
    assert size(nbytes) == text


def test_two_versions_of_the_weights_fit_in_shared_memory_beside_the_arena(load, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**DENSE, "dtype": "bfloat16"}))
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 30))
    monkeypatch.setattr(host, "available_memory", lambda arena: 8 << 30)
    text = RUN.replace("[model.tiny]", f'[model]\npath = "{tmp_path}/model"\n[inference]\nbackend = "vllm"')
    flags = {"trainer__router_replay": "false", "inference__urls": '["http://127.0.0.1:1"]'}
    check(load(text, **flags, arena__capacity="1GiB"))
    (line,) = problems(load(text, **flags, arena__capacity="1025MiB"))
    assert "take 4.0 GiB of /dev/shm while one replaces the other, which has 4.0 GiB free beside the arena" in line


async def test_remote_sessions_that_cannot_suffice_are_refused(load):
    async with serving_sessions("guess-number", max_concurrent_envs=16) as client:
        remote = f'env.url = "{client.server.url}"\nenv.max_turns = 4'
        text = RUN.replace('env.id = "reverse-text"', remote) + f'[[orchestrator.eval.source]]\nname = "e"\n{remote}\n'
        tree = load(text, orchestrator__max_inflight=16)
        (line,) = await asyncio.to_thread(preflight._remote, tree)
        assert line == (
            f"{client.server.url}: 16 sessions (max_concurrent_envs), and this run opens up to 17: 16 "
            "(orchestrator.max_inflight) and 1 for evaluation"
        )
        assert preflight._remote(load(text.replace(client.server.url, "http://127.0.0.1:9"))) == []
        enough = load(text, orchestrator__max_inflight=15, orchestrator__group_size=5, orchestrator__batch_size=15)
        assert await asyncio.to_thread(preflight._remote, enough) == []


def test_other_interpreters_are_asked_after_all_else_and_at_once(load, tmp_path):
    """One that knows the environment and one that does not answer like it; what is wrong elsewhere is said as well."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\necho asked >> {tmp_path}/log; exec {sys.executable} "$@"\n""")
    python.chmod(0o755)
    more = f'serve.python = "{python}"\n[[orchestrator.eval.source]]\nname = "b"\nenv.id = "my_env:Nothing"\n'
    text = f'{RUN}{more}serve.python = "{python}"\n'
    assert problems(load(text)) == [
        f"orchestrator.eval.source 'b': serve.python = '{python}': env id 'my_env:Nothing': there is no module "
        f"'my_env' on the Python path or in {os.getcwd()}"
    ]
    assert (tmp_path / "log").read_text() == "asked\n" * 2


def test_an_environment_of_verifiers_names_what_it_needs(load):
    (found,) = problems(load(RUN.replace('env.id = "reverse-text"', 'legacy.id = "reverse-text"')))
    assert found.startswith("orchestrator.train.source 'a': env id 'legacy:reverse-text': a [legacy] environment needs")
    assert "pip install 'verifiers<0.2'" in found
