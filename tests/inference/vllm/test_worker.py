"""The file that runs inside vLLM's workers, without vLLM: what it loads, and what it refuses to touch."""

import itertools
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from shmrl.inference.vllm.launch import PLUGIN

sys.path.insert(0, str(PLUGIN))
import shmrl_broadcast as broadcast
import shmrl_vllm_worker as plugin

WEIGHTS = {"embed.weight": torch.arange(12.0).reshape(4, 3), "norm.weight": torch.ones(3)}


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint("name", **tensors): a directory with WEIGHTS, some of them replaced (None: left out), in two files."""

    def make(name, **changes):
        directory = tmp_path / name
        directory.mkdir()
        tensors = {**WEIGHTS, **{key.replace("__", "."): value for key, value in changes.items()}}
        for index, (key, value) in enumerate(tensors.items()):
            if value is not None:
                save_file({key: value}, directory / f"model-{index}.safetensors", {"format": "pt"})
        return directory

    return make


class Worker(plugin.ShmrlWorker):
    """A worker whose model keeps what it is given; `broken` reloads fail half-way."""

    def __init__(self, served):
        self.weights, self.broken, self.rank, self.local_rank = dict(plugin.read_tensors([served])), 0, 0, 0
        parallel = SimpleNamespace(data_parallel_size=1)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(served)), parallel_config=parallel)
        self.model_runner = SimpleNamespace(device=torch.device("cpu"))

    def _shmrl_reload(self, weights):
        for name, tensor in weights:
            self.weights[name] = tensor.clone()
            if self.broken:
                self.broken -= 1
                raise MemoryError("no room")

    def same_as(self, directory):
        return all(torch.equal(self.weights[name], tensor) for name, tensor in plugin.read_tensors([directory]))


def test_a_directory_is_loaded_whole(checkpoint):
    worker = Worker(checkpoint("served"))
    new = checkpoint("new", embed__weight=torch.zeros(4, 3))
    answer = worker.shmrl_load_weights(str(new))
    assert (answer["tensors"], "error" in answer) == (2, False)
    assert worker.same_as(new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm__weight": None}, r"lacks 1 tensors \['norm.weight'\]"),
        ({"head__weight": torch.ones(1)}, r"1 unknown ones \['head.weight'\]"),
        ({"norm__weight": torch.ones(4)}, r"norm.weight has shape \[4\], served is \[3\]"),
    ],
)
def test_a_directory_of_another_model_is_refused_before_anything_changes(checkpoint, change, message):
    served = checkpoint("served")
    worker = Worker(served)
    answer = worker.shmrl_load_weights(str(checkpoint("new", **change)))
    assert re.search(message, answer["error"])
    assert worker.same_as(served)


@pytest.mark.parametrize("size", [0, 5, 40, -4])
def test_a_file_that_is_cut_short_is_refused(checkpoint, size):
    served, new = checkpoint("served"), checkpoint("new")
    worker = Worker(served)
    file = new / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model-0.safetensors is cut short" in worker.shmrl_load_weights(str(new))["error"]
    assert worker.same_as(served)


def test_a_reload_that_fails_half_way_brings_the_last_whole_version_back(checkpoint):
    worker = Worker(checkpoint("served"))
    first = checkpoint("first", embed__weight=torch.zeros(4, 3))
    second = checkpoint("second", embed__weight=torch.ones(4, 3))
    worker.shmrl_load_weights(str(first))
    worker.broken = 1
    assert worker.shmrl_load_weights(str(second))["error"] == "MemoryError: no room"
    assert worker.same_as(first)
    worker.broken = 1
    shutil.rmtree(first)
    gone = worker.shmrl_load_weights(str(second))["error"]
    assert re.search("did not come back either .*first has no .*stop this engine", gone)
    worker.shmrl_load_weights(str(second))
    worker.broken = 2
    assert re.search("did not come back either .*stop this engine", worker.shmrl_load_weights(str(second))["error"])


def test_received_files_are_loaded_and_kept_until_others_were(checkpoint):
    """The last whole version is what a reload that fails brings back, so its memory is held; nothing else is."""
    worker, sender, numbers = Worker(checkpoint("served")), broadcast.Sender(torch.device("cpu")), itertools.count()

    def update(directory):
        transfer = (f"transfer-{next(numbers)}", str(directory), "1", "2")
        files = worker.shmrl_receive_weights("127.0.0.1", str(sender.port), *transfer)["files"]
        return worker.shmrl_load_weights(*files)

    first, second = (checkpoint(name, embed__weight=torch.full((4, 3), float(name))) for name in ("1", "2"))
    assert update(first)["tensors"] == 2
    assert worker.same_as(first)
    worker.broken = 1
    assert update(second)["error"] == "MemoryError: no room"
    assert worker.same_as(first)
    assert update(second)["tensors"] == 2
    assert worker.same_as(second)
    assert "lacks 1 tensors" in update(checkpoint("other", norm__weight=None))["error"]
    assert worker.same_as(second)
    assert "none has no" in worker.shmrl_receive_weights("127.0.0.1", str(sender.port), "t", "/none", "1", "2")["error"]
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in worker._shmrl_received.values()]
    assert [name.split()[0] for name in held] == [f"/memfd:shmrl-weights-model-{i}.safetensors" for i in (0, 1)]
    worker.rank = worker.local_rank = 1  # the other workers of an engine map what the first one received
    assert worker.shmrl_receive_weights("127.0.0.1", "0", "t", "/none", "1", "2").keys() == {"seconds"}
    worker.local_rank = 0
    assert "engines on one machine" in worker.shmrl_receive_weights("127.0.0.1", "0", "t", "/none", "1", "2")["error"]
    sender.close()
    for descriptor in worker._shmrl_received.values():
        os.close(descriptor)
