"""Runs over three real SLURM nodes: one trains, two have an engine and a replica each; TCP alone is between them.

`.ci/run slurm` brings the cluster up, or says that it cannot; by hand: SHMRL_TEST_CLUSTER=../shared/cluster/cluster.
"""

import os
import re
import signal

import pytest

from tests.support.clock import wait_until
from tests.support.cluster import NODES, SCRIPT, Job, on_host, on_node, restart, segments
from tests.support.runs import ROOT, SLOW, TINY, Run, warmed_up, with_model

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SCRIPT, reason="no cluster: SHMRL_TEST_CLUSTER names the script that started one"),
]
SEVERAL = """
[deployment]
kind = "multi_node"
trainer_nodes = 1
inference_nodes = 2
[slurm]
grace_s = 30
"""


@pytest.fixture
def submit(tmp_path):
    """`submit(text, *options, **flags)`: a job of a run; it is over when the test is."""
    jobs = []

    def start(text, *options, **flags):
        path = tmp_path / "run.toml"
        path.write_text(text + SEVERAL)
        jobs.append(Job(tmp_path / "out", path, *options, **flags))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()


def everything_is_gone():
    left = {number: found for number in (1, 2, 3) if (found := segments(number))}
    assert not left


def counted(text, name):
    """The sum of a counter over the last words of node servers."""
    return sum(int(value.replace(",", "")) for value in re.findall(rf"{name} ([\d,]+)", text))


def test_a_run_over_three_nodes(submit):
    """Placement, addresses, logs, accounting over the network, and that nothing is left."""
    job = submit(TINY)
    assert job.finish() == 0, job.log
    assert (job.record["status"], job.record["exit_code"]) == ("finished", 0)
    names = {path.name for path in (job.out / "logs" / "latest").glob("*.log")}
    assert names == {
        "orchestrator.log",
        "trainer.node1.log",
        *(f"inference.{node}.log" for node in NODES[1:]),
        *(f"{role}.{node}.log" for node in NODES for role in ("launcher", "node")),
    }
    replicas = [job.published(f"envs/train/words.{node}") for node in NODES[1:]]
    assert len({one["origin"] for one in replicas}) == 2
    assert {one["run_id"] for one in replicas} == {job.record["run_id"]}
    assert all(
        one["address"].startswith(f"tcp://10.77.0.1{number}:") for number, one in zip((2, 3), replicas, strict=True)
    )
    assert all(line["payload/dropped_micro_batches"] == 0 for line in job.steps)
    served = job.logs("node.node[23].log")
    fetched = job.logs("node.node1.log")
    assert counted(served, "sent_bytes") == counted(fetched, "fetched_bytes")
    assert counted(fetched, "fetched_bytes") == sum(line["payload/bytes"] for line in job.steps) > 0  # once per node
    assert counted(fetched, "lost") == 0
    spread = re.search(
        r"source 'words': episodes by replica: node2 ([\d,]+), node3 ([\d,]+)", job.logs("orchestrator.log")
    )
    shares = [int(count.replace(",", "")) for count in spread.groups()]
    assert min(shares) >= 0.3 * sum(shares)
    everything_is_gone()


@pytest.mark.long
@pytest.mark.timeout(5000)
def test_it_learns_as_much_as_on_one_node(submit, tmp_path):
    """The README's main job, from one warmed-up model: three runs on this machine, and one over three nodes."""
    text = warmed_up((ROOT / "configs" / "reverse-text.toml").read_text(), tmp_path / "warm-up")
    alone = []
    for number in range(3):
        directory = tmp_path / f"alone{number}"
        directory.mkdir()
        one = Run(directory, text=text, sources=2).start()
        assert one.finish(900)[0] == 0
        alone.append(reward(one.metrics()[-5:]))
    job = submit(text, **{"trainer.ranks": 1})
    assert job.finish(1200) == 0, job.log
    steps = [line for line in job.steps if line["step"]]
    over = reward(steps[-5:])
    print(f"reward of the last five of {len(steps)} steps: over three nodes {over:.4f}, on one {alone}")
    assert over >= reward(steps[:3]) + 0.2
    assert abs(over - sum(alone) / 3) <= 0.05
    assert all(line["payload/dropped_micro_batches"] == 0 for line in steps)
    everything_is_gone()


def reward(lines):
    """Its mean over these steps."""
    return round(sum(line["train/reward"] for line in lines) / len(lines), 4)


