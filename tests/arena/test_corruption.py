"""Nonsense in ctl is ArenaCorrupt, another typed error, or a clean answer: never a crash, never a hang."""

import contextlib
import mmap
import os
import select
import struct

import pytest

from shmrl.arena import Arena, files
from shmrl.errors import ArenaCorrupt, PeerStalled
from tests.arena import corruptions, layout

PATIENCE_S = 60  # an operation waits 5 s for a lock whose word names a live process, and several may do so


def survive(helper, seed, count):
    """Lines of a helper that corrupts `count` times; the last one it began is named if it dies or hangs."""
    other = helper(corruptions.main, seed, 0, count)
    last, said = "the first", []
    while True:
        ready, _, _ = select.select([other.process.stdout], [], [], PATIENCE_S)
        assert ready, f"a hang after {last}: python -m tests.arena.corruptions {seed} ..."
        line = other.process.stdout.readline().strip()
        assert line, f"exit code {other.process.wait()} after {last}: python -m tests.arena.corruptions {seed} ..."
        if line == "clean":
            return said
        last = line
        said.append(int(line.split()[1]))


def test_hundreds_of_corruptions_crash_nothing(helper):
    errors = survive(helper, 1, 600)
    assert len(errors) == 600
    assert sum(map(bool, errors)) > 60  # they do hit what is read


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 7))
def test_ten_thousand_corruptions_crash_nothing(helper, seed):
    assert len(survive(helper, seed, 2000)) == 2000


@contextlib.contextmanager
def words(arena):
    """The arena's ctl, to be written behind its back; it is as before afterwards."""
    with mmap.mmap(files.parse(arena.address).open("ctl", write=True), 0) as ctl:
        before = ctl[:]
        yield ctl
        ctl[:] = before


def write(ctl, at, word):
    ctl[at : at + 8] = struct.pack("<Q", word)


def test_a_process_that_met_a_contradiction_takes_no_more_space(arena):
    """A bin that names a page that does not exist: refused, told by fsck, and what was sealed can be read."""
    handle = arena.put(b"sealed before")
    with words(arena) as ctl:
        ctl[layout.at("bins") : layout.at("cell_pages")] = struct.pack("<I", 1 << 20) * 256
        ctl[layout.at("bin_map") : layout.at("bins")] = b"\xff" * 32
        with pytest.raises(ArenaCorrupt, match="contradict each other"):
            arena.put(bytes(100_000))
        with pytest.raises(ArenaCorrupt):
            arena.put(b"")
        assert "bin 0: page 1048576 is not the head of a free span" in arena.fsck()
        with arena.get(handle, verify=True) as view:
            assert bytes(view) == b"sealed before"
    arena.free(handle)


def test_a_lock_that_names_nobody_is_not_waited_for(arena):
    with words(arena) as ctl:
        write(ctl, layout.at("lock"), 7 << 32 | 999 << 16)
        with pytest.raises(ArenaCorrupt):
            arena.put(b"x", timeout_s=30)
        with pytest.raises(ArenaCorrupt):
            arena.fsck()


def test_a_lock_that_names_a_live_process_is_waited_for_until_the_deadline(arena):
    with Arena.attach(arena.address) as other, words(arena) as ctl:  # process 0 is who created it
        write(ctl, layout.at("lock"), 7 << 32 | 1 << 16)
        with pytest.raises(PeerStalled) as caught:
            other.put(b"x", timeout_s=0.3)
    assert caught.value.pid == os.getpid()
    assert 0.3 <= caught.value.held_s < 2


def test_a_free_list_that_leads_to_a_live_block_does_not_hand_it_out(arena):
    handle = arena.put(b"alive")
    with words(arena) as ctl:
        write(ctl, layout.at("free_slot"), handle.slot + 1)
        with pytest.raises(ArenaCorrupt):
            arena.put(b"x")
        with arena.get(handle, verify=True) as view:
            assert bytes(view) == b"alive"
    arena.free(handle)


def test_a_descriptor_that_leaves_the_arena_is_refused(arena):
    handle = arena.put(bytes(1000))
    with words(arena) as ctl:
        write(ctl, layout.block(ctl, handle.slot) + 8, (64 << 20) - 10)
        with pytest.raises(ArenaCorrupt, match="1000 bytes in 1024 at"):
            arena.get(handle)
        assert any("passes the committed" in fault for fault in arena.fsck())
    arena.free(handle)


def test_a_data_file_that_was_cut_is_refused(arena):
    where = files.parse(arena.address)
    with open(where.open("data", write=True), "r+b") as data:
        data.truncate(1 << 20)
        with pytest.raises(ArenaCorrupt, match="a data file of 1048576 bytes, for a capacity of 67108864"):
            Arena.attach(arena.address)
        data.truncate(64 << 20)
