"""Several processes on one arena: sharing, death at any time, waiting for space."""

import sys

import pytest

from shmrl.arena import Arena, Handle
from shmrl.errors import ArenaFull


def reader(address, handle):
    with Arena.attach(address) as arena:
        view = arena.get(Handle.parse(handle))
        print(bytes(memoryview(view)[:4]).decode(), flush=True)
        sys.stdin.readline()
        view.release()


def writer(address, nbytes):
    with Arena.attach(address) as arena:
        print(arena.put(b"w" * int(nbytes), tag="run/w"), flush=True)
        with arena.reserve(1000):
            sys.stdin.readline()


def test_a_killed_reader_lets_go(arena, helper):
    handle = arena.put(b"abcd" * 1000)
    other = helper(reader, arena.address, handle)
    assert other.line() == "abcd"
    arena.free(handle)
    assert arena.stats()["blocks"] == 1
    other.kill()
    assert arena.sweep() == 1
    assert arena.stats()["blocks"] == 0
    assert arena.fsck() == []


def test_a_killed_writers_sealed_block_is_adopted(arena, helper):
    other = helper(writer, arena.address, 100_000)
    handle = Handle.parse(other.line())
    other.kill()
    arena.sweep()
    stats = arena.stats()
    assert (stats["blocks"], stats["orphaned"]) == (1, 1)
    arena.adopt(handle)
    with arena.get(handle, verify=True) as view:
        assert bytes(view) == b"w" * 100_000
    assert arena.free(handle) == 1
    assert arena.fsck() == []


def test_full_names_the_holder(arena):
    handle = arena.put(bytes(40 << 20), tag="run/big")
    with pytest.raises(ArenaFull, match=r"no room for 40\.0 MiB after 0\.\d s.*40\.\d MiB in 1 blocks"):
        arena.put(bytes(40 << 20), timeout_s=0.05)
    arena.free(handle)
