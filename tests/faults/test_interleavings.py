"""Random histories of a run's roles on two nodes - dispatch, cancel, drop, stale, ship, lost block, the death of
anyone, a link that breaks, a node that is lost - and after each of them the arenas are empty: every block was freed,
once, and no rank has read a wrong byte.
"""

import logging
from collections import Counter
from multiprocessing.connection import Listener

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.lives import Local, Remote, nursery
from tests.faults.machine import Machine
from tests.faults.roles import SMALL

PATHS = {
    "does not encode", "replied after the cancel", "cancelled", "lost", "shipped", "dropped", "drain", "halt",
    "kill_orchestrator", "kill_server", "a worker killed", "a rank killed", "filtered", "stale", "failed", "late",
    "a prompt shared", "on the other node", "a node server killed", "a lost answer", "a lost replica", "a lost node",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Prompts of a few rows are shared, and pauses are short."""
    for module, name, value in SMALL:
        monkeypatch.setattr(module, name, value)


@pytest.fixture(autouse=True)
def _quiet():
    """Failures are data, and logged: here by the thousand."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def run(where, examples, steps):
    """What was seen. A short run is the same every time, and does not spend minutes on a shorter failure."""
    Machine.where, Machine.seen = where, Counter()
    short = examples <= 200
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=short,
            phases=(Phase.generate,) if short else tuple(Phase),
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    return Machine.seen


def check(seen, steps):
    """Every path was gone, but that histories of a few steps have nothing that grows stale."""
    assert all(seen[path] for path in (PATHS if steps >= 60 else PATHS - {"stale"})), seen


def test_whatever_happens_every_block_is_freed_once():
    check(run(Local, 200, 16), 16)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [25, 60])
def test_whatever_happens_every_block_is_freed_once_for_long(steps):
    check(run(Local, 1000, steps), steps)


@pytest.fixture
def processes(helper, tmp_path):
    """Roles in processes of their own."""
    with Listener(str(tmp_path / "roles"), backlog=8) as listener:
        Remote.nursery, Remote.listener = helper(nursery), listener
        yield Remote


def test_whoever_is_killed_every_block_is_freed_once(processes):
    run(processes, 10, 25)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [25, 60])
def test_whoever_is_killed_every_block_is_freed_once_for_long(processes, steps):
    check(run(processes, 110, steps), steps)
