"""`shmrl run` from start to end on a tiny model: files, numbers, exit codes, nothing left."""

import json
import resource
import signal
import urllib.request

import psutil
import pytest

from shmrl.node.host import read_token
from tests.support.clock import wait_until
from tests.support.runs import ROOT, RUN, START_S, TINY, free_ports, slow, with_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MULTI_ENV = ROOT / "configs" / "debug" / "multi-env" / "rl.toml"
STRICT = {"orchestrator.max-off-policy-steps": 0}  # then sampler and trainer have the same weights: KL is rounding
BROKEN = """
from shmrl.env.interface import Environment

class Broken(Environment):
    def tasks(self, split):
        raise LookupError("the data set is not here")

    async def rollout(self, task, model):
        raise AssertionError
"""


def test_two_runs_with_three_sources_each_side_by_side(run):
    node = {"node.address": f"127.0.0.1:{free_ports(1)}"}  # the first has a node server beside it
    first, second = (run(MULTI_ENV, sources=3, **STRICT, **more).start() for more in (node, {"trainer.ranks": 1}))
    token = wait_until(lambda: _token(first), START_S, "the token")
    pages = [_page(one) for one in (first, second)]
    assert pages[0] != pages[1]  # the second found the port taken
    first.wait_for_step(1)
    assert not [one.pid for one in psutil.process_iter(["cmdline"]) if token in " ".join(one.info["cmdline"] or ())]
    for one in (first, second):
        code, output = one.finish(200)
        assert code == 0, output
        one.assert_nothing_left()
        _check_files(one)
        _check_metrics(one.metrics())
    assert {first.record()["addresses"]["arena"]} != {second.record()["addresses"]["arena"]}
    assert first.record()["addresses"]["node"] == f"http://{node['node.address']}"
    assert "serving blocks of shm:" in (first.output_dir / "logs" / "latest" / "node.log").read_text()
    assert not (second.output_dir / "logs" / "latest" / "node.log").exists()
    for path in first.output_dir.rglob("*"):
        assert path.is_dir() or token.encode() not in path.read_bytes(), f"{path} contains the run's token"


def _page(one):
    """The address of a run's page, which was asked how the run goes."""
    wait_until((one.output_dir / "run.json").exists, START_S, "the record")
    url = one.record()["addresses"]["page"]
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}api/run", timeout=60) as reply:
        assert json.load(reply)["status"] == "running"
    assert url in one.terminal.read_text()
    return url


def _token(one):
    file = one.tree.socket_dir / "token"
    return file.exists() and read_token(one.tree.arena.model_copy(update={"token_file": file}))


def _check_files(one):
    names = {str(path.relative_to(one.output_dir)) for path in one.output_dir.rglob("*") if path.is_file()}
    envs = ("train/reverse-text", "train/alphabet-sort", "eval/guess-number")
    wanted = {f"configs/{role}.toml" for role in ("orchestrator", "trainer", "inference")}
    wanted |= {f"logs/attempt_1/{role}.log" for role in ("launcher", "orchestrator", "trainer", "inference")}
    wanted |= {f"configs/envs/{env}.toml" for env in envs} | {f"logs/attempt_1/envs/{env}.log" for env in envs}
    assert wanted | {"metrics.jsonl", "run.json"} <= names
    assert (one.output_dir / "logs" / "envs" / "eval" / "guess-number.log").exists()
    record = one.record()
    assert (record["status"], record["exit_code"], record["reason"]) == ("finished", 0, "")
    assert [record["addresses"]["envs"][env] for env in envs] == [
        f"tcp://127.0.0.1:{one.base_port + index}" for index in range(3)
    ]


def _check_metrics(lines):
    assert [line["step"] for line in lines] == [0, 1, 2, 3]  # 0: the evaluation before the first step
    for line in lines[1:]:
        assert line["episodes/failed"] == 0
        assert line["train/mismatch_kl"] <= 1e-6
    for source in ("reverse-text", "alphabet-sort"):
        assert any(f"train/reward/{source}" in line for line in lines), source
    assert "eval/guess-number/reward" in lines[-1]
    assert lines[-1]["arena/created"] > 0


def test_ctrl_c_drains_with_a_checkpoint_and_resume_continues_to_the_end(run):
    one = run(text=slow(), **{"trainer.checkpoint.interval": 0}).start()
    one.wait_for_step(2)
    one.process.send_signal(signal.SIGINT)
    code, output = one.finish(60)
    assert code == 130, output
    one.assert_nothing_left()
    assert one.record()["status"] == "interrupted"
    done = len(one.metrics())
    assert 2 <= done < 6
    assert (one.output_dir / "checkpoints" / f"step_{done}" / "STABLE").exists()
    code, output = one.start().finish(20)
    assert (code, "--resume" in output) == (2, True), output
    code, output = one.start("--resume").finish()
    assert code == 0, output
    one.assert_nothing_left()
    assert [line["step"] for line in one.metrics()] == [1, 2, 3, 4, 5, 6]
    assert one.record()["attempt"] == 2


def test_a_task_set_that_raises_ends_the_run_with_its_traceback(run):
    text = RUN.replace('"reverse-text", args = { min_length = 2, max_length = 4 }', '"broken:Broken"')
    one = run(text=with_model(text))
    (one.output_dir.parent / "broken.py").write_text(BROKEN)
    code, output = one.start().finish(60)
    assert code == 1, output
    assert "LookupError: the data set is not here" in output
    assert "Traceback (most recent call last)" in output
    log = (one.output_dir / "logs" / "envs" / "train" / "words.log").read_text()
    assert "LookupError: the data set is not here" in log
    one.assert_nothing_left()


def test_an_unknown_environment_exits_with_two_and_starts_nothing(run):
    one = run(text=TINY.replace('"reverse-text"', '"revers-text"'))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code, output = one.start().finish(60)
    assert (code, "did you mean reverse-text?" in output) == (2, True), output
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2  # of its own: the machine may be busy
    assert not one.output_dir.exists()


def test_a_taken_port_is_named_and_nothing_is_started(run):
    import socket

    one = run(text=TINY)
    with socket.create_server(("127.0.0.1", one.engine_port)):
        code, output = one.start().finish(20)
    assert code == 1
    assert f"inference: port {one.engine_port} is in use by" in output
    assert not one.output_dir.exists()