def test_ranks_on_two_nodes_train_one_model(submit):
    """Gloo between them, half of every step each, fetched by its node alone; one checkpoint and one set of weights."""
    over = {"deployment.trainer_nodes": 2, "deployment.inference_nodes": 1, "trainer.ranks": 2}
    job = submit(TINY, **over, **{"trainer.checkpoint.interval": 1})
    assert job.finish() == 0, job.log
    assert (job.record["status"], job.record["exit_code"]) == ("finished", 0)
    names = {path.name for path in (job.out / "logs" / "latest").glob("*.log")}
    assert {"trainer.node1.log", "trainer.node2.log", "orchestrator.log", "inference.node3.log"} <= names
    assert all(line["payload/dropped_micro_batches"] == 0 for line in job.steps)
    fetched = {node: counted(job.logs(f"node.{node}.log"), "fetched_bytes") for node in NODES}
    assert fetched["node1"] > 0 < fetched["node2"]
    assert fetched["node3"] == 0
    assert sum(fetched.values()) == sum(line["payload/bytes"] for line in job.steps)
    assert sum(fetched.values()) == counted(job.logs("node.node3.log"), "sent_bytes")
    assert [*(job.out / "checkpoints").glob("step_*/STABLE")]
    everything_is_gone()


def test_the_token_is_in_no_log_and_no_command_line(submit):
    job = submit(with_model(SLOW))
    job.reach(1)
    token = re.search(r'"token": "(\w{32})"', (job.out / "configs" / "job.json").read_text())[1]
    assert token not in on_host("ps", "axww", "-o", "args")
    assert token not in job.log + job.logs("*.log") + job.logs("envs/*/*.log")


def test_a_request_to_drain_writes_a_checkpoint_and_a_new_job_resumes(submit):
    job = submit(with_model(SLOW), **{"trainer.checkpoint.interval": 0, "run.max_steps": 40})
    job.reach(2)
    (job.out / "drain").touch()
    assert job.finish() == 130, job.log
    saved = [path.parent.name for path in (job.out / "checkpoints").glob("step_*/STABLE")]
    assert len(saved) == 1
    everything_is_gone()
    before = job.record["run_id"]
    again = submit(with_model(SLOW), "--resume", **{"run.max_steps": int(saved[0].removeprefix("step_")) + 2})
    assert again.finish() == 0, again.log
    assert again.record["run_id"] != before
    everything_is_gone()


def test_an_orchestrator_that_dies_leaves_a_checkpoint_of_the_last_step(submit):
    job = submit(with_model(SLOW), **{"trainer.checkpoint.interval": 0, "run.max_steps": 40})
    job.reach(2)
    os.kill(int(re.search(r"started orchestrator \(pid (\d+)\)", job.log)[1]), signal.SIGKILL)
    assert job.finish() == 1
    assert "orchestrator exited with code -9" in job.record["reason"]
    assert [*(job.out / "checkpoints").glob("step_*/STABLE")], job.log
    everything_is_gone()


def test_what_dies_or_is_cut_off_takes_only_itself(submit):
    """A node server, a link for 5 s, a replica, an inference node, one after the other, in one run that finishes."""
    job = submit(with_model(SLOW), **{"run.max_steps": 14})
    job.reach(1)
    before = job.published("addresses/node.node2")
    job.kill("addresses/node.node2")
    wait_until(lambda: job.published("addresses/node.node2")["pid"] != before["pid"], 30, "a new node server")
    assert job.published("addresses/node.node2")["address"] == before["address"]
    on_node(
        2, "sh", "-c", "ip link set eth0 down; sleep 5; ip link set eth0 up; ip route replace default via 10.77.0.1"
    )
    seen = job.steps[-1]["step"]
    job.reach(seen + 2)
    assert all(line["payload/dropped_micro_batches"] == 0 for line in job.steps)
    job.kill("envs/train/words.node3")
    seen = job.steps[-1]["step"]
    job.reach(seen + 1)
    on_host(SCRIPT, "kill", 3)
    try:
        wait_until(lambda: job.record["status"] != "running", 300, "the end of the run")
        on_host(
            "scontrol", "update", "nodename=node3", "state=down", "reason=killed"
        )  # else SLURM waits for it for 300 s
        assert job.finish() == 0, job.log
    finally:
        restart()
    assert (job.record["status"], job.steps[-1]["step"]) == ("finished", 14)
    assert max(line["time/step"] for line in job.steps) < 120  # 60 s of patience, once
