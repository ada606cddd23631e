"""Every role started by hand, as the README has it; the orchestrator is stopped and resumed beside running servers."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.clock import wait_until
from tests.support.runs import MODEL, ROOT, SLOW, START_S, Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SECOND = """
[[orchestrator.train.source]]
name = "letters"
env.id = "alphabet-sort"
sampling = { top_p = 0.95, top_k = 32, max_tokens = 6 }
"""


class Terminal:
    """One role in one terminal."""

    def __init__(self, directory, *arguments):
        self.path = directory / f"{arguments[0]}-{len(list(directory.glob('*.txt')))}.txt"
        with self.path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shmrl", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def finish(self, timeout_s=120):
        self.process.wait(timeout_s)
        return self.process.returncode, self.path.read_text()

    def alive(self):
        return self.process.poll() is None

    def stop(self):
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)


def test_roles_by_hand_and_an_orchestrator_that_comes_back(tmp_path):
    run = Run(tmp_path, text=SLOW + MODEL + SECOND, sources=2)
    configs = run.output_dir / "configs"
    servers, others = [], []
    try:
        node = _node_and_servers(tmp_path, run, servers, others)
        trainer, orchestrator = _trainer_and_orchestrator(tmp_path, configs, others)
        wait_until(lambda: len(run.metrics()) >= 2 or not orchestrator.alive(), START_S, "step 2")
        orchestrator.process.send_signal(signal.SIGINT)
        assert orchestrator.finish()[0] == 130, orchestrator.path.read_text()
        assert trainer.finish()[0] == 0, trainer.path.read_text()
        assert len(run.metrics()) < 6
        trainer, orchestrator = _trainer_and_orchestrator(tmp_path, configs, others, "--resume")
        assert orchestrator.finish()[0] == 0, orchestrator.path.read_text()
        assert trainer.finish()[0] == 0, trainer.path.read_text()
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
        assert all(server.alive() for server in servers)
    finally:
        for one in (*servers, *reversed(others)):
            one.stop()
    assert {server.finish()[0] for server in servers} == {128 + signal.SIGTERM}
    assert node.finish()[0] == 128 + signal.SIGTERM
    assert not run.tree.socket_dir.exists()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_idle_minutes_are_silent(tmp_path):
    """SH-12: who waits for nothing warns of nothing."""
    run = Run(tmp_path, text=SLOW + MODEL + SECOND, sources=2)
    servers, others = [], []
    try:
        _node_and_servers(tmp_path, run, servers, others)
        time.sleep(600)
        for one in (*servers, *others):
            assert one.alive()
            assert not re.search(r"^\S+ [WEC] ", one.path.read_text(), re.MULTILINE), one.path.read_text()
    finally:
        for one in (*servers, *reversed(others)):
            one.stop()


def _node_and_servers(directory, run, servers, others):
    """The node, once it is ready, which goes to `others`; engine and env servers are started and go to `servers`."""
    configs = run.output_dir / "configs"
    node = Terminal(directory, "node", *run.files, *run.flags)
    others.append(node)
    wait_until(lambda: "shmrl orchestrator" in node.path.read_text() or not node.alive(), START_S, "the node")
    for role in (("inference", configs / "inference.toml"), *_env_servers(configs)):
        servers.append(Terminal(directory, *role))
    return node


def _env_servers(configs):
    return [("env-server", configs / "envs" / "train" / f"{name}.toml") for name in ("words", "letters")]


def _trainer_and_orchestrator(directory, configs, started, *options):
    trainer = Terminal(directory, "trainer", configs / "trainer.toml", *options)
    orchestrator = Terminal(directory, "orchestrator", configs / "orchestrator.toml", *options)
    started += [trainer, orchestrator]
    return trainer, orchestrator
