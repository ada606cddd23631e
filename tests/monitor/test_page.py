"""The page's process over a real run directory and a real arena: what it answers, to whom, and what it never says."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest

from shmrl import Arena, Branch, encode
from shmrl.arena import commands, table
from shmrl.config import load_run
from shmrl.config.rundir import RunDir
from shmrl.monitor.metrics import MetricsFile
from shmrl.monitor.page import files, guard, listening
from shmrl.monitor.rollouts import write_rollouts
from shmrl.payload.shown import shown
from shmrl.types import EpisodeResult
from tests.support.clock import wait_until
from tests.support.runs import ROOT, TINY, free_ports

SECRET = "5e53c0de" * 4
HOSTILE = '<img src=x onerror="alert(1)"></script>'


class Page:
    """`shmrl page` as a process."""

    def __init__(self, directory, *options, port=None):
        command = [
            sys.executable,
            "-m",
            "shmrl",
            "page",
            str(directory),
            "--port",
            str(port or free_ports(1)),
            *options,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        line = self.process.stdout.readline()
        self.url = re.search(r"http://\S+/", line)[0]

    def ask(self, path, method="GET", **headers):
        """(status, headers, body) whatever the status."""
        request = urllib.request.Request(self.url + path.lstrip("/"), method=method, headers=headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as reply:
                return reply.status, reply.headers, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read().decode()

    def json(self, path):
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.process.communicate(timeout=20)
        return self.process.returncode


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """(run directory, arena) of a run that goes on: three sources' blocks, two steps, rollouts, logs, secrets."""
    root = tmp_path_factory.mktemp("page") / "run"
    (root.parent / "run.toml").write_text(TINY)
    with Arena.create(capacity="16MiB", run_id="run") as arena:
        tree = load_run([root.parent / "run.toml"], {"run.output-dir": str(root)}).absolute()
        named = tree.arena.model_copy(update={"address": arena.address, "token_file": root.parent / "token"})
        directory = RunDir(root, 1)
        directory.open_logs()
        directory.write_configs(tree.model_copy(update={"arena": named}))
        directory.write_record(
            {"name": "tiny", "status": "running", "addresses": {"inference": [f"http://h/{SECRET}"]}}
        )
        (root.parent / "token").write_text(SECRET)
        (root / "configs" / "envs" / "train" / "words.toml").write_text(f'token = "{SECRET}"')
        directory.log("orchestrator").write_text(f"12:00:00 W orchestrator: {HOSTILE}\n")
        directory.env_log("train", "words").write_text("loaded\n" * 100_000)
        metrics = MetricsFile(root / "metrics.jsonl")
        for step in (1, 2):
            metrics.write({"step": step, "train/reward": step / 4, "env/words/rss_bytes": 7})
        samples = [
            encode(arena, branch(), tag=f"run/{name}/g/{n}") for n, name in enumerate(("words", "maths", "code"))
        ]
        arena.ship(samples[0].handles[0], readers=1, step=2)
        result = EpisodeResult(True, "t1", reward=1.0)
        write_rollouts(root / "rollouts", 2, [("words", result, 0.5, samples[1], shown(arena, samples[1]))])
        yield root, arena
        arena.unlink()


def branch():
    sampled = np.arange(40) >= 30
    messages = [{"role": "assistant", "content": HOSTILE}]
    return Branch(np.arange(40), sampled, np.where(sampled, -0.5, 0), messages=messages)


@pytest.fixture(scope="module")
def page(scene):
    made = Page(scene[0])
    yield made
    assert made.end() == 143


def test_the_arenas_sums_equal_those_of_shmrl_arena_stats(page, scene):
    _, arena = scene
    found = page.json("api/arena")
    assert (found["state"], found["address"]) == ("alive", arena.address)
    for by in table.BY:
        (stats,) = commands.stats(arena.address, by)
        rows = stats[f"by_{by}"]
        if by != "age":  # they grow older between two looks
            assert {row[by]: row["bytes"] for row in found["by"][by]} == {k: row["bytes"] for k, row in rows.items()}
        total = sum(row["bytes"] for row in found["by"][by])
        assert total == sum(row["bytes"] for row in rows.values()) == stats["used_bytes"] == found["used_bytes"]
    assert {block["source"] for block in found["largest"]} == {"words", "maths", "code"}
    assert sum(block["bytes"] for block in found["largest"]) == found["used_bytes"]
    assert found["blocks"] == 3
    assert not any("handle" in block for block in found["largest"])
    few = page.json("api/arena?groups=1")["by"]["source"]
    assert [row["source"] for row in few][1:] == ["(2 others)"]
    assert sum(row["bytes"] for row in few) == found["used_bytes"]


def test_the_process_table_says_what_the_kernel_does(page, scene):
    (row,) = [one for one in page.json("api/processes")["processes"] if one["pid"] == os.getpid()]
    here = psutil.Process()
    assert (row["health"], row["threads"]) == ("alive", here.num_threads())
    assert abs(row["started"] - here.create_time()) < 5
    assert 0.5 < row["rss_bytes"] / here.memory_info().rss < 2
    wait_until(lambda: (mine(page)["cpu_percent"] or 0) > 0, what="CPU of a process that computes")


