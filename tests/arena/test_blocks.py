"""One process: what each verb does to a block, and which error says what."""

import pytest

from shmrl.errors import AlreadyFreed, StaleHandle


def test_put_get_free(arena):
    handle = arena.put(b"hello", tag="run/src/g/e")
    assert handle.nbytes == 5
    with arena.get(handle, verify=True) as view:
        assert bytes(view) == b"hello"
    assert arena.free(handle) == 1
    with pytest.raises(StaleHandle):
        arena.get(handle)
    with pytest.raises(AlreadyFreed):
        arena.free([handle])
    stats = arena.stats()
    assert (stats["blocks"], stats["used_bytes"], stats["created"], stats["freed"]) == (0, 0, 1, 1)


def test_reserve_fill_seal(arena):
    with arena.reserve(4) as block:
        block.buffer[:] = b"abcd"
        handle = block.seal()
    with arena.get(handle) as view:
        assert bytes(view) == b"abcd"
    arena.free(handle)


def test_leaving_without_seal_frees(arena):
    with arena.reserve(100_000):
        assert arena.stats()["blocks"] == 1
    assert arena.stats()["blocks"] == 0


def test_a_view_outlives_free(arena):
    handle = arena.put(b"x" * 1000)
    view = arena.get(handle)
    arena.free(handle)
    assert arena.stats()["blocks"] == 1
    assert bytes(view) == b"x" * 1000
    view.release()
    assert arena.stats()["blocks"] == 0


def test_ship_and_done(arena):
    handle = arena.put(b"x")
    with pytest.raises(ValueError, match="never shipped"):
        arena.done(handle)
    arena.ship([handle], readers=2, step=3)
    arena.done(handle, reader=0)
    arena.done(handle, reader=0)
    assert arena.stats(by="step")["by"]["3"]["blocks"] == 1
    arena.done(handle, reader=1)
    arena.done(handle, reader=1)
    assert arena.stats()["blocks"] == 0


def test_discard_is_by_path_component(arena):
    handles = [arena.put(b"x", tag=tag) for tag in ("r/e/g1", "r/e/g1/x", "r/e/g10")]
    block = arena.reserve(10, tag="r/e/g1/y")
    assert arena.discard("r/e/g1") == 3
    with pytest.raises(AlreadyFreed):
        block.seal()
    arena.free(handles[2])
    assert arena.stats()["blocks"] == 0
