"""A SLURM cluster that is up already (`../shared/cluster/cluster up 3`; `.ci/run slurm` does it), and jobs on it.

The test session has a network and a /dev/shm of its own (`private`), so SLURM's commands run in slurmctld's.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support import leftovers
from tests.support.clock import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = os.environ.get("SHMRL_TEST_CLUSTER", "")
STATE = Path(os.environ.get("SHMRL_CLUSTER_DIR", "/tmp/shmrl-cluster"))
NODES = ("node1", "node2", "node3")


def on_host(*command, check=True):
    """Its standard output; the command runs where SLURM does."""
    controller = (STATE / "slurmctld.pid").read_text().strip()
    inside = ["nsenter", "--target", controller, "--mount", "--net", "--", *map(str, command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)  # nproc heeds it
    done = subprocess.run(inside, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def restart():
    """All nodes anew. They are nobody's children, and outlive the test."""
    on_host("env", "-u", leftovers.MARK, "sh", "-c", f"{SCRIPT} down; exec {SCRIPT} up 3")


def on_node(number, *command):
    return on_host(SCRIPT, "exec", number, *command)


def segments(number):
    """What shared memory of ours node `number` has."""
    return [name for name in on_node(number, "ls", "/dev/shm").split() if name.startswith("shmrl")]


class Job:
    """A run submitted as a job; its output directory and what can be seen of it."""

    def __init__(self, out, config, *options, **flags):
        self.out = out
        given = [f"--{key}={value}" for key, value in {"run.output_dir": out, **flags}.items()]
        printed = on_host(sys.executable, "-m", "shmrl", "run", config, "--slurm", *options, *given)
        self.id = re.search(r"^job (\d+): ", printed, re.MULTILINE)[1]

    @property
    def log(self):
        path = self.out / "logs" / f"job-{self.id}.log"
        return path.read_text() if path.exists() else ""

    def logs(self, pattern):
        return "".join(path.read_text() for path in sorted((self.out / "logs" / "latest").glob(pattern)))

    @property
    def record(self):
        return json.loads((self.out / "run.json").read_text())

    @property
    def steps(self):
        """Lines of metrics.jsonl, by step."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def reach(self, step, timeout_s=300):
        """Wait until a step is done; what happened instead is the failure's text."""
        wait_until(lambda: self.over or any(line["step"] >= step for line in self.steps), timeout_s, f"step {step}")
        assert not self.over, self.log

    @property
    def over(self):
        return not on_host("squeue", "--noheader", "--jobs", self.id, check=False).strip()

    def finish(self, timeout_s=420):
        """The job's exit code."""
        wait_until(lambda: self.over, timeout_s, f"the end of job {self.id}")
        shown = on_host("scontrol", "show", "job", self.id)
        return int(re.search(r"ExitCode=(\d+):\d+", shown)[1])

    def published(self, name):
        """What an address file says: `published("envs/train/words.node2")`."""
        return json.loads((self.out / f"{name}.address").read_text())

    def kill(self, name):
        """SIGKILL of the process that published an address."""
        pid = self.published(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), what=f"the end of {name}")

    def cancel(self):
        on_host("scancel", self.id, check=False)
        wait_until(lambda: self.over, 90, f"the end of job {self.id}")
