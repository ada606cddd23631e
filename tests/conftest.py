"""Every test leaves no process, no shared memory and no listening port behind, or fails."""

import logging
import os

import hypothesis
import pytest

from shmrl.errors import ConfigError
from tests.support import leftovers, private

os.environ.setdefault("OMP_NUM_THREADS", "1")
leftovers.mark_descendants()
private.enter()
hypothesis.settings.register_profile("facts", deadline=None)  # how long an example takes is no fact about it
hypothesis.settings.load_profile("facts")


@pytest.fixture(autouse=True)
def leaves_nothing():
    """Compares what is there after the test with what was; ends leaked processes, so that one test fails, not all."""
    before = (leftovers.processes(), leftovers.segments(), leftovers.ports())
    yield
    left = leftovers.wait_until_gone(before)
    for process in leftovers.processes() - before[0]:
        process.kill()
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def logs_as_before():
    """What a test sets up for its log (roles do when they run in the test's process) ends with it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers and not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
            handler.close()


@pytest.fixture(scope="session")
def box():
    """A sandbox. Without a bubblewrap that works its tests are skipped and say why; where CI says that there is one
    (SHMRL_TEST_BWRAP), they fail."""
    from shmrl.env.sandbox import Sandbox

    try:
        box = Sandbox()
        box.check()
    except ConfigError as error:
        if "SHMRL_TEST_BWRAP" in os.environ:
            raise
        pytest.skip(str(error))
    return box


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
