"""The live page in a real browser (Chromium, `.ci/run interop` installs it): every panel of a run that goes on and of
one that is over, wide and narrow, without a console message or a request to anybody else."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.browser import Browser, executable
from tests.support.runs import ROOT, RUN, free_ports, slow, with_model

pytestmark = [pytest.mark.e2e, pytest.mark.interop, pytest.mark.timeout(300)]

WIDTHS = (1280, 400)
PAGE = {"monitor.page.port": free_ports(1)}
CHARTS = ("reward", "loss", "mismatch-kl", "entropy", "lag", "throughput", "step-time", "episodes", "arena-use")
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script></script><b>bold</b>'
READY = "document.body?.dataset.ready === 'true'"


@pytest.fixture(autouse=True, scope="module")
def chromium():
    assert executable(), "no chromium here: apt-get install -y chromium"


@pytest.fixture
def show():
    """`show(directory)` starts `shmrl page` and gives its address."""
    started = []

    def start(directory):
        command = [sys.executable, "-m", "shmrl", "page", str(directory), "--port", str(free_ports(1))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return next(word for word in process.stdout.readline().split() if word.startswith("http://"))

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=20)


async def checked(browser, url, width, *, live):
    await browser.open(url, width)
    await browser.until(READY)
    for chart in CHARTS:
        drawn = f"document.querySelectorAll('#chart-{chart} .main-svg').length"
        points = f"document.getElementById('chart-{chart}').data.every((trace) => trace.y.length > 0)"
        assert await browser.until(f"{drawn} > 0 && {points}"), chart
    tiles = await browser.evaluate("[...document.querySelectorAll('#tiles .value')].map((tile) => tile.textContent)")
    assert len(tiles) == 8
    assert "\u2013" not in tiles  # what a value that is not there looks like
    assert await browser.evaluate("document.getElementById('run-status').textContent") == (
        "running" if live else "finished"
    )
    await (arena_alive if live else arena_gone)(browser)
    await rollouts(browser)
    await processes(browser, live=live)
    assert await browser.evaluate("document.documentElement.scrollWidth") <= width
    assert await browser.evaluate("document.getElementById('banner').hidden")


async def arena_alive(browser):
    await browser.until("document.getElementById('arena').dataset.state === 'alive'")
    assert await browser.evaluate("document.querySelectorAll('#arena-gauge .mark').length") == 4
    for by in ("source", "step", "holder", "field", "age"):
        table = await browser.evaluate(
            f"(() => {{ const by = document.getElementById('arena-by'); by.value = '{by}'; "
            "by.dispatchEvent(new Event('change')); "
            "const cells = [...document.querySelectorAll('#arena-groups td[data-bytes]:not(#arena-sum)')]; "
            "return [cells.map((cell) => Number(cell.dataset.bytes)), "
            "Number(document.getElementById('arena-sum').dataset.bytes), "
            "document.querySelectorAll('#arena-map .group').length]; })()"
        )
        rows, total, areas = table
        assert sum(rows) == total > 0, by
        assert areas == sum(bytes_ > 0 for bytes_ in rows), by
    await browser.evaluate("document.getElementById('arena-by').value = 'source'")
    await browser.evaluate("document.getElementById('arena-by').dispatchEvent(new Event('change'))")
    assert await browser.evaluate("document.querySelectorAll('#arena-map .block').length") > 0
    await browser.evaluate("document.querySelector('#arena-map .block').click()")
    assert "tiny/words/" in await browser.evaluate("document.getElementById('arena-detail').textContent")
    assert await browser.evaluate("document.getElementById('arena-suspect-count').textContent") == "nothing"
    assert await browser.evaluate("document.querySelectorAll('#arena-events tr').length") > 2


async def arena_gone(browser):
    await browser.until("document.getElementById('arena').dataset.state === 'gone'")
    assert "removes it at its end" in await browser.evaluate("document.getElementById('arena-state').textContent")


async def rollouts(browser):
    assert await browser.until("document.querySelectorAll('#rollout-list button').length") == 4
    sampled = await browser.until("document.querySelectorAll('#tokens span.sampled').length")
    assert sampled > 0
    for view in ("mask", "load", "logprobs"):
        await browser.evaluate(
            f"(() => {{ const view = document.getElementById('rollout-view'); view.value = '{view}'; "
            "view.dispatchEvent(new Event('change')); })()"
        )
        assert await browser.evaluate("document.getElementById('token-chart').data[0].y.length") > 0, view
        assert await browser.evaluate("document.getElementById('expert-chart').data[0].z.length") == 2  # layers
    await browser.evaluate("document.querySelector('#tokens span.sampled').click()")
    detail = await browser.evaluate("document.getElementById('token-detail').textContent")
    assert "log-probability" in detail
    assert "ids kept" in detail
    assert "expert load" in detail


async def processes(browser, *, live):
    count = await browser.evaluate("document.querySelectorAll('#process-table .dot.alive').length")
    if live:  # launcher, orchestrator, server and worker, engine, trainer and rank, page
        assert count >= 8
    else:
        assert count == 0
    assert "ready: env servers words" in await browser.until("document.getElementById('log').textContent")


async def test_every_panel_of_a_run_that_goes_on(run):
    one = run(text=slow(), **PAGE, **{"arena.retain-steps": 2, "run.max-steps": 1000}).start()
    one.wait_for_step(2)
    page = one.record()["addresses"]["page"]
    await both_widths(page, live=True)
    assert scraped(page) == {"orchestrator", "trainer:0", "inference", "env-server train/words"}
    one.process.send_signal(signal.SIGINT)
    code, output = one.finish()
    assert code == 130, output
    one.assert_nothing_left()


async def test_every_panel_of_a_run_that_is_over(run, show):
    one = run(text=with_model(RUN), **{"run.max-steps": 3}).start()
    code, output = one.finish()
    assert code == 0, output
    await both_widths(show(one.output_dir), live=False)


def scraped(page):
    """The processes that answer when the page is scraped."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{page}metrics", timeout=60) as reply:
        families = {one.name: one.samples for one in text_string_to_metric_families(reply.read().decode())}
    assert families["shmrl_arena_capacity_bytes"][0].value == 64 << 20
    assert {one.labels["process"] for one in families["shmrl_train_loss"]} == {"orchestrator", "trainer:0"}
    return {one.labels["process"] for one in families["shmrl_up"] if one.value == 1}


