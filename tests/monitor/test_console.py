"""The line per step."""

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
