"""SIGKILL at every crash point through Python: the binding, the views and the files as they are used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arena import crashes

ROOT = Path(__file__).parents[2]


def built(directory, **variables):
    """The package, built with these variables (setup.py has them) -> the folder to put on the path."""
    lib = directory / "lib"
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(directory), "--build-lib", str(lib)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return lib


@pytest.fixture(scope="module")
def with_points(tmp_path_factory):
    return built(tmp_path_factory.mktemp("points"), SHMRL_CRASH_POINTS="1")


def test_every_point_of_every_operation(with_points):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.arena.crashes", "1"],
        cwd=with_points,  # before the checkout on the path
        env={**os.environ, "PYTHONPATH": f"{with_points}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    *operations, total = done.stdout.splitlines()
    kills = {name: int(n) for name, n in (line.rsplit(" ", 1) for line in operations)}
    assert set(kills) == set(crashes.OPERATIONS)
    assert min(kills.values()) >= 2, kills
    assert int(total.removeprefix("kills=")) >= 900
