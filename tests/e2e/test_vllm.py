"""Whole runs with a real vLLM of their own: it learns, and what happens when vLLM is killed."""

import os
import signal

import psutil
import pytest

from tests.inference.vllm.server import vllm_python
from tests.support.clock import wait_until
from tests.support.runs import MODEL, ROOT, RUN

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1800)]

BOOT_S = 600.0  # three processes import torch one after the other
ENGINE = 'backend = "vllm"\nmax_model_len = 64\n[inference.vllm]\nenforce_eager = true\n'
KILLED = RUN.replace("max_steps = 6", "max_steps = 1000").replace("max_model_len = 64\n", ENGINE)
KILLED += "[trainer.loss]\nscore_centering = true\n"  # refuses a batch without the sampler's heads
KILLED += MODEL + "head_dim = 32\n"


def engine_pids(one):
    """The server, which the launcher started, and what it started itself."""
    for child in psutil.Process(one.process.pid).children():
        if any("vllm.entrypoints" in word for word in child.cmdline()):
            return [child.pid, *(below.pid for below in child.children(recursive=True))]
    return []


def test_it_learns_and_the_engine_has_the_trainers_weights_at_every_step(run):
    one = run(ROOT / "configs" / "vllm-tiny.toml", **{"inference.python": vllm_python()}).start()
    code, output = one.finish(1500)
    assert code == 0, output
    one.assert_nothing_left()
    lines = one.metrics()
    assert len(lines) >= 10
    for line in lines:  # an update each, and sampler and trainer agree: with routing and masks, to rounding
        assert line["train/grad_norm"] > 0
        assert line["off_policy/max"] == 0
        assert line["train/mismatch_kl"] <= 1e-6
        assert line["payload/routing_missing_fraction"] == 0
        assert (line["episodes/failed"], line["payload/rejected_branches"]) == (0, 0)
    reward = [line["train/reward"] for line in lines]
    print(
        "reward", " ".join(f"{value:.3f}" for value in reward), f"KL {max(x['train/mismatch_kl'] for x in lines):.1e}"
    )
    assert sum(reward[-3:]) / 3 - sum(reward[:3]) / 3 >= 0.05
    assert (lines[-1]["arena/blocks"], lines[-1]["arena/created"]) == (0, lines[-1]["arena/freed"])


def test_a_killed_vllm_is_restarted_within_the_budget_and_ends_the_run_beyond_it(run):
    flags = {"inference.python": vllm_python(), "run.restarts.inference": 1, "inference.weight-transfer": "broadcast"}
    one = run(text=KILLED, **flags).start()
    one.wait_for_step(2, BOOT_S)
    first = engine_pids(one)
    assert len(first) >= 3
    done = one.metrics()[-1]["step"]
    os.kill(first[0], signal.SIGKILL)
    one.wait_for_step(done + 3, BOOT_S)
    assert not [pid for pid in first if psutil.pid_exists(pid)]
    assert all(line["train/mismatch_kl"] < 0.5 for line in one.metrics())
    (server, *_) = engine_pids(one)
    os.kill(server, signal.SIGKILL)
    code, output = one.finish(60)
    assert code == 1, output
    assert "restarting inference (1 of 1)" in output
    log = one.output_dir / "logs" / "attempt_1" / "inference.log"
    assert f"inference exited with code -9 (killed by SIGKILL)\n  last lines of {log}:\n  | " in output
    wait_until(lambda: one.record()["status"] == "failed", what="run.json")
    one.assert_nothing_left()
