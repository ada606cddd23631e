"""Weights from rank 0 to engines over a process group of their own: gloo here, the ends in threads or in processes."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from shmrl.inference.vllm.launch import PLUGIN

sys.path.insert(0, str(PLUGIN))
import shmrl_broadcast as broadcast

CPU = torch.device("cpu")
ENGINE = """
import json, os, sys, torch, shmrl_broadcast as broadcast
at, directory = ("127.0.0.1", int(sys.argv[1])), sys.argv[2]
files = broadcast.receive(*at, "first", directory, 1, 3, torch.device("cpu"))
print(json.dumps([os.pread(file, 1 << 20, 0).hex() for file in files]), flush=True)
broadcast._Group.move = lambda *_: os._exit(7)
broadcast.receive(*at, "second", directory, 1, 2, torch.device("cpu"))
"""


@pytest.fixture
def sender():
    one = broadcast.Sender(CPU)
    yield one
    one.close()


@pytest.fixture
def published(tmp_path):
    """published("name", a=10, b=20): a directory of files with so many random bytes."""

    def make(name, **sizes):
        directory = tmp_path / name
        directory.mkdir()
        for file, nbytes in sizes.items():
            (directory / f"{file}.safetensors").write_bytes(os.urandom(nbytes))
        return directory

    return make


@pytest.fixture
def receivers():
    """receivers(sender, name, path, engines=2): a future per engine of what `receive` gives."""
    with ThreadPoolExecutor(4) as pool:

        def start(sender, name, path, engines=2, present=None):
            ranks = range(1, engines + 1) if present is None else present
            at = ("127.0.0.1", sender.port, name, str(path))
            return [pool.submit(broadcast.receive, *at, rank, engines + 1, CPU) for rank in ranks]

        yield start


def taken(future):
    """The files that one engine received; its memory is given back."""
    found = []
    for descriptor in future.result(60):
        found.append(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        os.close(descriptor)
    return found


def test_every_engine_has_the_files_byte_for_byte(sender, published, receivers, monkeypatch):
    monkeypatch.setattr(broadcast, "CHUNK", 1 << 16)  # several chunks, the last of them short
    for name in ("step_1", "step_2"):
        directory = published(name, a=300_001, b=7)
        wanted = [file.read_bytes() for file in sorted(directory.iterdir())]
        assert [taken(engine) for engine in receivers(sender, name, directory)] == [wanted, wanted]


def test_an_engine_is_another_process_without_shmrl_and_the_next_transfer_works_after_it_died_in_one(
    sender, published, receivers
):
    directory = published("step_1", a=1000)
    (file,) = directory.iterdir()
    environment = {**os.environ, "PYTHONPATH": str(PLUGIN), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ENGINE, str(sender.port), str(directory)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as engine:
        (other,) = receivers(sender, "first", directory, present=[2])
        assert taken(other) == [file.read_bytes()]
        output, _ = engine.communicate(timeout=60)
    assert json.loads(output) == [file.read_bytes().hex()]
    assert engine.returncode == 7
    assert [taken(engine) for engine in receivers(sender, "third", directory)] == [[file.read_bytes()]] * 2


def test_an_engine_without_room_ends_the_transfer_everywhere_and_the_next_one_works(
    sender, published, receivers, monkeypatch, caplog
):
    directory, calls = published("step_1", a=1000), []

    def full(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broadcast.os, "posix_fallocate", full)
        for engine in receivers(sender, "first", directory):
            with pytest.raises(RuntimeError, match=r"has no room for 1,000 B of weights: .*No space left"):
                engine.result(60)
    assert len(calls) == 2
    wanted = [file.read_bytes() for file in sorted(directory.iterdir())]
    assert [taken(engine) for engine in receivers(sender, "second", directory)] == [wanted, wanted]
    assert f"the weights in {directory} did not reach every engine" in caplog.text
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert not [name for name in opened if name.startswith("/memfd:shmrl")]


def test_a_directory_that_is_not_there_is_refused(sender, receivers, tmp_path):
    for engine in receivers(sender, "t", tmp_path / "none"):
        with pytest.raises(RuntimeError, match=r"trainer rank 0: .*none has no"):
            engine.result(60)


def test_an_engine_that_never_comes_is_given_up(sender, published, receivers, monkeypatch):
    directory, short = published("step_1", a=1000), timedelta(seconds=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "TIMEOUT", short)
        sender._store.set_timeout(short)
        (engine,) = receivers(sender, "first", directory, present=[1])
        with pytest.raises(RuntimeError, match=r"trainer rank 0: .*ready/2"):
            engine.result(60)
    sender._store.set_timeout(broadcast.TIMEOUT)
    assert [len(taken(engine)) for engine in receivers(sender, "second", directory)] == [1, 1]


def test_an_engine_killed_while_it_asks_is_skipped_and_holds_up_no_close(sender, published, receivers, monkeypatch):
    monkeypatch.setattr(broadcast, "HOLE_S", 0.1)
    broadcast._store("127.0.0.1", sender.port).add("asked", 1)  # and never sets ask/1
    directory = published("step_1", a=1000)
    assert [len(taken(engine)) for engine in receivers(sender, "first", directory)] == [1, 1]
    monkeypatch.setattr(broadcast, "HOLE_S", 1e9)
    broadcast._store("127.0.0.1", sender.port).add("asked", 1)
    sender.close()
    assert not sender._thread.is_alive()


@pytest.mark.parametrize(
    "said", ["{}", "[]", "null", "no json", '{"name": "a", "path": "/", "host": "h", "world": "x"}']
)
def test_an_ask_that_is_none_is_logged_and_the_next_one_works(sender, published, receivers, caplog, said):
    store = broadcast._store("127.0.0.1", sender.port)
    store.set(f"ask/{store.add('asked', 1)}", said)
    assert len(taken(receivers(sender, "first", published("step_1", a=10), engines=1)[0])) == 1
    assert "ask 1 for weights is none" in caplog.text
