"""The line per step."""

import json
import os
import pty
import subprocess
import sys

from shmrl.monitor.console import show, step_line

RECORD = {
    "step": 12, "time/step": 3.42, "train/reward": 0.71234, "train/loss": -0.012, "train/mismatch_kl": 1.2e-7,
    "train/entropy": 1.5, "train/grad_norm": 0.4, "train/tokens_per_s": 5123.4, "arena/used_fraction": 0.034,
    "off_policy/mean": 0.5, "off_policy/dropped": 0, "eval/e/reward": 0.8, "eval/e/pass@1": 0.5, "eval/e/failed": 0.0,
}  # fmt: skip


def test_a_step_is_one_line():
    assert step_line(RECORD, 100) == (
        "step 12/100 | 3.4s | reward 0.7123 | loss -0.0120 | mismatch KL 1.2e-07 | entropy 1.500 | grad norm 0.400 | "
        "tokens/s 5123 | arena 3.4% | lag 0.50 | dropped 0 | e/pass@1 0.5000 | e/reward 0.8000"
    )
    assert step_line({"step": 0, "eval/e/reward": 0.25, "train/loss": None}, 100) == "step 0/100 | e/reward 0.2500"


def test_a_file_gets_it_plain(capsys):
    show("step 1/2 | 3.4s")
    assert capsys.readouterr().out == "step 1/2 | 3.4s\n"


def test_a_narrow_terminal_keeps_what_matters():
    narrow = step_line(RECORD, 100, 90)
    assert len(narrow) < 90
    assert all(word in narrow for word in ("step 12/100", "3.4s", "reward", "tokens/s", "e/reward"))
    assert step_line(RECORD, 100, 400) == step_line(RECORD, 100)


def test_what_seldom_happens_is_shown_when_it_does():
    seldom = {"step": 1, "episodes/failed": 2, "payload/truncated_samples": 3, "arena/spilled": 0}
    assert step_line(seldom, 2) == "step 1/2 | failed 2 | truncated 3"


def test_as_json_a_line_has_its_metrics(capsys):
    show("step 1/2", as_json=True, metrics={"step": 1})
    line = json.loads(capsys.readouterr().out)
    assert (line["message"], line["metrics"]) == ("step 1/2", {"step": 1})


def test_no_color_leaves_a_terminals_lines_plain():
    code = "from shmrl.monitor.console import show; show('step 1/2 | reward 0.5')"
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        seen = on_a_terminal([sys.executable, "-c", code], environment)
        assert ("\x1b[1;36m" in seen) == coloured
        assert "reward" in seen


def on_a_terminal(command, environment):
    """What a command prints on a terminal of its own."""
    ours, theirs = pty.openpty()
    base = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run(command, stdout=theirs, env={**base, "TERM": "xterm", **environment}, check=True, timeout=60)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        return terminal.read1(65_536).decode()
