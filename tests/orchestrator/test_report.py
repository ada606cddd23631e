"""What a batch says in metrics.jsonl, and which rollouts are shown."""

import pytest

from shmrl.orchestrator.report import batch_metrics, spread
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
