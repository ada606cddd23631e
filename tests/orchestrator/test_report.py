"""What a batch says in metrics.jsonl, and which rollouts are shown."""

import json

import pytest

from shmrl.config import load_run
from shmrl.orchestrator.report import StepReport, batch_metrics, spread
from shmrl.orchestrator.sinks import Batch, Scored
from shmrl.types import EpisodeResult, Sample


def scored(source, reward, version, kept=True):
    samples = (Sample((), T=4, S=2, R=3),) if kept else ()
    return Scored(source, "g", EpisodeResult(True, "t", reward=reward, version_start=version), 0.5, samples)


def test_rewards_count_every_scored_episode_and_lags_those_that_ship():
    batch = Batch(9, [scored("a", 1.0, 8), scored("a", 0.0, 6), scored("b", 0.5, 2, kept=False)])
    assert batch_metrics(batch) == {
        "train/reward": 0.5, "train/reward/a": 0.5, "train/reward/b": 0.5, "off_policy/mean": 1.0, "off_policy/max": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("count", "chosen"), [(2, [0, 5]), (3, [0, 3, 6]), (20, list(range(10)))])
def test_rollouts_are_taken_evenly(count, chosen):
    episodes = [scored("a", float(i), 0) for i in range(10)]
    assert [int(episode.result.reward) for episode in spread(episodes, count)] == chosen


def test_a_warm_up_says_ten_lines_and_nothing_of_a_mismatch(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(
        "[model.tiny]\n[warmup]\nsteps = 300\n[orchestrator]\nbatch_size = 8\n[[orchestrator.train.source]]\n"
        'name = "a"\nenv.id = "reverse-text"\n'
    )
    report = StepReport(load_run([path], {"run.output_dir": str(tmp_path / "out")}), None, None, [], None)
    for step in range(1, 302):
        report.warmed_up(step, {"train/loss": 0.5, "train/mismatch_kl": 0.0})
    assert json.loads((tmp_path / "out" / "warmup.json").read_text()) == {"step": 300, "steps": 300}
    shown = [1, *range(30, 301, 30)]
    assert capsys.readouterr().out.splitlines() == [f"warm-up step {step}/300 | loss 0.5000" for step in shown]
