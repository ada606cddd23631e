"""configs/examples/embed: each program runs, is short, and its trainer gets the same bytes. Ray and TRL are of `.ci/run
interop`; by hand, set SHMRL_EMBED_PYTHON to an interpreter that has them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "configs" / "examples" / "embed"


@pytest.fixture(scope="module")
def expected():
    """The digest of what went in, from the branches, without encode, arena or assemble."""
    script = """
import hashlib, numpy as np
from engine import N, branch
found = []
for i in range(N):
    b = branch(i)
    routing = np.asarray(b.rows["routing"].values)
    head_ids, head_logprobs = (b.rows[name].values for name in ("head_ids", "head_logprobs"))
    counts = np.zeros(b.T, np.int32)
    counts[b.loss_mask] = b.rows["mask"].counts
    covered = np.arange(b.T) < b.T - 1
    arrays = {
        "tokens": b.tokens, "positions": np.arange(b.T, dtype=np.int32), "loss_mask": b.loss_mask,
        "logprobs": b.logprobs, "routing": routing, "routing/covered": covered, "head_ids": head_ids,
        "head_ids/covered": b.loss_mask, "head_logprobs": head_logprobs, "head_logprobs/covered": b.loss_mask,
        "mask": b.rows["mask"].values, "mask/counts": counts, "mask/covered": b.loss_mask,
    }
    digest = hashlib.sha256()
    for name, rows in sorted(arrays.items()):
        digest.update(f"{name} {rows.dtype} {rows.shape}".encode() + rows.tobytes())
    found.append(digest.hexdigest())
print(hashlib.sha256("".join(sorted(found)).encode()).hexdigest())
"""
    return run(sys.executable, "-c", script).strip()


def run(python, *arguments):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parents[2])]),
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run([python, *arguments], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_none_is_long():
    assert {path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) >= 60} == set()


def check(python, name, expected):
    said = json.loads(run(python, str(EXAMPLES / f"{name}.py")).splitlines()[-1])
    assert said == {"example": name, "sequences": 8, "sha256": expected, "blocks": 0}


@pytest.mark.parametrize("name", ["torch_loop", "env_worker"])
def test_a_program_of_its_own(name, expected):
    check(sys.executable, name, expected)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["ray_worker", "trl_grpo"])
def test_inside_another_library(name, expected):
    python = os.environ.get("SHMRL_EMBED_PYTHON")
    if python is None:
        pytest.skip("SHMRL_EMBED_PYTHON is not set")
    check(python, name, expected)