async def both_widths(url, *, live):
    async with Browser() as browser:
        for width in WIDTHS:
            await checked(browser, url, width, live=live)
        assert browser.console == []
        assert [asked for asked in browser.requests if not asked.startswith((url, "data:"))] == []


async def test_what_a_model_or_a_process_wrote_is_text_and_nothing_else(tmp_path, show):
    (tmp_path / "logs" / "latest").mkdir(parents=True)
    (tmp_path / "logs" / "latest" / "orchestrator.log").write_text(f"12:00:00 W {HOSTILE}\n")
    (tmp_path / "run.json").write_text(json.dumps({"name": HOSTILE, "status": HOSTILE, "reason": HOSTILE}))
    metrics = {"step": 1, "train/reward": 0.5, f"eval/{HOSTILE}/reward": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    facts = {
        "start": 0,
        "ids": [1],
        "sampled": [1],
        "logprobs": [-1.0],
        "mask": None,
        "load": None,
        "expert_load": None,
    }
    rollout = {"source": HOSTILE, "task_id": HOSTILE, "reward": 1.0, "tokens": 1, "rewards": {HOSTILE: 1.0}}
    rollout |= {"messages": [{"role": HOSTILE, "content": HOSTILE}], "per_token": facts, "stop_reason": HOSTILE}
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl").write_text(json.dumps(rollout) + "\n")
    url = show(tmp_path)
    async with Browser() as browser:
        await browser.open(url)
        await browser.until(READY)
        assert await browser.until("document.querySelector('.message')?.textContent.includes('onerror')")
        assert await browser.until("document.getElementById('log').textContent.includes('onerror')")
        assert await browser.evaluate("document.querySelectorAll('main img, main script, header img').length") == 0
        assert await browser.evaluate("window.pwned === undefined")
        assert browser.console == []


async def test_a_page_whose_process_died_comes_back_in_the_same_tab(run):
    one = run(text=slow(), **PAGE, **{"run.max-steps": 1000}).start()
    one.wait_for_step(1)
    url = one.record()["addresses"]["page"]
    async with Browser() as browser:
        await browser.open(url)
        await browser.until(READY)
        (pid,) = one.pids("page")
        os.kill(pid, signal.SIGKILL)
        await browser.until(f"fetch('{url}api/run').then((reply) => reply.ok, () => false)", 60)
        await browser.until("document.getElementById('banner').hidden")
        assert one.pids("page") != [pid]
    one.process.send_signal(signal.SIGINT)
    assert one.finish()[0] == 130
