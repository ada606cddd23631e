"""Whole runs as processes: a tiny configuration, `shmrl run` started and watched from outside, what it left."""

import atexit
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import psutil
import tomli_w

from shmrl.config import dump_toml, load_run
from shmrl.node.host import tiny_model_command
from tests.support import leftovers
from tests.support.clock import wait_until

ROOT = Path(__file__).parents[2]
START_S = 90.0  # imports of torch in several processes on two busy cores

MODEL = """
[model.tiny]
layers = 2
hidden = 32
heads = 2
kv_heads = 1
experts = 4
moe_intermediate = 32
"""
RUN = """
[run]
name = "tiny"
max_steps = 6
[arena]
capacity = "64MiB"
[inference]
max_model_len = 64
[orchestrator]
batch_size = 16
group_size = 4
seq_len = 64
[orchestrator.filters]
zero_advantage = false
[[orchestrator.train.source]]
name = "words"
env = { id = "reverse-text", args = { min_length = 2, max_length = 4 } }
sampling = { top_p = 0.95, top_k = 32, max_tokens = 6 }
[trainer]
head = 4
[trainer.checkpoint]
interval = 1
"""

TINY = RUN + MODEL
SLOW = RUN.replace('"reverse-text", args = {', '"tests.support.slow_env:SlowReverseText", args = { delay_s = 0.7,')


@functools.cache
def _model_path():
    """The model of MODEL, made once for all tests, so that their runs start sooner."""
    directory = Path(tempfile.mkdtemp(prefix="shmrl-test-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "run.toml").write_text(TINY)
    (directory / "resolved.toml").write_text(
        dump_toml(load_run([directory / "run.toml"], {"run.output-dir": str(directory)}))
    )
    subprocess.run(tiny_model_command(directory / "resolved.toml"), check=True, cwd=ROOT)
    return directory / "weights" / "step_0"


def with_model(text, engine=None):
    """`text` with the path of a model that is there already, and with an engine that is."""
    if engine is not None:
        text = text.replace("[inference]", f'[inference]\nurls = ["{engine.url}"]')
    return f'{text}\n[model]\npath = "{_model_path()}"\n'


def warmed_up(text, directory):
    """`text`, which has [model.tiny] and [warmup], with the path of the model that these make in their place: a run of
    one step in `directory` makes it."""
    directory.mkdir()
    run = Run(directory, text=text, sources=2, **{"run.max-steps": 1}).start()
    code, output = run.finish(600)
    assert code == 0, output
    tables = tomllib.loads(text)
    del tables["model"], tables["warmup"]
    return tomli_w.dumps({**tables, "model": {"path": str(run.output_dir / "weights" / "step_0")}})


def slow():
    return with_model(SLOW)


def free_ports(count):
    """The first of `count` consecutive free ports below the range the kernel hands out by itself."""
    while True:
        first = random.randrange(12_000, 31_000)
        if all(_free(port) for port in range(first, first + count)):
            return first


def _free(port):
    """Nobody listens there (connections that linger after their ends were closed do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Run:
    """One output directory, started as often as a test wants (`start`, `start("--resume")`)."""

    def __init__(self, directory, *files, text=None, sources=1, within=(), **flags):
        """within: a command that ends in exec "$@", around `shmrl run` (a mount namespace, a limit)."""
        self.output_dir, self.within = directory / "out", within
        if text is not None:
            files = (directory / "run.toml",)
            files[0].write_text(text)
        port = free_ports(sources + 1)
        self.base_port, self.engine_port = port, port + sources
        given = {
            "run.output-dir": self.output_dir,
            "orchestrator.env-server-base-port": port,
            "inference.port": port + sources,
        }
        self.flags = [f"--{key}={value}" for key, value in {**given, **flags}.items()]
        self.files = [str(file) for file in files]
        self.tree = load_run(list(files), {f[2:].partition("=")[0]: f.partition("=")[2] for f in self.flags}).absolute()
        self.ports = range(port, port + sources + 1)
        self.process = None
        self.terminal = directory / "terminal.txt"

    def start(self, *options):
        with self.terminal.open("wb") as output:
            command = [*self.within, sys.executable, "-m", "shmrl", "run", *self.files, *self.flags, *options]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{self.output_dir.parent}"}
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.output_dir.parent,
            )
        return self

    def finish(self, timeout_s=150.0):
        """The exit code and what was printed."""
        self.process.wait(timeout_s)
        return self.process.returncode, self.terminal.read_text()

    def metrics(self):
        """Lines of metrics.jsonl so far."""
        path = self.output_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step, timeout_s=START_S):
        def reached():
            assert self.process.poll() is None, self.terminal.read_text()
            return any(line["step"] >= step for line in self.metrics())

        wait_until(reached, timeout_s, f"step {step}")

    def wait_for_checkpoint(self, step, timeout_s=START_S):
        path = self.output_dir / "checkpoints" / f"step_{step}" / "STABLE"
        wait_until(path.exists, timeout_s, f"checkpoint {step}")

    def record(self):
        return json.loads((self.output_dir / "run.json").read_text())

    def pids(self, title):
        """Pids of this run's processes whose title starts with `shmrl:<title>`."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if _title(child).startswith(f"shmrl:{title}")]

    def assert_nothing_left(self, timeout_s=10.0):
        """No process, bound port, socket directory or shared memory of this run, at the latest `timeout_s` from now."""
        arena = self.record()["addresses"]["arena"].removeprefix("shm:")
        deadline = time.monotonic() + timeout_s
        while left := self._left(arena):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _left(self, arena):
        titled = [str(process) for process in leftovers.processes() if self._ours(process)]
        ports = [port for port in self.ports if not _free(port)]
        sockets = [str(self.tree.socket_dir)] if self.tree.socket_dir.exists() else []
        return [*titled, *ports, *sockets, *(name for name in leftovers.segments() if arena in name)]

    def _ours(self, process):
        try:
            return process.pid != os.getpid() and process.cwd() == str(self.output_dir.parent)
        except psutil.Error:
            return False

    def stop(self):
        """End whatever a failed test left running."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)


def _title(process):
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""
