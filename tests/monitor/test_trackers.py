"""TensorBoard and W&B: names and rows they get, one run over attempts, and that their failures are only warnings.

The libraries here are stand-ins that record what they are told; the real ones are in the interop tests.
"""

import json
import sys
import threading
import time
import types

import pytest

from shmrl.config import load_run
from shmrl.monitor import trackers
from tests.support.runs import TINY


class FakeWandb(types.ModuleType):
    """What of wandb is used. raises: what each call of `log` raises."""

    def __init__(self, raises=None, gate=None):
        super().__init__("wandb")
        self.told, self.logged, self.finished, self.raises, self.gate = [], [], 0, raises, gate
        self.Settings = dict
        self.Table = lambda columns, data: {"columns": columns, "data": data}

    def init(self, **told):
        self.told.append(told)
        return self

    def log(self, found, step):
        if self.gate is not None:
            self.gate.wait(20)
        if self.raises is not None:
            raise self.raises
        self.logged.append((step, found))

    def finish(self):
        self.finished += 1


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "run.toml").write_text(TINY)
    flags = {"run.output-dir": str(tmp_path / "out"), "monitor.wandb.project": "p", "monitor.wandb.mode": "offline"}
    (tmp_path / "out" / "rollouts").mkdir(parents=True)
    return load_run([tmp_path / "run.toml"], flags).absolute()


def use(monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_the_same_names_and_a_table_of_rollouts(tree, monkeypatch):
    fake = use(monkeypatch, FakeWandb())
    row = {"source": "words", "task_id": "t", "reward": 1.0, "advantage": 0.5, "tokens": 9, "stop_reason": "stop"}
    row |= {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ih"}]}
    (tree.run.output_dir / "rollouts" / "step_3.jsonl").write_text(json.dumps(row) + "\n")
    told = trackers.Trackers(tree, None)
    told.write({"step": 3, "train/loss": 0.25, "train/reward/words": 1, "train/entropy": None})
    told.close()
    ((step, found),) = fake.logged
    assert (step, fake.finished) == (3, 1)
    assert found.pop("rollouts") == {
        "columns": list(trackers.COLUMNS),
        "data": [[3, "words", "t", 1.0, 0.5, 9, "stop", "user: hi\nassistant: ih"]],
    }
    assert found == {"train/loss": 0.25, "train/reward/words": 1.0}
    (init,) = fake.told
    assert (init["project"], init["mode"], init["name"], init["resume"]) == ("p", "offline", "tiny", "allow")
    assert init["config"]["run"]["max_steps"] == 6


def test_attempts_that_continue_a_run_are_one_run(tree, monkeypatch):
    fake = use(monkeypatch, FakeWandb())
    for completed in (None, 2, None):
        trackers.Trackers(tree, completed).close()
    first, again, anew = (told["id"] for told in fake.told)
    assert first == again != anew


def test_a_failure_is_a_warning_that_does_not_repeat_for_ever(tree, monkeypatch, caplog):
    use(monkeypatch, FakeWandb(raises=ConnectionError("no network")))
    told = trackers.Trackers(tree, None)
    for step in range(20):
        told.write({"step": step})
    told.close()
    assert caplog.text.count("ConnectionError: no network; the run goes on") == trackers.WARNINGS


def test_a_library_that_cannot_be_imported_is_a_warning(tree, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    told = trackers.Trackers(tree, None)
    told.write({"step": 1})
    told.close()
    assert "Weights & Biases: ModuleNotFoundError" in caplog.text


def test_one_that_hangs_delays_nothing_and_keeps_a_bounded_queue(tree, monkeypatch, caplog):
    gate = threading.Event()
    fake = use(monkeypatch, FakeWandb(gate=gate))
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    told = trackers.Trackers(tree, None)
    began = time.monotonic()
    for step in range(2 * trackers.WAITING):
        told.write({"step": step})
    told.close()
    assert time.monotonic() - began < 10
    assert "is left out" in caplog.text
    assert "it hangs" in caplog.text
    gate.set()
    told.close()
    assert len(fake.logged) <= trackers.WAITING + 2


def test_nobody_asked_nothing_runs(tree):
    quiet = tree.model_copy(update={"monitor": tree.monitor.model_copy(update={"wandb": None})})
    threads = threading.active_count()
    told = trackers.Trackers(quiet, None)
    told.write({"step": 1})
    told.close()
    assert threading.active_count() == threads
