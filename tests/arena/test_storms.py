"""Many processes, and all of them gone at once."""

import os
import signal
import struct

import pytest

from shmrl.arena import Arena, files, inspect
from shmrl.errors import ForeignArena, TooManyProcesses
from tests.arena import layout, storms
from tests.arena.test_corruption import words
from tests.support.clock import wait_until


def is_attached(address):
    """Whether any process is attached, as an inspector sees it."""
    with inspect.look(address) as seen:
        return bool(seen.alive)


def test_forks_from_threads_while_the_lock_is_busy(arena, helper):
    handle = arena.put(b"v" * 100_000)
    storm = helper(storms.fork_storm, arena.address, handle, 80)
    assert storm.line() == "80 0"
    assert len(arena.holders(handle)["held_by"]) == 1  # no child let go of its parent's view
    storm.say()
    assert storm.wait() == 0
    arena.sweep()
    assert [row["tag"] for row in arena.ls()] == [""]
    assert arena.fsck() == []
    arena.free(handle)


def test_every_start_method_attaches(arena, helper):
    handle = arena.put(b"v" * 100_000)
    starter = helper(storms.start_methods, arena.address, handle)
    for method in ("fork", "spawn", "forkserver"):
        assert starter.line() == " ".join([method, *["100000"] * 4])
    assert starter.wait() == 0
    arena.free(handle)
    assert arena.fsck() == []


def test_256_processes_and_not_one_more(arena, helper):
    crowd = helper(storms.crowd, arena.address, 255)
    assert crowd.line() == "255"
    with pytest.raises(TooManyProcesses):
        Arena.attach(arena.address)
    others = [int(one["held_by"][0].rsplit("(", 1)[1][:-1]) for one in arena.ls()]
    assert len(set(others)) == 255
    os.kill(others[100], signal.SIGKILL)
    wait_until(arena.sweep, what="the death of one of 255")
    Arena.attach(arena.address).close()  # its slot is free again
    for pid in [*others[:100], *others[101:]]:
        os.kill(pid, signal.SIGKILL)
    swept = 0
    while swept < 254:
        swept += arena.sweep()
    stats = arena.stats()
    assert (stats["blocks"], stats["orphaned"]) == (255, 255)
    assert arena.discard("run/crowd") == 255
    assert arena.fsck() == []
    assert arena.stats()["used_bytes"] == 0


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_whole_run_killed_at_once_leaves_no_bytes(helper, backing):
    """At the next start; with memfd at once."""
    run = helper(storms.whole_run, backing, 6)
    address = run.line()
    where = files.parse(address)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    if backing == "shm":
        wait_until(lambda: not is_attached(address), what="the end of every process")
        with Arena.create("1MiB") as following:
            assert not [path for path in files.SHM.iterdir() if where.key in path.name]
            following.unlink()
    wait_until(lambda: gone(where), what="the end of the last descriptor")


def gone(where):
    """Whether nothing of an arena can be found any more."""
    try:
        os.close(where.open("live", write=True))
    except (FileNotFoundError, ForeignArena):
        return True
    return False


def test_an_arena_of_another_boot_is_foreign(arena):
    with words(arena) as ctl:
        at = layout.at("boot")
        ctl[at : at + 4] = struct.pack("<I", struct.unpack_from("<I", ctl, at)[0] ^ 1)
        with pytest.raises(ForeignArena, match="is of an earlier boot"):
            Arena.attach(arena.address)
    assert arena.fsck() == []