def mine(page):
    sum(range(10**6))
    return next(one for one in page.json("api/processes")["processes"] if one["pid"] == os.getpid())


def test_metrics_come_from_a_place_on_and_anew_when_a_resumed_run_cut_them(page, scene):
    root, _ = scene
    first = page.json("api/metrics")
    assert [line["step"] for line in first["lines"]] == [1, 2]
    assert first["lines"][0] == {"step": 1, "train/reward": 0.25}  # what no chart shows stays here
    query = f"api/metrics?from={first['next']}&file={first['file']}"
    assert page.json(query)["lines"] == []
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/reward": 0.75}\n{"step": 4, "tr')
    more = page.json(query)
    assert (more["lines"], more["file"]) == ([{"step": 3, "train/reward": 0.75}], first["file"])
    MetricsFile(root / "metrics.jsonl", resume_step=1)
    again = page.json(f"api/metrics?from={more['next']}&file={more['file']}")
    assert [line["step"] for line in again["lines"]] == [1]
    assert again["file"] != first["file"]


def test_a_long_file_comes_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 100)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "train/loss": 0.5}}\n' for n in range(50)))
    seen, place = [], {"next": 0, "file": "", "more": True}
    while place["more"]:
        place = files.RunFiles(tmp_path).metrics(place["next"], place["file"])
        seen += [line["step"] for line in place["lines"]]
    assert seen == list(range(50))


def test_rollouts_with_their_tokens(page):
    assert page.json("api/rollouts") == {"steps": [2]}
    (row,) = page.json("api/rollouts/2")["rollouts"]
    assert (row["source"], row["reward"], row["preview"]) == ("words", 1.0, HOSTILE)
    found = page.json("api/rollouts/2/0")
    assert found["messages"][0]["content"] == HOSTILE
    assert found["per_token"]["ids"] == list(range(40))
    assert found["per_token"]["text"] is None  # no tokenizer: they are shown by number
    assert page.json("api/rollouts/7") == {"rollouts": []}
    assert page.ask("api/rollouts/2/9")[0] == 404


def test_processes_and_the_ends_of_logs(page):
    found = page.json("api/processes")
    mine = next(row for row in found["processes"] if row["pid"] == os.getpid())
    assert (mine["health"], mine["rss_bytes"] > 1 << 20) == ("alive", True)
    assert set(found["logs"]) == {"orchestrator", "envs/train/words"}
    assert HOSTILE in page.ask("api/logs/orchestrator")[2]
    tail = page.ask("api/logs/envs/train/words")[2]
    assert 0 < len(tail) <= files.LOG_BYTES
    assert tail.startswith("loaded\n")


@pytest.mark.parametrize("name", ["../../run", "%2e%2e/%2e%2e/configs/orchestrator", "/etc/passwd", "latest/x", "x"])
def test_no_other_file_is_a_log(page, name):
    assert page.ask(f"api/logs/{name}")[0] == 404


@pytest.mark.parametrize("path", ["static/../server.py", "static/%2e%2e/server.py", "static//etc/passwd", "server.py"])
def test_no_other_file_is_static(page, path):
    assert page.ask(path)[0] in (403, 404)


def test_who_may_ask(page):
    port = urllib.parse.urlsplit(page.url).port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example"):
        status, _, body = page.ask("api/run", Host=host)
        assert (status, "Host" in body) == (403, True), host
    for host in ("127.0.0.1", f"localhost:{port + 1}", "[::1]:80"):  # a tunnel has another port
        assert page.ask("api/run", Host=host)[0] == 200, host
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert page.ask("api/run", method)[0] == 403
    for query in ("from=-1", "from=x", f"from={1 << 60}"):
        assert page.ask(f"api/metrics?{query}")[0] == 400


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_other_users_of_this_machine_are_refused(page):
    ask = "import sys, urllib.request as u; print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1]).status)"
    command = ["/usr/bin/env", "-i", "python3", "-c", ask, page.url + "api/run"]
    done = subprocess.run(command, user=65534, group=65534, capture_output=True, text=True, check=False, cwd="/")
    assert "403" in done.stderr, done


def test_one_port_of_two_users_is_told_apart():
    """A port can be the beginning of connections to several servers: it is that to the page which counts."""
    with socket.create_server(("127.0.0.1", 0)) as page, socket.create_server(("127.0.0.1", 0)) as other:
        mine = socket.create_connection(other.getsockname())
        with mine, other.accept()[0]:
            assert guard.peer_uid(mine.getsockname(), other.getsockname()) == os.getuid()
            assert guard.peer_uid(mine.getsockname(), page.getsockname()) is None


