"""Prometheus: sockets of processes, names and labels, and all of them together at the page's /metrics."""

import math
import os
import socket
import subprocess
import sys
import threading

import pytest
from aiohttp import test_utils, web
from prometheus_client.parser import text_string_to_metric_families

from shmrl import Arena
from shmrl.monitor import exposition
from shmrl.monitor.page import arena, scrape
from tests.support.runs import ROOT

PROCESS = """
import sys, pathlib
from shmrl.monitor import exposition
exposition.also(lambda: {"train/loss": 0.5, "train/reward/maths": 1, "note": "text", "missing": None})
with exposition.exposed("orchestrator", pathlib.Path(sys.argv[1])):
    assert "prometheus_client" not in sys.modules  # nobody has asked
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def process(tmp_path):
    """(directory, a process that answers there until its standard input ends)."""
    directory = tmp_path / "metrics"
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as made:
        assert made.stdout.readline() == b"up\n"
        yield directory, made
        made.stdin.close()
        assert made.wait(20) == 0
    assert list(directory.iterdir()) == []


def samples(text):
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            key = one.name, *sorted(one.labels.items())
            assert key not in found, key  # nothing twice
            found[key] = one.value
    return found


@pytest.mark.parametrize(
    ("name", "metric", "labels"),
    [
        ("train/loss", "shmrl_train_loss", {}),
        ("train/reward", "shmrl_train_reward", {}),
        ("train/reward/a-b", "shmrl_train_reward_by_source", {"source": "a-b"}),
        ("eval/maths/pass@4", "shmrl_eval_pass_at_4", {"source": "maths"}),
        ("env/maths/rss_bytes", "shmrl_env_rss_bytes", {"source": "maths"}),
        ("node/n1/rss_bytes", "shmrl_node_rss_bytes", {"node": "n1"}),
        ("orchestrator/loop_lag_p99_ms", "shmrl_orchestrator_loop_lag_p99_ms", {}),
        ("step", "shmrl_step", {}),
    ],
)
def test_names(name, metric, labels):
    assert exposition.family(name) == (metric, labels)


def test_a_process_answers_at_its_socket(process):
    directory, made = process
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(directory / f"{made.pid}.sock"))
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: asking.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200 OK")
    found = samples(body)
    assert found["shmrl_train_loss",] == 0.5
    assert found["shmrl_train_reward_by_source", ("source", "maths")] == 1
    assert found["process_resident_memory_bytes",] > 1 << 20
    assert not any("note" in key[0] or "missing" in key[0] for key in found)


ENGINE = r"""# TYPE vllm:x gauge
vllm:x{model_name="m"} 3
vllm:x{model_name="} \" 1"} -1e-05
vllm:x NaN 17
# HELP vllm:p of its own
vllm:p{process="of its own"} 1
vllm:p{
vllm:p{a="1} 1
vllm:p x
# TYPE process_open_fds gauge
process_open_fds 5
no_family 1
# TYPE shmrl_arena_blocks gauge
shmrl_arena_blocks 77
"""


async def test_the_page_puts_processes_engines_and_the_arena_together(process):
    directory, _ = process

    async def engine(_):
        return web.Response(text=ENGINE)

    app = web.Application()
    app.router.add_get("/metrics", engine)
    (directory / "99999999.sock").touch()  # of one that died
    with Arena.create(capacity="8MiB") as made:
        made.put(b"x" * 5000, tag="run/words/0")
        async with test_utils.TestServer(app) as server:
            engines = [str(server.make_url("/")), "http://127.0.0.1:9/"]
            text = await scrape.everything(directory, engines, arena.picture(made.address, 12))
        made.discard("run")
        made.unlink()
    (directory / "99999999.sock").unlink()
    found = samples(text.decode())
    up = {key[1][1]: value for key, value in found.items() if key[0] == "shmrl_up"}
    assert up == {"orchestrator": 1, "inference:0": 1, "inference:1": 0}
    assert found["shmrl_train_loss", ("process", "orchestrator")] == 0.5
    assert found["vllm:x", ("model_name", "m"), ("process", "inference:0")] == 3
    assert found["vllm:x", ("model_name", '} " 1'), ("process", "inference:0")] == -1e-5
    assert math.isnan(found["vllm:x", ("process", "inference:0")])
    assert found["vllm:p", ("process", "of its own")] == 1
    assert len([key for key in found if key[0].startswith("vllm:")]) == 4
    assert found["process_open_fds", ("process", "inference:0")] == 5
    assert found["shmrl_arena_blocks",] == 1
    assert found["shmrl_arena_capacity_bytes",] == 8 << 20
    assert found["process_open_fds", ("process", "orchestrator")] > 3


def test_no_process_fails_for_its_metrics(tmp_path, caplog):
    threads = threading.active_count()
    with exposition.exposed("x", None), exposition.exposed("x", tmp_path / "not-hosted" / "metrics"):
        assert threading.active_count() == threads
    (tmp_path / "metrics").touch()
    with exposition.exposed("x", tmp_path / "metrics"):
        pass
    assert "no metrics of this process" in caplog.text
    long = tmp_path / ("x" * 120)
    long.mkdir()
    with exposition.exposed("x", long / "metrics"):
        assert not (long / "metrics" / f"{os.getpid()}.sock").exists()
