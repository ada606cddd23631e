"""The run directory: used or not, attempts and links, checkpoints that count, what resuming drops."""

import pytest

from shmrl.config.rundir import RunDir, latest_checkpoint, make_private, open_run_dir, peek_run_dir, write_atomic
from shmrl.errors import ConfigError


def checkpoint(root, step, stable=True):
    directory = root / "checkpoints" / f"step_{step}"
    directory.mkdir(parents=True)
    if stable:
        (directory / "STABLE").touch()


def test_only_complete_checkpoints_count(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 12, stable=False)
    assert latest_checkpoint(tmp_path) == 10


def test_a_used_directory_is_refused_with_the_three_ways_out(tmp_path):
    open_run_dir(tmp_path).write_record({"status": "failed"})
    with pytest.raises(ConfigError) as caught:
        open_run_dir(tmp_path)
    for way in ("run.json", "--resume", "--clean", "--run.output-dir"):
        assert way in str(caught.value)


@pytest.mark.parametrize(
    ("path", "reason"), [("file/out", "Not a directory"), ("x" * 300, "File name too long"), ("file", "File exists")]
)
def test_a_directory_that_cannot_be_made_is_a_fault_of_the_configuration(tmp_path, path, reason):
    (tmp_path / "file").touch()
    for start in (open_run_dir, peek_run_dir):
        with pytest.raises(ConfigError, match=rf"run.output_dir = '.*': {reason}"):
            start(tmp_path / path)


def test_clean_removes_what_a_run_writes_and_nothing_else(tmp_path):
    (tmp_path / "notes.txt").touch()
    checkpoint(tmp_path, 3)
    RunDir(tmp_path, 1).write_record({"status": "failed"})
    open_run_dir(tmp_path, clean=True).open_logs()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "notes.txt"]


@pytest.mark.parametrize("record", [None, "{", "[]", '{"mine": 1}'])
def test_clean_leaves_what_no_run_has_written(tmp_path, record):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "precious").touch()
    if record is not None:
        (tmp_path / "run.json").write_text(record)
    with pytest.raises(ConfigError, match=r"weights, but no run\.json of a run: --clean leaves them alone"):
        open_run_dir(tmp_path, clean=True)
    assert (tmp_path / "weights" / "precious").exists()


def test_resume_keeps_weights_up_to_the_checkpoint_and_makes_the_next_attempt(tmp_path):
    for step in range(5):
        (tmp_path / "weights" / f"step_{step}").mkdir(parents=True)
    checkpoint(tmp_path, 2)
    open_run_dir(tmp_path, resume=True).open_logs()
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["step_0", "step_1", "step_2"]
    assert open_run_dir(tmp_path, resume=True).attempt == 2


def test_resume_without_a_checkpoint_starts_from_nothing(tmp_path):
    (tmp_path / "weights" / "step_0").mkdir(parents=True)
    open_run_dir(tmp_path, resume=True)
    assert list((tmp_path / "weights").iterdir()) == []


def test_resume_and_clean_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match="give one"):
        open_run_dir(tmp_path, resume=True, clean=True)


def test_links_follow_the_newest_attempt(tmp_path):
    for attempt in (1, 2):
        rundir = RunDir(tmp_path, attempt)
        rundir.open_logs()
        rundir.env_log("eval", "c").write_text(str(attempt))
    assert (tmp_path / "logs" / "envs" / "eval" / "c.log").read_text() == "2"
    assert (tmp_path / "logs" / "latest").readlink().name == "attempt_2"


def test_an_atomic_write_replaces_the_file_and_leaves_no_other(tmp_path):
    write_atomic(tmp_path / "a" / "x.json", "1")
    write_atomic(tmp_path / "a" / "x.json", "2")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.json"]
    assert (tmp_path / "a" / "x.json").read_text() == "2"


def test_private_directories_are_so_from_the_first_that_was_missing(tmp_path):
    make_private(tmp_path / "a" / "b" / "c")
    make_private(tmp_path / "a" / "b" / "c")
    assert [(tmp_path / part).stat().st_mode & 0o777 for part in ("a", "a/b", "a/b/c")] == [0o700] * 3
