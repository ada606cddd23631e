"""kill -9 of the trainer or the orchestrator in a run that may restart it: it goes on as if nothing had happened."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict

import numpy as np
import pytest

from shmrl.arena import inspect
from shmrl.errors import ForeignArena
from shmrl.orchestrator import export
from shmrl.orchestrator.shipped import kept_in
from tests.support.clock import wait_until
from tests.support.runs import RUN, START_S, slow, with_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = [1, 2, 3, 4, 5, 6]
DYING = RUN.replace("[trainer]", '[trainer]\nloss = { kind = "custom", path = "tests.support.dying:record" }')


def lives(directory):
    """{(step, rank, number): [arrays of each process that read it]}"""
    found = defaultdict(list)
    for path in sorted(directory.glob("*.npz"), key=lambda path: path.stat().st_mtime):
        step, rank, number, _ = map(int, path.stem.split("-"))
        with np.load(path) as file:
            found[step, rank, number].append({name: file[name] for name in file.files})
    return found


def test_a_trainer_killed_between_assembly_and_release_reads_the_same_bytes_again(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SHMRL_TEST_READ", str(tmp_path))
    monkeypatch.setenv("SHMRL_TEST_DIES", "5:1")
    settings = {"run.restarts.trainer": 1, "trainer.checkpoint.interval": 3, "arena.retain_steps": 2}
    one = run(text=with_model(DYING), **settings, **{"trainer.ranks": 2, "orchestrator.seq_len": 128}).start()
    wait_until((tmp_path / "died").exists, START_S, "the death of a rank")
    file = tmp_path / "step_4"
    export.export(4, one.output_dir, file, None)  # while the trainer is away
    code, output = one.finish()
    assert code == 0, output
    assert "restarting trainer (1 of 1)" in output
    one.assert_nothing_left()
    assert [line["step"] for line in one.metrics()] == STEPS
    assert sum(line["payload/dropped_micro_batches"] for line in one.metrics()) == 0

    read = lives(tmp_path)
    assert {step: {len(arrays) for place, arrays in read.items() if place[0] == step} for step in STEPS} == {
        1: {1}, 2: {1}, 3: {1}, 4: {2}, 5: {2}, 6: {1},
    }  # fmt: skip
    for place, (first, *others) in read.items():
        for again in others:
            assert list(again) == list(first)
            assert all(again[name].tobytes() == array.tobytes() for name, array in first.items()), place
    _check_exported(file, {place: arrays[0] for place, arrays in read.items() if place[0] == 4})


def _check_exported(file, read):
    """A fresh process says the digests of what the ranks read."""
    command = [sys.executable, "-m", "shmrl", "replay", "assemble", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert {row["array"]: row["sha256"] for row in json.loads(done.stdout)["arrays"]} == {
        f"{rank}:{number}/{name}": hashlib.sha256(array.tobytes()).hexdigest()
        for (_, rank, number), arrays in read.items()
        for name, array in arrays.items()
    }


def test_a_killed_orchestrator_is_followed_by_one_that_adopts_what_was_finished(run):
    one = run(text=slow(), **{"run.restarts.orchestrator": 1, "run.max-steps": 12}).start()
    one.wait_for_step(2)
    (rank,), (pid,), address = one.pids("trainer:0"), one.pids("orchestrator"), one.record()["addresses"]["arena"]
    os.kill(rank, signal.SIGSTOP)  # so that there is a step that is trained, and groups finish meanwhile
    stopped = wait_until(lambda: _stopped(one, pid, address), 60, "a finished group beside a step that is trained")
    finished, unfinished, since = stopped
    os.kill(pid, signal.SIGKILL)
    os.kill(rank, signal.SIGCONT)
    events = _events(one, address, since)
    code, output = one.finish()
    assert code == 0, output
    assert "restarting orchestrator (1 of 1)" in output
    one.assert_nothing_left()
    lines = one.metrics()
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all({"train/reward", "train/loss", "time/collect"} <= line.keys() for line in lines)
    assert [line["episodes/shipped"] for line in lines] == [16] * 12
    assert sum(line["episodes/failed"] + line["payload/dropped_micro_batches"] for line in lines) == 0
    log = (one.output_dir / "logs" / "latest" / "orchestrator.log").read_text()
    (adopted,) = re.findall(r"adopted (\d+) groups that were finished and not shipped", log)
    assert int(adopted) >= len(finished) // 4  # and what had its last reply on the way
    assert set(events["free"].values()) == {1}
    assert all(events["ship"][block] and events["free"][block] for block in finished)
    assert all(events["free"][block] for block in unfinished)


def _stopped(one, pid, address):
    """The orchestrator is stopped: blocks of groups that are finished and not shipped, those of groups that are not
    finished, and the number of the next event; False, and it goes on, if none is finished or no step is trained."""
    os.kill(pid, signal.SIGSTOP)
    groups = defaultdict(list)
    with inspect.look(address) as seen:
        for row in seen.rows(inspect.Filter(state="ready")):
            if "shipped" not in row["flags"] and row["owner"].startswith("orchestrator "):
                groups[row["tag"].rpartition("/")[0]].append((row["slot"], row["generation"]))
        since = 1 + seen.events()[-1]["number"]
    finished = {block for blocks in groups.values() if len(blocks) == 4 for block in blocks}
    if finished and kept_in(one.tree.socket_dir / "steps")[-1] > one.metrics()[-1]["step"]:
        return finished, {block for blocks in groups.values() if len(blocks) < 4 for block in blocks}, since
    os.kill(pid, signal.SIGCONT)
    return False


def _events(one, address, first):
    """{event: how often it happened to (slot, generation)} until the run is over."""
    found = defaultdict(Counter)
    while one.process.poll() is None:
        try:
            with inspect.look(address) as seen:
                events = seen.events(first)
        except ForeignArena:
            break
        for event in events:
            found[event["event"]][event["slot"], event["generation"]] += 1
            first = event["number"] + 1
        time.sleep(0.05)  # the ring keeps 4,096 events
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6, 0.9])
def test_trainer_and_orchestrator_killed_together_come_back_to_one_run(run, delay_s):
    settings = {"run.restarts.trainer": 1, "run.restarts.orchestrator": 1, "arena.retain_steps": 2}
    one = run(text=slow(), **settings, **{"trainer.checkpoint.interval": 3, "trainer.ranks": 2}).start()
    one.wait_for_step(4)
    time.sleep(delay_s)  # anywhere in a step
    for title in ("trainer:1", "orchestrator"):
        (pid,) = one.pids(title)
        os.kill(pid, signal.SIGKILL)
    code, output = one.finish(300)
    assert code == 0, output
    one.assert_nothing_left()
    assert [line["step"] for line in one.metrics()] == STEPS
    assert sum(line["payload/dropped_micro_batches"] for line in one.metrics()) == 0
