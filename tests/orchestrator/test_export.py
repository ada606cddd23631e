"""`shmrl replay`: a step that was shipped, out of a living and out of a dead arena, into a file and back to arrays."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace

import numpy as np
import pytest

from shmrl.arena import Arena, unlink
from shmrl.config import socket_dir
from shmrl.errors import ConfigError, RunError
from shmrl.node.server import NodeServer
from shmrl.orchestrator import export
from shmrl.orchestrator.shipped import ShippedStep, ShippedSteps, kept_in
from shmrl.payload import micro_batches_to_wire, pack
from shmrl.payload.reassemble import assembled, assembled_lines, show, shown
from shmrl.wire import pack as packed
from tests.orchestrator.fakes import sample

TOKEN = "5ec2e7" * 5 + "ab"


def shipped(arena, output_dir, step, ranks, nodes=None, token_file=""):
    common = {"kind": "step", "step": step, "state": {"groups": step}} | ({"nodes": nodes} if nodes else {})
    messages = tuple(packed({**common, "micro_batches": micro_batches_to_wire(micros)}) for micros in ranks)
    return ShippedStep(step, "t", str(output_dir), arena.address, {"train/reward": 0.5}, messages, str(token_file))


@pytest.fixture(autouse=True)
def _own_sockets(tmp_path, monkeypatch):
    """Runs of other tests are not seen."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def ranks(worker):
    samples = [sample(worker, f"t/a/g/{i}", T=10 + i) for i in range(6)]
    return pack(samples, seq_len=32, num_ranks=2)


@pytest.fixture
def steps(tmp_path):
    return ShippedSteps(socket_dir(tmp_path / "out") / "steps")


def test_the_newest_file_stays_when_its_blocks_are_let_go(arena, tmp_path, steps, ranks):
    for step in (4, 5, 6):
        steps.add(shipped(arena, tmp_path / "out", step, ranks))
    assert list(steps) == [4, 5, 6]
    steps.let_go(4)
    steps.let_go(6)
    assert (list(steps), kept_in(socket_dir(tmp_path / "out") / "steps")) == ([5], [5, 6])
    assert (5 in steps, 6 in steps, steps.last.step, steps.last.state) == (True, False, 6, {"groups": 6})
    assert steps[5].micro_batches == ranks
    steps.add(shipped(arena, tmp_path / "out", 7, ranks))
    assert kept_in(socket_dir(tmp_path / "out") / "steps") == [5, 7]


def test_a_successor_finds_the_steps_of_its_arena_and_of_no_other(arena, tmp_path, steps, ranks):
    steps.add(shipped(arena, tmp_path / "out", 4, ranks))
    after = ShippedSteps(socket_dir(tmp_path / "out") / "steps")
    after.load(arena.address)
    assert (list(after), after.last) == ([4], steps.last)
    after.load("shm:another")
    assert (list(after), after.last) == ([], None)
    after.load(arena.address)
    assert (list(after), after.last) == ([], None)


def test_a_step_of_a_live_run_is_found_chosen_and_written(arena, tmp_path, steps, ranks):
    steps.add(shipped(arena, tmp_path / "out", 4, ranks))
    whole = export.export(4, None, tmp_path / "whole", None)
    assert export.exported(whole).startswith("step 4 of run t: 4 micro batches, 6 blocks, ")
    one = export.export(4, tmp_path / "out", tmp_path / "one", "1:0")
    assert (one["micro_batches"], one["blocks"]) == (1, len(ranks[1][0].handles))
    with pytest.raises(RunError, match=r"step 4 has no micro batch 2:0: 2 ranks with 2 each, from 0:0"):
        export.export(4, None, tmp_path / "none", "2:0")
    with pytest.raises(ConfigError, match="rank:number"):
        export.export(4, None, tmp_path / "none", "first")
    with pytest.raises(RunError, match=r"has no step 9 now, there are 4: arena.retain_steps"):
        export.export(9, tmp_path / "out", tmp_path / "none", None)
    with pytest.raises(RunError, match="no run on this host has a step 9 now"):
        export.export(9, None, tmp_path / "none", None)
    ShippedSteps(socket_dir(tmp_path / "two") / "steps").add(shipped(arena, tmp_path / "two", 4, ranks))
    with pytest.raises(RunError, match=rf"name one: .*{tmp_path}/two"):
        export.export(4, None, tmp_path / "none", None)
    arena.discard("t")
    with pytest.raises(RunError, match=r"step 4 of .* is not held any more: block"):
        export.export(4, tmp_path / "out", tmp_path / "none", None)
    assert not (tmp_path / "none").exists()


@pytest.fixture
def there():
    """The arena of another node."""
    with Arena.create("16MiB") as made:
        yield made
        made.unlink()


