"""The job of a run: its script as text, what the script does (real bash, with SLURM's commands stood in for), and what
`shmrl run --slurm` writes and refuses."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shmrl.cli import main
from shmrl.config import load_run
from shmrl.errors import ConfigError
from shmrl.launcher import slurm
from shmrl.launcher.job import Opened, open_job
from tests.support.clock import wait_until
from tests.support.runs import TINY

ROOT = Path(__file__).parents[2]
SEVERAL = {"deployment.kind": "multi_node", "deployment.trainer_nodes": "2", "deployment.inference_nodes": "4"}
APART = {"deployment.prefill_nodes": "1", "inference.backend": "vllm", "trainer.router_replay": "false"}


def config(directory, **flags):
    (directory / "run.toml").write_text(TINY)
    given = {"run.output_dir": str(directory / "out"), "trainer.ranks": "2", **SEVERAL, **flags}
    return load_run([directory / "run.toml"], given).absolute()


def starts(script):
    """(role, first node, number of nodes) of every srun, in order."""
    found = re.findall(r"^on (\w+) (\d+) (\d+) &$", script, re.MULTILINE)
    return [(role, int(first), int(count)) for role, first, count in found]


# ------------------------------------------------------------------------------------------------------------ text


def test_the_regular_layout_has_the_trainer_on_the_first_nodes(tmp_path):
    script = slurm.render(config(tmp_path))
    assert starts(script) == [("inference", 2, 4), ("trainer", 0, 2)]
    assert "#SBATCH --nodes=6\n" in script
    assert "2 trainer + 4 inference nodes" in script
    assert "--no-kill --kill-on-bad-exit=0" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_prefill_and_decode_apart(tmp_path):
    script = slurm.render(config(tmp_path, **APART))
    assert starts(script) == [("prefill", 2, 1), ("decode", 3, 3), ("trainer", 0, 2)]
    assert "2 trainer + 1 prefill + 3 decode nodes" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_job_without_its_router_is_not_submitted(tmp_path, stand_ins, monkeypatch):
    stand_ins("sbatch", f"touch {tmp_path}/asked")
    monkeypatch.setattr(slurm, "_check", lambda _: None)  # of this machine's vLLM
    with pytest.raises(ConfigError, match=r"prefill_nodes = 1: nothing here starts the router"):
        slurm.submit(config(tmp_path, **APART))
    assert not (tmp_path / "asked").exists()


def test_one_node(tmp_path):
    script = slurm.render(config(tmp_path, **dict.fromkeys(SEVERAL, "1") | {"deployment.kind": "single_node"} | ONE))
    assert starts(script) == [("single", 0, 1)]
    assert "#SBATCH --nodes=1\n" in script


ONE = {"deployment.trainer_nodes": "1", "deployment.inference_nodes": "0"}


def test_what_slurm_is_asked_for(tmp_path):
    flags = {
        "slurm.job_name": "qwen",
        "slurm.partition": "h200",
        "slurm.account": "lab",
        "slurm.time": "1-00:00:00",
        "slurm.gpus_per_node": "8",
        "slurm.grace_s": "300",
        "slurm.requeue": "true",
        "slurm.python": "/opt/venv/bin/python",
        "slurm.extra": '["--constraint=ib", "--mail-type=END"]',
        "slurm.setup": '["module load cuda", "source /opt/venv/bin/activate"]',
    }
    script = slurm.render(config(tmp_path, **flags))
    asked = set(re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE))
    assert asked >= {
        "--job-name=qwen",
        "--partition=h200",
        "--account=lab",
        "--time=1-00:00:00",
        "--gpus-per-node=8",
        "--signal=B:TERM@300",
        "--requeue",
        "--constraint=ib",
        "--mail-type=END",
        "--no-kill",
    }
    assert "\nmodule load cuda\nsource /opt/venv/bin/activate\n" in script
    assert script.count("/opt/venv/bin/python -m shmrl.launcher.job") == 2
    assert "--gpus-per-node=8 \\\n" in script
    body = script.index("set -euo")
    assert all(match.start() < body for match in re.finditer("^#SBATCH", script, re.MULTILINE))


def test_without_keys_there_are_no_lines(tmp_path):
    script = slurm.render(config(tmp_path))
    assert not re.search(r"--(partition|account|time|gpus-per-node)", script)
    assert "--no-requeue" in script
    assert f"{sys.executable} -m shmrl.launcher.job" in script


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trainer.ranks": "3"}, "trainer.ranks = 3 is not a multiple of deployment.trainer_nodes = 2"),
        ({"deployment.inference_nodes": "0"}, "needs inference_nodes, at least 1"),
        ({"deployment.kind": "single_node"}, "belong to kind = 'multi_node'"),
        ({"deployment.prefill_nodes": "4"}, "prefill_nodes = 4 of inference_nodes = 4: none is left to decode"),
        ({"deployment.prefill_nodes": "1"}, "only vLLM hands a context over"),
        ({**APART, "trainer.router_replay": "true"}, "the routing of a prompt stays with the engine that prefills it"),
        ({"arena.transport": "required"}, "over several nodes the trainer fetches every block"),
        ({"node.address": "10.0.0.1:7070"}, "every node's server has an address of its own"),
        ({"inference.urls": '["http://a:1"]'}, "every inference node has an engine of its own"),
        ({"inference.port": "0", **ONE, "deployment.kind": "single_node"}, "could not tell the port"),
        ({"run.restarts.trainer": "1", "arena.retain_steps": "9"}, "are not restarted in place"),
        ({**ONE, "deployment.kind": "single_node", "orchestrator.env_server_replicas": "2"}, "env_server_replicas > 1"),
        ({"slurm.partition": "a b"}, "slurm.partition = 'a b'"),
        ({"slurm.account": "$(reboot)"}, "slurm.account"),
        ({"slurm.time": "soon"}, "slurm.time = 'soon'"),
        ({"slurm.extra": '["constraint=ib"]'}, "slurm.extra.0 = 'constraint=ib'"),
        ({"slurm.grace_s": "5"}, "slurm.grace_s = 5"),
        ({"slurm.partitoin": "x"}, "unknown key; did you mean partition?"),
    ],
)
def test_what_cannot_be_is_refused_while_loading(tmp_path, flags, message):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **flags)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_a_directory_that_sbatch_lines_cannot_carry_is_refused(tmp_path):
    tree = config(tmp_path, **{"run.output_dir": str(tmp_path / "my run")})
    with pytest.raises(ConfigError, match="no spaces, quotes, % or the like"):
        slurm.render(tree)


def test_several_nodes_need_a_job(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(TINY)
    flags = [f"--{key}={value}" for key, value in (SEVERAL | {"trainer.ranks": "2"}).items()]
    assert main(["run", str(path), *flags, f"--run.output_dir={tmp_path / 'out'}"]) == 2
    assert "`shmrl run FILE --slurm` submits the job that has the nodes" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- submitting


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A directory in front of PATH for commands of SLURM; `put(name, lines of sh)`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(name, *lines):
        path = folder / name
        path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
        path.chmod(0o755)

    return put


def test_submitting_writes_the_script_and_says_where_logs_are(tmp_path, stand_ins, capsys):
    stand_ins("sbatch", f'echo "$@" >{tmp_path}/asked', 'echo "4711;cluster"')
    out = tmp_path / "out"
    assert slurm.submit(config(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert f"job 4711: {out}/job.sbatch\n" in printed
    assert f"{out}/logs/job-4711.log" in printed
    assert (tmp_path / "asked").read_text().split() == ["--parsable", f"{out}/job.sbatch"]
    assert stat.S_IMODE((out / "configs" / "run.toml").stat().st_mode) == 0o600
    assert json.loads((out / "run.json").read_text())["job"] == "4711"
    with pytest.raises(ConfigError, match="was used before"):
        slurm.submit(config(tmp_path))
    assert slurm.submit(config(tmp_path), clean=True) == 0
    assert slurm.submit(config(tmp_path), resume=True) == 0
    assert "\nresume=(--resume)\n" in (out / "job.sbatch").read_text()


def test_what_sbatch_says_when_it_refuses_is_the_error(tmp_path, stand_ins, capsys, monkeypatch):
    stand_ins("sbatch", "echo 'invalid partition specified: h200' >&2; exit 1")
    flags = [f"--{key}={value}" for key, value in (SEVERAL | {"trainer.ranks": "2"}).items()]
    (tmp_path / "run.toml").write_text(TINY)
    arguments = ["run", str(tmp_path / "run.toml"), "--slurm", *flags, f"--run.output_dir={tmp_path / 'out'}"]
    assert main(arguments) == 1
    assert "invalid partition specified: h200" in capsys.readouterr().err
    assert main(arguments) == 1  # nothing was submitted, so the directory is still new
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert main(arguments) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


def test_a_dry_run_prints_nodes_totals_budgets_and_the_script(tmp_path, capsys):
    flags = {"serve": "{ max_concurrent = 100, pool = { kind = 'static', workers = 3 } }"}
    tree = config(tmp_path, **{f"orchestrator.train.source.0.{key}": value for key, value in flags.items()})
    assert slurm.dry_run(tree, slurm=True) == 0
    printed = capsys.readouterr().out
    assert "train/words: 4 replicas x 3 workers = 12; serve.max_concurrent 4 x 100 = 400 episodes" in printed
    assert re.search(r"^inference nodes: arena: 64\.0 MiB of .* \(8 episodes x 64 tokens", printed, re.MULTILINE)
    assert re.search(r"^trainer nodes: arena: 64\.0 MiB of .* \(8 episodes x 64 tokens", printed, re.MULTILINE)
    assert re.search(r"^trainer +1 .*/trainer\.<node>\.log$", printed, re.MULTILINE)
    assert "#SBATCH --nodes=6\n" in printed
    assert not (tmp_path / "out" / "run.json").exists()


# ------------------------------------------------------------------------------------------------- what the script does


class Script:
    """The rendered script in a real bash. `srun` runs the launcher's command line on one of our nodes, as a shell
    function of the test: `launchers` says what each role does."""

    def __init__(self, tmp_path, put, launchers, restarts=0, **flags):
        self.out = tmp_path / "out"
        tree = config(tmp_path, **flags)
        (self.out / "logs").mkdir(parents=True)
        script = slurm.render(tree)
        put("scontrol", 'if [ "$1" = show ]; then printf "n%s\\n" 1 2 3 4 5 6; else echo "$@" >>"$OUT/scontrol"; fi')
        put("srun", 'while [[ $1 == --* ]]; do echo "$1" >>"$OUT/srun.$$"; shift; done', 'exec "$@"')
        put(
            "shmrl-python",
            'shift 2; echo "$@" >>"$OUT/called"',
            'case $1 in open) exit "${OPEN:-0}" ;;',
            launchers,
            "esac",
        )
        script = script.replace(sys.executable, "shmrl-python")
        environment = {**os.environ, "OUT": str(self.out), "SLURM_JOB_NODELIST": "n[1-6]", "SLURM_JOB_ID": "7"}
        environment["SLURM_RESTART_COUNT"] = str(restarts)
        self.process = subprocess.Popen(
            ["bash", "-s"], stdin=subprocess.PIPE, env=environment, text=True, stderr=subprocess.PIPE
        )
        self.process.stdin.write(script)
        self.process.stdin.close()

    def end(self):
        code = self.process.wait(timeout=30)
        self.process.stderr.close()
        return code

    def called(self):
        file = self.out / "called"
        return file.read_text().splitlines() if file.exists() else []

    def sruns(self):
        return [path.read_text().split() for path in sorted(self.out.glob("srun.*"))]


UNTIL_OVER = 'inference) while [ ! -e "$OUT/over" ]; do sleep 0.05; done ;;'


def test_the_trainers_exit_code_is_the_jobs_and_each_group_gets_its_nodes(tmp_path, stand_ins):
    script = Script(tmp_path, stand_ins, UNTIL_OVER + ' trainer) touch "$OUT/over"; exit 3 ;;')
    assert script.end() == 3
    opened, *launchers = script.called()
    assert opened == f"open {script.out} n1 n2 n3 n4 n5 n6"
    assert sorted(launchers) == [f"inference {script.out}", f"trainer {script.out}"]
    nodes = {word for words in script.sruns() for word in words if word.startswith("--nodelist")}
    assert nodes == {"--nodelist=n3,n4,n5,n6", "--nodelist=n1,n2"}


def test_the_limit_asks_the_run_to_drain_and_requeues_it(tmp_path, stand_ins):
    waits = 'trainer) while [ ! -e "$OUT/drain" ]; do sleep 0.05; done; touch "$OUT/over"; exit 130 ;;'
    script = Script(tmp_path, stand_ins, UNTIL_OVER + waits, **{"slurm.requeue": "true"})
    wait_until(lambda: len(script.called()) == 3, what="the launchers")
    script.process.send_signal(signal.SIGTERM)
    assert script.end() == 130
    assert (script.out / "scontrol").read_text() == "requeue 7\n"


def test_a_drain_that_somebody_asked_for_is_not_requeued(tmp_path, stand_ins):
    script = Script(
        tmp_path, stand_ins, UNTIL_OVER + ' trainer) touch "$OUT/over"; exit 130 ;;', **{"slurm.requeue": "true"}
    )
    assert script.end() == 130
    assert not (script.out / "scontrol").exists()


def test_a_requeued_job_resumes(tmp_path, stand_ins):
    script = Script(tmp_path, stand_ins, UNTIL_OVER + ' trainer) touch "$OUT/over" ;;', restarts=1)
    assert script.end() == 0
    assert script.called()[0] == f"open {script.out} --resume n1 n2 n3 n4 n5 n6"


def test_a_job_that_cannot_open_starts_nothing(tmp_path, stand_ins, monkeypatch):
    monkeypatch.setenv("OPEN", "2")
    script = Script(tmp_path, stand_ins, "*) ;;")
    assert script.end() == 2
    assert len(script.called()) == 1


# ------------------------------------------------------------------------------------------------------------- opening


@pytest.fixture
def submitted(tmp_path, stand_ins):
    """A run directory as a submission leaves it."""
    stand_ins("sbatch", "echo 1")
    slurm.submit(config(tmp_path, **{"model.tiny.layers": "1"}))
    (tmp_path / "out" / "weights" / "step_0").mkdir(parents=True)
    (tmp_path / "out" / "weights" / "step_0" / "config.json").touch()  # as if the model were made
    return tmp_path / "out"


NODES = [f"n{number}" for number in range(1, 7)]


def test_every_attempt_has_an_id_and_a_token_of_its_own(submitted, monkeypatch):
    (submitted / "weights" / "step_0").rename(submitted / "kept")
    (submitted / "weights").rmdir()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr("shmrl.launcher.job.needs_tiny_model", lambda _: False)
    open_job(submitted, NODES, resume=False)
    first = Opened.read(submitted)
    assert stat.S_IMODE((submitted / "configs" / "job.json").stat().st_mode) == 0o600
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    open_job(submitted, NODES, resume=True)
    second = Opened.read(submitted)
    assert first.run_id.startswith("12-0-")
    assert second.run_id.startswith("12-1-")
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.token != second.token
    assert second.nodes == tuple(NODES)
    assert (submitted / "logs" / "latest").resolve().name == "attempt_2"


def test_a_job_with_other_nodes_than_it_was_written_for_is_refused(submitted):
    with pytest.raises(ConfigError, match=r"the job has 2 nodes, and \[deployment\] asks for 6"):
        open_job(submitted, NODES[:2], resume=False)


def test_a_used_directory_is_refused_in_the_job_too(submitted):
    (submitted / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="was used before"):
        open_job(submitted, NODES, resume=False)
