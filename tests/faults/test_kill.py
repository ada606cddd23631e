"""kill -9 of one process at a time in a running run: who notices, what is said, what is left, and that it resumes."""

import os
import signal

import pytest

from tests.support.clock import wait_until
from tests.support.runs import slow

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS = [1, 2, 3, 4, 5, 6]


def resume_to_the_end(run):
    code, output = run.start("--resume").finish()
    assert code == 0, output
    run.assert_nothing_left()
    assert [line["step"] for line in run.metrics()] == STEPS
    assert run.record()["status"] == "finished"


@pytest.mark.parametrize(
    ("title", "name", "ranks"),
    [
        ("env-server", "env-server train/words", 1),
        ("orchestrator", "orchestrator", 1),
        ("trainer:1", "trainer", 2),
        ("inference", "inference", 1),
    ],
)
def test_a_killed_role_ends_the_run_and_resume_finishes_it(run, title, name, ranks):
    one = run(text=slow(), **{"trainer.ranks": ranks}).start()
    one.wait_for_step(2)
    (pid,) = one.pids(title)
    os.kill(pid, signal.SIGKILL)
    code, output = one.finish(30)
    assert code == 1, output
    assert f"{name} exited with code" in output
    assert f"last lines of {one.output_dir}/logs/attempt_1/" in output
    assert one.record()["reason"].startswith(f"{name} exited with code")
    one.assert_nothing_left()
    resume_to_the_end(one)


def test_a_killed_engine_with_a_budget_is_restarted_and_the_step_repeated(run):
    one = run(text=slow(), **{"run.restarts.inference": 1}).start()
    one.wait_for_step(2)
    (pid,) = one.pids("inference")
    os.kill(pid, signal.SIGKILL)
    code, output = one.finish()
    assert code == 0, output
    assert "restarting inference (1 of 1)" in output
    one.assert_nothing_left()
    lines = one.metrics()
    assert [line["step"] for line in lines] == STEPS
    assert sum(line["episodes/shipped"] for line in lines) >= 6 * 16
    assert sum(line["episodes/failed"] for line in lines) == 0  # requests wait for the engine


def test_a_killed_launcher_leaves_nothing_and_resume_finishes_the_run(run):
    one = run(text=slow()).start()
    one.wait_for_step(2)
    one.process.kill()
    one.process.wait()
    one.assert_nothing_left()
    wait_until(lambda: one.record()["status"] == "killed", what="run.json closed by the janitor")
    resume_to_the_end(one)


def test_a_killed_env_worker_is_replaced_and_the_run_goes_on(run):
    one = run(text=slow().replace("[trainer]", "serve.pool.workers = 2\n[trainer]")).start()
    one.wait_for_step(1)
    workers = one.pids("env-worker")
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    code, output = one.finish()
    assert code == 0, output
    one.assert_nothing_left()
    lines = one.metrics()
    assert [line["step"] for line in lines] == STEPS
    failed = sum(line["episodes/failed"] for line in lines)
    assert failed <= 16  # those it was running, half of max_inflight, and no more
    shipped = sum(line["episodes/shipped"] for line in lines)
    assert 6 * 16 <= shipped <= 6 * 16 + 3 * failed  # a step's groups of 4 stay whole: with one of 3 they are 19