def test_blocks_of_other_nodes_are_fetched_into_the_file(arena, worker, there, tmp_path, steps, monkeypatch):
    monkeypatch.setattr(export, "PATIENCE_S", 0.2)
    samples = [sample(place, f"t/a/g/{i}", T=10 + i) for i, place in enumerate((worker, there) * 3)]
    ranks = pack(samples, seq_len=32, num_ranks=2)
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    with NodeServer(there, TOKEN) as server:
        steps.add(shipped(arena, tmp_path / "out", 4, ranks, {there.origin: server.url}, token_file))
        found = export.export(4, None, tmp_path / "both", None)
        assert (found["micro_batches"], found["blocks"]) == (4, 6)
        assert server.counters["sent_bytes"] == sum(one.handles[0].nbytes for one in samples[1::2])
        assert (arena.stats()["blocks"], there.stats()["blocks"]) == (3, 3)
        token_file.write_text("0" * 32)
        with pytest.raises(RunError, match=r"step 4 of .* has blocks on other nodes .http://127.0.0.1:.*401"):
            export.export(4, None, tmp_path / "none", None)
        token_file.unlink()
        with pytest.raises(RunError, match="the run's token cannot be read"):
            export.export(4, None, tmp_path / "none", None)
        token_file.write_text(TOKEN)
        there.free(samples[1].handles)
        with pytest.raises(RunError, match=r"step 4 of .* is not held any more: block"):
            export.export(4, None, tmp_path / "none", None)
    with pytest.raises(RunError, match=r"step 4 of .* has blocks on other nodes .*given up after"):
        export.export(4, None, tmp_path / "none", None)
    steps.add(shipped(arena, tmp_path / "out", 5, ranks))
    with pytest.raises(RunError, match=rf"no server is known for those of {there.origin}"):
        export.export(5, None, tmp_path / "none", None)
    assert not (tmp_path / "none").exists()

    here = {T: sample(worker, f"t/a/h/{T}", T=T) for T in range(10, 16)}  # the same, packed the same, on one node
    alike = [[replace(batch, samples=tuple(here[one.T] for one in batch.samples)) for batch in rank] for rank in ranks]
    steps.add(shipped(arena, tmp_path / "out", 6, alike))
    export.export(6, None, tmp_path / "one", None)
    there.discard("t")
    arena.discard("t")
    both, one = assembled(tmp_path / "both"), assembled(tmp_path / "one")
    assert both["arrays"] == one["arrays"]


DYING = """
import hashlib, json, os, signal, sys
from dataclasses import replace
from pathlib import Path
from shmrl.arena import Arena
from shmrl.config import socket_dir
from shmrl.orchestrator.shipped import ShippedSteps
from shmrl.payload import assemble, pack
from tests.orchestrator.fakes import sample
from tests.orchestrator.test_export import shipped

out = Path(sys.argv[1])
arena = Arena.create("8MiB", run_id="t")
ranks = pack([sample(arena, f"t/a/g/{i}", T=10 + i) for i in range(6)], seq_len=32, num_ranks=2)
ShippedSteps(socket_dir(out) / "steps").add(shipped(arena, out, 7, ranks))
arrays = {
    f"{rank}:{number}/{name}": hashlib.sha256(array.tobytes()).hexdigest()
    for rank, micros in enumerate(ranks) for number, micro in enumerate(micros)
    for name, array in assemble(arena, micro).arrays().items()
}
print(json.dumps([arena.address, arrays]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "shmrl", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_step_of_a_dead_run_assembles_in_a_fresh_process_to_the_same_digests(tmp_path):
    died = subprocess.run(
        [sys.executable, "-c", DYING, tmp_path / "out"], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    address, expected = json.loads(died.stdout)
    file = tmp_path / "seven"
    try:
        assert "4 micro batches, 6 blocks" in command("replay", "export", 7, "--out", file)
    finally:
        unlink(address)
    found = json.loads(command("replay", "assemble", file, "--npz", tmp_path / "arrays.npz", "--json"))
    assert {row["array"]: row["sha256"] for row in found["arrays"]} == expected
    lines = assembled_lines(assembled(file)).splitlines()
    assert (len(lines), lines[-1]) == (1 + len(expected), f"{found['sha256']}  step 7 of run t")
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert arrays.files == list(expected)
        assert [arrays[row["array"]].dtype.name for row in found["arrays"]] == [row["dtype"] for row in found["arrays"]]
    text = shown(show(file))
    assert text.startswith("step 7 of run t: 4 micro batches, 6 blocks of ")
    assert "rank 1, micro batch 1: " in text
    assert "name a/g/3, T 13, S 6" in text
