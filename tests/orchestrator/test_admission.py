"""Decisions about room in the arena, as tables: numbers in, decisions out."""

import pytest

from shmrl.arena import Arena
from shmrl.orchestrator.admission import WINDOW, Admission, Room, Standstill, share_bytes
from tests.orchestrator.fakes import sample

FULL = 1000


def room(used=0, promised=0, groups=1, returning=False):
    return Room(used, promised, FULL, groups, returning)


@pytest.mark.parametrize(
    ("spills", "now", "admitted"),
    [
        (False, room(), True),
        (False, room(used=500, promised=300), True),  # with 100 more: exactly the mark of 900
        (False, room(used=500, promised=301), False),
        (False, room(used=301, promised=500, returning=True), False),
        (False, room(used=950, groups=0), True),  # one always may: nothing else could change anything
        (False, room(used=950, groups=0, returning=True), False),  # but for the step that will give its blocks back
        (True, room(used=950), True),  # the spill directory takes it
        (True, room(used=950, returning=True), False),  # not while memory is about to come back
        (True, room(used=700), True),
    ],
)
def test_a_group_of_100_in_an_arena_of_1000(spills, now, admitted):
    assert Admission(10, spills=spills).admits(100, now) is admitted


def test_after_the_high_mark_groups_wait_for_the_low_one():
    admission = Admission(10, spills=False)
    found = [admission.admits(100, room(used=used)) for used in (790, 801, 790, 660, 650, 800)]
    assert found == [True, False, False, False, True, True]


def test_the_capacity_is_what_the_arena_can_have_now():
    admission = Admission(10, spills=False)
    assert admission.admits(100, Room(used=400, promised=0, capacity=1000, groups=1, returning=False))
    assert not admission.admits(100, Room(used=400, promised=0, capacity=500, groups=1, returning=False))


def test_an_unknown_source_is_taken_at_its_longest_until_many_have_been_seen():
    admission = Admission(5000, spills=False)
    found = []
    for _ in range(WINDOW):
        admission.saw("a", 100)  # the first to return are the short ones
        found.append(admission.episode_bytes("a"))
    assert found[0] == found[55] == 5000
    assert found[-1] == 100
    assert admission.episode_bytes("b") == 5000


def test_a_size_is_a_high_quantile_of_the_last_ones_and_follows_them():
    admission = Admission(1, spills=False)
    for nbytes in range(1, 1001):
        admission.saw("a", nbytes)
    assert admission.episode_bytes("a") == 1000 - WINDOW + 1 + int(0.9 * WINDOW)
    for _ in range(7):
        admission.saw("a", 5000)  # a tenth of the window: the estimate is among them
    assert admission.episode_bytes("a") == 5000


@pytest.mark.parametrize("T", [10, 300, 2000, 4000, 60_000])
def test_an_episodes_share_is_what_the_arena_takes(T):
    with Arena.create("16MiB") as arena:
        made = sample(arena, T=T, S=T // 2)
        assert share_bytes([made], [made], 1) == arena.stats()["used_bytes"] > 0
        arena.free(made.handles)
        arena.unlink()


def test_a_standstill_is_told_after_two_seconds_of_waiting_and_nothing_else():
    looks = [
        (0.0, True, 1, False),
        (1.9, True, 1, False),
        (2.0, True, 1, True),
        (3.9, True, 1, False),  # what was done about it gets its time
        (4.0, True, 1, True),
        (5.9, True, 2, False),  # something moved
        (7.8, True, 2, False),
        (7.9, True, 2, True),
        (9.8, False, 2, False),  # nobody waits
        (9.9, True, 2, False),
        (11.8, True, 2, False),
        (11.9, True, 2, True),
    ]
    standstill = Standstill(2.0)
    for now, waiting, state, told in looks:
        assert standstill.observe(now, waiting, state) is told, now
