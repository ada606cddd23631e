"""metrics.jsonl: whole lines, cut back to the checkpoint on resume; memory and loop lag of this process."""

import asyncio
import json
import math

import pytest

from shmrl.monitor.metrics import LoopLag, MetricsFile, rss_bytes


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_per_step_with_the_step_first(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"train/reward": 0.5, "step": 1, "arena/blocks": 3})
    file.write({"step": 2, "train/loss": math.nan, "train/grad_norm": math.inf})
    assert path.read_text().splitlines()[0] == '{"step": 1, "arena/blocks": 3, "train/reward": 0.5}'
    assert lines(path)[1] == {"step": 2, "train/grad_norm": None, "train/loss": None}


def test_a_resumed_run_cuts_the_file_to_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(6):
        file.write({"step": step})
    with path.open("a") as torn:
        torn.write('{"step": 6, "train/re')
    MetricsFile(path, resume_step=4).write({"step": 5, "train/reward": 0.9})
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 3, 4, 5]
    assert lines(path)[-1]["train/reward"] == 0.9
    MetricsFile(path, resume_step=0)
    assert [line["step"] for line in lines(path)] == [0]
    MetricsFile(path)
    assert path.read_text() == ""


@pytest.mark.parametrize("damage", [b"5\n", b'{"train/reward": 0.5}\n', b"\xff\xfe\n"])
def test_a_damaged_line_ends_what_is_kept(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 2}\n')
    MetricsFile(path, resume_step=2).write({"step": 3})
    assert [line["step"] for line in lines(path)] == [1, 3]


def test_anonymous_memory_is_told_apart():
    resident, anonymous = rss_bytes()
    assert 0 < anonymous <= resident
    held = b"x" * (64 << 20)
    assert rss_bytes()[1] - anonymous > 60 << 20
    del held


async def test_a_blocked_loop_shows_in_the_lag():
    lag = LoopLag()
    running = asyncio.create_task(lag.run())
    done = asyncio.get_running_loop().create_future()

    def block():
        end = asyncio.get_running_loop().time() + 0.2
        while asyncio.get_running_loop().time() < end:
            pass
        done.get_loop().call_later(0.05, done.set_result, None)

    asyncio.get_running_loop().call_later(0.03, block)
    await done
    assert lag.take_p99_ms() > 100
    assert lag.take_p99_ms() == 0.0
    running.cancel()