def test_every_answer_is_locked_down_and_has_no_secret(page, scene):
    paths = ["", "api/run", "api/metrics", "api/arena", "api/processes", "api/rollouts", "api/rollouts/2/0", "nothing"]
    static = Path(files.__file__).with_name("static")
    paths += [f"static/{path.name}" for path in static.iterdir()] + ["api/logs/orchestrator"]
    for path in paths:
        _, headers, body = page.ask(path)
        assert SECRET not in body, path
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';"), path
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "text/html" not in headers["Content-Type"] or path in ("", "static/index.html")
    assert page.json("api/run")["addresses"]["inference"] == ["http://h/..."]
    for path in static.iterdir():
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), path
        assert not re.search(r"(src|href)=\"(?!/static/|#|data:image)|https?://(?!www\.w3\.org/2000/svg)", text), path


def test_plotly_comes_from_the_installed_package(page):
    status, headers, body = page.ask("static/plotly.min.js")
    assert (status, "javascript" in headers["Content-Type"]) == (200, True)
    assert body == listening.plotly_js().read_text()


def test_a_run_that_is_over_has_a_page_without_an_arena(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").write({"step": 1, "train/reward": 0.5})
    shown = Page(tmp_path)
    try:
        assert shown.json("api/arena")["state"] == "gone"
        assert (shown.json("api/processes")["processes"], shown.json("api/processes")["logs"]) == ([], {})
        assert shown.json("api/rollouts") == {"steps": []}
        assert shown.json("api/run")["status"] is None
        again = Page(tmp_path, port=urllib.parse.urlsplit(shown.url).port)  # its port is taken: it takes the next
        assert again.url != shown.url
        assert again.json("api/metrics")["lines"][0]["train/reward"] == 0.5
        assert again.end(signal.SIGINT) == 130
    finally:
        shown.end()


def test_files_that_something_else_wrote_cost_their_own_part_alone(tmp_path, monkeypatch):
    """Deep nesting, NaN, no UTF-8, other types, a line without an end: what is whole is shown."""
    monkeypatch.setattr(files, "CHUNK", 1000)
    for name in ("rollouts", "configs"):
        (tmp_path / name).mkdir()
    deep = "[" * 50_000 + "\n"
    (tmp_path / "run.json").write_text('{"name": "x", "addresses": {"inference": 5}}')
    (tmp_path / "configs" / "orchestrator.toml").write_bytes(b'[run]\nname = "\xff"\n')
    lines = ['{"step": 1, "train/loss": NaN, "train/reward": 1e400}\n', deep, '{"step": 2}\n']
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    rollouts = [deep, '{"reward": NaN, "per_token": {"ids": [-1, "a"]}}\n', '{"per_token": {}, "messages": 5}\n']
    (tmp_path / "rollouts" / "step_1.jsonl").write_text("".join(rollouts))
    shown = Page(tmp_path)
    try:
        for config in (None, "arena = 5\nrun = 6\njob = []\nmodel = 7\n"):
            if config is not None:
                (tmp_path / "configs" / "orchestrator.toml").write_text(config)
            assert shown.json("api/run")["name"] == "x"
            assert shown.json("api/arena")["state"] == "gone"
            assert shown.json("api/processes")["processes"] == []
            assert shown.ask("metrics")[0] == 200
        assert [row.get("reward") for row in shown.json("api/rollouts/1")["rollouts"]] == [None, None]
        assert shown.json("api/rollouts/1/0")["per_token"]["text"] is None
        assert shown.json("api/rollouts/1/1")["per_token"]["text"] is None
        assert shown.ask(f"api/metrics?from={'9' * 5000}")[0] == 400
    finally:
        shown.end()
    seen, at = [], {"next": 0, "file": "", "more": True}
    while at["more"]:
        at = files.RunFiles(tmp_path).metrics(at["next"], at["file"])
        seen += at["lines"]
    assert seen == [{"step": 1, "train/loss": None, "train/reward": None}, {"step": 2}]


def test_what_cannot_be_shown_is_said_in_a_line(tmp_path):
    for options, code, said in (
        ([str(tmp_path)], 2, "is not the directory of a run"),
        ([str(tmp_path), "--port", "0"], 2, "port 0: 1 to 65535"),
        ([str(tmp_path.parent / "none")], 2, "is not the directory of a run"),
    ):
        command = [sys.executable, "-m", "shmrl", "page", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_a_page_on_demand_ends_when_nobody_looks(tmp_path):
    """The socket is inherited; the process leaves, and what it would answer is asked of the next one."""
    (tmp_path / "metrics.jsonl").write_text("")
    listener = listening.listen("127.0.0.1", free_ports(1))
    serve = (
        "import socket, sys, pathlib; from shmrl.monitor.page import Listener, files, server; "
        "sys.exit(server.run(files.RunFiles(pathlib.Path(sys.argv[2])), "
        "Listener(socket.socket(fileno=int(sys.argv[1])), ''), 0.3))"
    )
    with listener.socket:
        fd = listener.socket.fileno()
        command = [sys.executable, "-c", serve, str(fd), str(tmp_path)]
        process = subprocess.Popen(command, pass_fds=[fd], cwd=ROOT)
        assert wait_until(lambda: process.poll() is not None, what="its end")
        assert process.returncode == 0
