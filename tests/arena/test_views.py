"""Views: many at once, what keeps one alive, and who else may look at the bytes without a copy."""

import pytest

from shmrl.arena import Arena
from shmrl.errors import ForeignArena, StaleHandle
from shmrl.types import Handle


def test_many_views_come_in_order(arena):
    handles = [arena.put(bytes([i]) * i) for i in range(50)]
    views = arena.get_many(reversed(handles))
    assert [bytes(view) for view in views] == [bytes([i]) * i for i in reversed(range(50))]
    arena.free(handles)
    assert arena.stats()["blocks"] == 50
    del views
    assert arena.stats()["blocks"] == 0


@pytest.mark.parametrize("bad", ["stale", "foreign", "none"])
def test_many_views_or_none(arena, bad):
    handles = [arena.put(b"x") for _ in range(10)]
    lost = arena.put(b"x")
    arena.free(lost)
    wrong, error = {
        "stale": (lost, StaleHandle),
        "foreign": (Handle.pack(node=1, arena=1, slot=0, generation=0, nbytes=1, nonce=bytes(8)), ForeignArena),
        "none": (None, TypeError),
    }[bad]
    with Arena.attach(arena.address) as reader:
        with pytest.raises(error):
            reader.get_many([*handles, wrong, handles[0]])
        assert [row["held_by"] for row in arena.ls()] == [[]] * 10
    assert arena.free(handles) == 10
    assert arena.stats()["blocks"] == 0
