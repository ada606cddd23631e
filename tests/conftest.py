"""Every test leaves no process, no shared memory and no listening port behind, or fails."""

import os

import pytest

from tests.support import leftovers, private

os.environ.setdefault("OMP_NUM_THREADS", "1")
leftovers.mark_descendants()
private.enter()


@pytest.fixture(autouse=True)
def leaves_nothing():
    """Compares what is there after the test with what was; ends leaked processes, so that one test fails, not all."""
    before = (leftovers.processes(), leftovers.segments(), leftovers.ports())
    yield
    left = leftovers.wait_until_gone(before)
    for process in leftovers.processes() - before[0]:
        process.kill()
    assert not left, f"left behind: {left}"


@pytest.fixture
def run(tmp_path):
    """`run(...)` makes a whole run (tests.support.runs.Run) in a directory of its own and ends what is still alive."""
    from tests.support.runs import Run

    made = []

    def build(*files, **options):
        directory = tmp_path / f"run{len(made)}"
        directory.mkdir()
        made.append(Run(directory, *files, **options))
        return made[-1]

    yield build
    for one in made:
        one.stop()
