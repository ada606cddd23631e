"""Which reader of a block is missing, by the titles of processes and by what they did."""

import os
import sys

import pytest

from shmrl.arena import Arena, Handle, commands, inspect, overview, render
from shmrl.errors import ArenaFull

MIB = 1 << 20


def titled(address, title, reader, text=""):
    """Attaches under a title; is done with a block, if there is one."""
    from setproctitle import setproctitle

    setproctitle(f"shmrl:{title}")
    with Arena.attach(address, reader=int(reader)) as arena:
        if text:
            arena.done(Handle.parse(text))
        print("attached", flush=True)
        sys.stdin.readline()


@pytest.fixture
def attached(helper):
    def start(*args):
        other = helper(titled, *args)
        assert other.line() == "attached"
        return other

    return start


def shipped_to(handle):
    row = commands.holders(str(handle))
    (line,) = [line for line in render.holders(row).splitlines() if line.startswith("shipped to")]
    return row["missing"], line.removeprefix("shipped to").strip()


def test_a_missing_reader_is_known_by_the_end_of_its_title(arena, attached):
    slow = attached(arena.address, "slow-rank1", 1)
    handle = arena.put(bytes(1000), tag="run/math/g")
    arena.ship(handle, readers=2, step=7)
    arena.done(handle, reader=0)
    name = f"slow-rank1 ({slow.process.pid})"
    missing, told = shipped_to(handle)
    assert missing == {"count": 1, "readers": [{"reader": 1, "process": name}]}
    assert told == f"2 readers, step 7, done: reader 0, missing: reader 1 = {name}"
    new = arena.put(b"x", tag="run/new")
    arena.ship(new, readers=1, step=20)
    assert f"shipped 13 steps ago; waits for reader 1 = {name}\n" in overview.top(commands.top(arena.address))
    slow.kill()
    assert shipped_to(handle)[1].endswith(f"missing: reader 1 = {name}, DEAD")
    arena.sweep()
    assert shipped_to(handle)[1].endswith("done: reader 0, missing: reader 1")
    arena.free([handle, new])


def test_a_missing_reader_is_known_by_a_block_that_it_was_done_with(arena, attached):
    first, second = (arena.put(bytes(1000), tag=f"run/math/{n}") for n in range(2))
    arena.ship([first, second], readers=2, step=7)
    other = attached(arena.address, "consumer", 1, first)
    assert shipped_to(second)[1] == (
        f"2 readers, step 7, done: none, missing: reader 0, reader 1 = consumer ({other.process.pid})"
    )
    assert shipped_to(first)[1] == "2 readers, step 7, done: reader 1, missing: reader 0"
    other.kill()
    arena.free([first, second])


def test_two_of_one_number_are_no_readers_name(arena, attached):
    for title in ("a-rank0", "b-rank0"):
        attached(arena.address, title, 0)
    handle = arena.put(b"x", tag="run/math/g")
    arena.ship(handle, readers=1, step=7)
    assert shipped_to(handle)[1] == "1 readers, step 7, done: none, missing: reader 0"
    arena.free(handle)


def test_a_run_ships_to_ranks_and_behind_them_to_its_orchestrator(arena, attached):
    """Of two ranks some blocks have one as a reader: which one is not in the block."""
    ranks = [attached(arena.address, f"trainer:{n}", n) for n in range(2)]
    both, one = arena.put(bytes(1000), tag="run/both"), arena.put(bytes(1000), tag="run/one")
    arena.ship(both, readers=3, step=7)
    arena.ship(one, readers=2, step=7)
    arena.done(both, reader=0)
    owner = next(row["owner"] for row in arena.ls())
    rank0, rank1 = (f"trainer:{n} ({rank.process.pid})" for n, rank in enumerate(ranks))
    assert owner.endswith(f"({os.getpid()})")
    assert shipped_to(both)[1] == f"3 readers, step 7, done: reader 0, missing: reader 1 = {rank1}, reader 2 = {owner}"
    assert shipped_to(one)[1] == (
        f"2 readers, step 7, done: none, missing: 2 of these: reader 0 = {rank0}, reader 1 = {rank1}, "
        f"reader 2 = {owner}"
    )
    arena.done(one, reader=7)
    assert shipped_to(one)[1] == "2 readers, step 7, done: reader 7, missing: 1, it is not known which"
    arena.free([both, one])


def test_a_full_arena_says_for_whom_its_bytes_wait(arena, attached, monkeypatch):
    monkeypatch.setattr("shmrl.arena.messages.LONG_S", 0)
    slow = attached(arena.address, "slow-rank1", 1)
    handles = [arena.put(bytes(30 * MIB), tag=f"run/math/{n}") for n in range(2)]
    arena.ship(handles, readers=2, step=7)
    arena.done(handles[0], reader=0)
    waits = (
        rf"; 60\.1 MiB wait for reader 1 = slow-rank1 \({slow.process.pid}\); "
        rf"30\.1 MiB wait for reader 0 = .* \({os.getpid()}\)$"
    )
    with pytest.raises(ArenaFull, match=waits):
        arena.put(bytes(8 * MIB), timeout_s=0)
    slow.kill()
    arena.sweep()
    arena.free(handles)


@pytest.mark.parametrize("title", [None, f"trainer:{10**30}"])
def test_no_more_readers_are_believed_in_than_there_can_be(arena, attached, title):
    """A damaged count, and a title that is none of a rank: each cost memory until there was none."""
    if title is not None:
        attached(arena.address, title, 1)
    handle = arena.put(bytes(1000), tag="run/math/g")
    arena.ship(handle, readers=2, step=7)
    with inspect.look(arena.address) as seen:
        (row,) = seen.rows(inspect.Filter(), "size")
        damaged, whole = seen.missing([{**row, "readers": (1 << 32) - 1}, row])
    assert damaged == {"count": (1 << 32) - 1, "readers": []}
    assert [one["reader"] for one in whole["readers"]] == [0, 1]
    arena.free(handle)
