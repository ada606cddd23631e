"""SIGKILL at any instruction: nothing leaks, nobody else's bytes are touched, the arena stays usable."""

import pytest

from tests.arena.storm import storm


@pytest.mark.parametrize("seed", [1, 2])
def test_hundreds_of_kills_leave_a_clean_arena(arena, helper, seed):
    assert helper(storm, arena.address, 250, 4, seed).line() == "kills=250"
    arena.sweep()
    assert arena.fsck() == []
    assert all(row["held_by"] == [] for row in arena.ls())
    stats = arena.stats(by="source", exact=True)
    assert stats["blocks"] == stats["orphaned"]
    assert sum(row["bytes"] for row in stats["by"].values()) == stats["used_bytes"]
    arena.discard("run")
    stats = arena.stats(exact=True)
    assert (stats["blocks"], stats["used_bytes"], stats["created"] - stats["freed"]) == (0, 0, 0)
    assert stats["created"] > 1000
    assert arena.fsck() == []
    with arena.get(arena.put(b"x" * (40 << 20)), verify=True) as view:  # in one piece again
        assert view.nbytes == 40 << 20
