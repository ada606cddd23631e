"""How far an evaluation is: the line, on a terminal and in a log."""

import io
from pathlib import Path

from shmrl.launcher import meter as module
from shmrl.launcher.meter import Meter
from tests.env.conftest import until


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_line_says_what_is_done_and_which_one_is_oldest():
    now = [100.0]
    meter = Meter(io.StringIO(), clock=lambda: now[0])
    meter.awaits("the engine (m)")
    assert meter.line() == "waiting for the engine (m)"
    meter.expect("math", 4)
    assert meter.line() == "0 of 4 rollouts done; none runs"
    with meter.running("math", "eval-0", 300.0):
        now[0] = 140.0
        with meter.running("math", "eval-1", 300.0):
            told = "math, task eval-0 (ended after serve.request_timeout_s = 300)"
            assert meter.line() == f"0 of 4 rollouts done; 2 run, the oldest for 40 s: {told}"
        meter.ended("math", 1.0)
    meter.ended("math", None)
    meter.expect("code", 2)
    with meter.running("code", "7", 0):
        told = "1 run, the oldest for 0 s: code, task 7 (serve.request_timeout_s = 0: no limit)"
        done = "2 of 6 rollouts done (math 2 of 4, code 0 of 2), 1 failed, mean reward 0.500"
        assert meter.line() == f"{done}; {told}"


def test_an_interruption_before_the_first_rollout():
    meter = Meter(io.StringIO())
    meter.awaits("the engine (m)")
    assert meter.interrupted(Path("a.jsonl")) == "it was waiting for the engine (m); nothing was run"
    meter.expect("math", 4)
    assert meter.interrupted(Path("a.jsonl")) == "none of 4 rollouts is done; none runs"


async def test_a_terminal_has_one_line_that_is_taken_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    meter = Meter(out)
    meter.expect("math", 4)
    meter.ended("math", 1.0)
    async with meter.shown():
        await until(lambda: out.getvalue())
    assert out.getvalue() == "\x1b[2K[####............] 1 of 4 rollouts done\r\x1b[2K"


async def test_a_log_has_a_line_now_and_then(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "LOGGED_S", 0.01)
    meter = Meter(io.StringIO())
    meter.expect("math", 4)
    async with meter.shown():
        await until(lambda: len(caplog.messages) >= 2)
    assert {*caplog.messages} == {"0 of 4 rollouts done; none runs"}
