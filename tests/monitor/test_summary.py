"""What a run came to."""

from shmrl.monitor.summary import PLAIN, duration, marks_of, sparkline, summary

RECORDS = [
    {"step": 0, "eval/e/reward": 0.25},
    *(
        {
            "step": step, "time/step": 2.0, "train/reward": step / 10, "episodes/shipped": 60,
            "episodes/failed": step == 3,
            "episodes/timed_out": 0,
        }
        for step in range(1, 9)
    ),
    {"step": 9, "time/step": 2.5, "train/reward": None, "eval/e/reward": 0.75},
]  # fmt: skip
ARENA = {"peak_bytes": 3 << 20, "created": 1024, "freed": 1024, "blocks": 0}


def test_reward_evaluations_totals_and_where_the_files_are(tmp_path):
    for name in ("rollouts", "weights/step_2", "weights/step_10", "checkpoints/step_8"):
        (tmp_path / name).mkdir(parents=True)
    assert summary(RECORDS[:-1], tmp_path, ARENA, PLAIN) == [
        "8 steps in 16 s, 2.0 s each",
        "reward  _.-=+*#@  0.1000 -> 0.8000, best 0.8000",
        "eval/e  _  0.2500 -> 0.2500, best 0.2500",
        "episodes: 480 shipped, 1 failed",
        "arena: 3.0 MiB at most, 1,024 blocks created, 1,024 freed, 0 left",
        f"files: {tmp_path}: rollouts, weights/step_10, checkpoints/step_8, logs/latest",
    ]
    assert summary(RECORDS, tmp_path, ARENA)[2].endswith("0.2500 -> 0.7500, best 0.7500")
    assert summary(RECORDS[:1], tmp_path, ARENA) == []


def test_a_sparkline_has_at_most_its_width():
    assert len(sparkline(range(1000), width=40)) == 40
    assert sparkline([1.0, 1.0], "ab") == "aa"
    assert sparkline([0, 1, 2, 3], "ab", width=2) == "ab"
    assert (marks_of("UTF-8")[0], marks_of("ascii"), marks_of(None)) == ("▁", PLAIN, PLAIN)


def test_durations_as_people_say_them():
    assert [duration(s) for s in (7.4, 61, 3725)] == ["7 s", "1 min 1 s", "1 h 2 min"]
