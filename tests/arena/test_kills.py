"""SIGKILL at any moment of any process: nothing leaks, nobody else's bytes are touched, the arena stays usable."""

import pytest

from tests.arena.soak import KILLS, soak
from tests.arena.storm import settled, storm


@pytest.mark.parametrize("seed", [1, 2])
def test_hundreds_of_kills_leave_a_clean_arena(arena, helper, seed):
    assert helper(storm, arena.address, 250, 4, seed).line() == "kills=250"
    assert settled(arena) > 1000
    with arena.get(arena.put(b"x" * (40 << 20)), verify=True) as view:  # in one piece again
        assert view.nbytes == 40 << 20


def test_a_storm_on_every_backing_leaves_nothing():
    storms, kills, created, spilled = soak(10)
    assert (kills, created > 100 * storms, spilled > storms) == (KILLS * storms, True, True)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_minutes_of_storms_leave_nothing():
    _, kills, *_ = soak(600, seed=1000)
    assert kills > 2000
