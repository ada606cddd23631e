"""What the live page costs a run: its process's CPU beside the run's, with nobody looking and with a tab open.

`python -m benches.bench_page` (extra `train`; a minute and a half). A small run goes on; first nobody looks, then
somebody has looked and closed the tab, then a tab is open on every panel, asking what static/main.js asks, as often,
over one connection. CPU of the page is compared with that of all the run's processes over the same time; the bars are
0.1% and 1%.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

import psutil

from shmrl.config import load_run
from shmrl.monitor.page.listening import listen

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "reverse-text.toml"
WATCHED_S, TICK_S = 25.0, 2.0  # a tab asks every LIVE_MS of main.js
PANELS = ("api/run", "api/arena", "api/rollouts", "api/processes", "api/logs/orchestrator", "metrics")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="shmrl-bench-page-") as directory:
        output = Path(directory) / "out"
        with listen("127.0.0.1", 12_470).socket as free:
            port = free.getsockname()[1]
        flags = {"run.output-dir": output, "run.max-steps": 1000, "warmup.steps": 0, "monitor.page.port": port}
        flags |= {"orchestrator.env-server-base-port": port + 40, "inference.port": port + 60}
        load_run([CONFIG], {key: str(value) for key, value in flags.items()})
        command = [sys.executable, "-m", "shmrl", "run", str(CONFIG), *(f"--{k}={v}" for k, v in flags.items())]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            try:
                measure(run.pid, output)
            finally:
                run.send_signal(signal.SIGTERM)


def measure(pid: int, output: Path) -> None:
    steps = wait_for_steps(output, 3)
    url = json.loads((output / "run.json").read_text())["addresses"]["page"]
    launcher = psutil.Process(pid)
    print(f"{os.cpu_count()} cores; the run is at step {steps}; its processes: {len(tree(launcher))}")
    row("nobody has looked", *over(launcher, WATCHED_S, lambda: None))
    tab = Tab(url)
    tab.load()
    row("the tab was closed", *over(launcher, WATCHED_S, lambda: None))
    row("one tab, every panel on the screen", *over(launcher, WATCHED_S, tab.tick))
    row("... and Prometheus every 15 s", *over(launcher, WATCHED_S, tab.tick, lambda: tab.ask("metrics")))


class Tab:
    """What a browser asks for."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=30)
        self.place, self.ticks, self.shown = {"file": "", "next": 0}, -1, 0

    def ask(self, path: str) -> str:
        self.connection.request("GET", f"/{path}")
        return self.connection.getresponse().read().decode()

    def load(self) -> None:
        for path in ("", "static/plotly.min.js", "static/main.js", *PANELS):
            self.ask(path)
        self.tick()

    def tick(self) -> None:
        self.ticks += 1
        found = json.loads(self.ask(f"api/metrics?from={self.place['next']}&file={self.place['file']}"))
        self.place = found
        if self.ticks % 2 == 0:
            self.ask("api/run")
            self.ask("api/arena")
            self.rollouts()
        if self.ticks % 4 == 0:
            self.ask("api/processes")
            self.ask("api/logs/orchestrator")

    def rollouts(self) -> None:
        newest = json.loads(self.ask("api/rollouts"))["steps"][-1]
        if newest != self.shown:
            self.ask(f"api/rollouts/{newest}")
            self.ask(f"api/rollouts/{newest}/0")
            self.shown = newest


def over(
    launcher: psutil.Process, duration_s: float, tick: Any, scrape: Any = lambda: None
) -> tuple[float, float, int]:
    """(CPU seconds of the page, of all processes of the run, the page's resident bytes) over `duration_s`."""
    before, began, due, scraped = cpu(launcher), time.monotonic(), 0.0, -15.0
    while (now := time.monotonic() - began) < duration_s:
        if now >= scraped + 15.0:
            scrape()
            scraped = now
        if now >= due:
            tick()
            due += TICK_S
        time.sleep(0.05)
    after = cpu(launcher)
    used = {one: after[one] - before.get(one, 0.0) for one in after}
    page = sum(value for (_, role), value in used.items() if role == "page")
    shown = [process for process in tree(launcher) if role_of(process) == "page"]
    return page, sum(used.values()), sum(process.memory_info().rss for process in shown)


def cpu(launcher: psutil.Process) -> dict[tuple[int, str], float]:
    found = {}
    for process in tree(launcher):
        try:
            times = process.cpu_times()
            found[process.pid, role_of(process)] = times.user + times.system
        except psutil.Error:
            continue
    return found


def tree(launcher: psutil.Process) -> list[psutil.Process]:
    return [launcher, *launcher.children(recursive=True)]


def role_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("SHMRL_ROLE", "")
    except psutil.Error:
        return ""


def wait_for_steps(output: Path, steps: int) -> int:
    while True:
        file = output / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        if lines and json.loads(lines[-1])["step"] >= steps:
            return int(json.loads(lines[-1])["step"])
        time.sleep(0.5)


def row(what: str, page_s: float, run_s: float, rss: int) -> None:
    share = 100 * page_s / run_s
    print(f"{what:<38} page {1000 * page_s:6.0f} ms of the run's {run_s:5.1f} s CPU = {share:.3f}%, {rss >> 20} MiB")


if __name__ == "__main__":
    main()
