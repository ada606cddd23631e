"""Shares of sources: guaranteed space, borrowing, who comes first, what is told; over real processes that die."""

import itertools
import os
import re
import struct
import sys
import threading
import time

import pytest

from shmrl.arena import Arena, Handle, commands, inspect, overview, render
from shmrl.arena.waiting import Waiting
from shmrl.errors import ArenaCorrupt, ArenaFull
from shmrl.units import parse_shares
from tests.arena import layout
from tests.arena.test_corruption import words, write
from tests.support.clock import wait_until

MIB = 1 << 20
PART = 4 * MIB - 4096  # with its checksums exactly 4 MiB of the arena
SHARES = {"math": 0.5, "code": "16MiB"}  # of 64 MiB; 16 are left for all others together, a reserve is 8


@pytest.fixture
def shared():
    with Arena.create("64MiB", run_id="test", shares=SHARES) as made:
        yield made
        made.discard("run")
        assert made.fsck() == []
        assert all(used == 0 for _, _, used in made._look().shares())
        made.unlink()


def fill(arena, source, limit=99):
    """Blocks of 4 MiB until the source gets no more, or has `limit` -> their handles."""
    out = []
    while len(out) < limit:
        try:
            out.append(arena.put(bytes(PART), tag=f"run/{source}/g", on_full="raise"))
        except ArenaFull:
            break
    return out


def wait_for_space(address, source, count="1"):
    """Puts blocks that have to wait for space; says when it begins and when it has each."""
    with Arena.attach(address) as arena:
        print("begins", flush=True)
        for number in range(int(count)):
            arena.put(bytes(PART), tag=f"run/{source}/g", timeout_s=60)
            print(number, flush=True)
        sys.stdin.readline()


def waiting(arena, helper, source, count=1):
    """A helper that is in the queue."""
    before = arena.stats()["waits"]
    other = helper(wait_for_space, arena.address, source, count)
    assert other.line() == "begins"
    wait_until(lambda: arena.stats()["waits"] > before)
    return other


# ----------------------------------------------------------------------------------------------- what can be asked for


def test_fractions_and_sizes_are_bytes():
    assert parse_shares({"math": 0.5, "code": "2GiB", "qa": 1 << 20}, 8 << 30) == {
        "math": 4 << 30,
        "code": 2 << 30,
        "qa": 1 << 20,
    }


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 0.5, "b": "40MiB"}, r"75,497,472 bytes together .* exceed the capacity of 67,108,864"),
        ({"a": 1.5}, "share 1.5 of 'a'"),
        ({"a": 0.0}, "share 0.0 of 'a'"),
        ({"a": 1}, "share of 1 bytes for 'a'"),
        ({"a": "half"}, "not a size: 'half'"),
        ({"a/b": 0.5}, "a share for 'a/b'"),
        ({"": 0.5}, "a share for ''"),
        ({"x" * 48: 0.5}, "1 to 47 bytes"),
        ({f"s{i}": 0.01 for i in range(16)}, "shares of 16 sources: at most 15"),
    ],
)
def test_shares_that_cannot_be_are_refused_with_their_numbers(shares, message):
    with pytest.raises(ValueError, match=message):
        Arena.create("64MiB", shares=shares)


def test_fifteen_names_of_47_bytes_fit():
    names = [f"{i:02}" + "n" * 45 for i in range(15)]
    with Arena.create("64MiB", shares=dict.fromkeys(names, "1MiB")) as arena:
        arena.put(bytes(1000), tag=f"run/{names[14]}/g")
        used = arena.stats()["used_bytes"]
        assert [(name, n) for name, _, n in arena._look().shares() if n] == [(names[14], used)]
        arena.unlink()


# --------------------------------------------------------------------------------------------------- share and borrow


def test_pressure_leaves_out_what_is_kept_for_others():
    with Arena.create("8MiB", shares={"math": "4MiB"}) as arena:
        assert arena.pressure()["capacity_bytes"] == 7 << 20  # unused guarantees are more: an eighth
        handles = [arena.put(bytes(4 << 20), tag=f"run/{source}/g", checksum=False) for source in ("math",)]
        assert arena.pressure()["capacity_bytes"] == 7 << 20  # the rest's own share is idle still
        handles.append(arena.put(bytes((4 << 20) - (2 << 16)), tag="run/code/g", checksum=False, on_full="raise"))
        kept = 1 << 16  # of the rest's 4 MiB
        assert arena.pressure()["capacity_bytes"] == (8 << 20) - kept
        arena.free(handles)
        arena.unlink()


def test_a_borrower_has_what_is_idle_but_for_the_reserve(shared):
    assert len(fill(shared, "math")) == 14  # 56 of 64 MiB: its own 32, and 24 of the others' 32
    assert len(fill(shared, "unlisted")) == 2  # within its share, to the last byte


def test_a_source_within_its_share_is_not_refused_while_a_borrower_has_the_rest():
    """A guarantee of at most an eighth is kept free whatever others do."""
    with Arena.create("64MiB", shares={"small": 0.125}) as arena:
        for _ in range(3):
            others = fill(arena, "greedy")
            mine = fill(arena, "small")
            assert (len(others), len(mine)) == (14, 2)
            arena.free(others + mine)
        arena.unlink()


def test_a_source_that_uses_its_share_leaves_no_reserve(shared):
    fill(shared, "code", 4), fill(shared, "other", 4)
    assert len(fill(shared, "math")) == 8
    assert shared.stats()["used_bytes"] == 64 * MIB


def test_names_are_whole_components(shared):
    for tag in ("run/mathematics/g", "run/mat/g", "math/x/g", "math", ""):
        shared.free(shared.put(b"x", tag=tag))
    shared.put(b"x", tag="run/math")
    assert [used for _, _, used in shared._look().shares()] == [0, 256, 0]


def test_what_no_share_could_ever_hold_is_not_waited_for(shared):
    with pytest.raises(ArenaFull):
        shared.put(bytes(57 * MIB), tag="run/math/g", timeout_s=None)
    with Arena.create("64MiB", shares={"all": 1.0}) as arena:
        arena.free(arena.put(bytes(63 * MIB), tag="run/all/g", on_full="raise"))
        arena.unlink()


def test_full_says_what_the_source_has_and_for_whom_the_rest_is_kept(shared):
    fill(shared, "math")
    with pytest.raises(ArenaFull) as caught:
        shared.put(bytes(PART), tag="run/math/g", on_full="raise")
    assert (
        "source math has used 56.0 MiB of its share 32.0 MiB and borrows 24.0 MiB; "
        "8.0 MiB are kept for the sources without a share, code"
    ) in str(caught.value)
    assert f"({os.getpid()}), alive, attached " in str(caught.value)


# --------------------------------------------------------------------------------------------------------- who is next


def test_the_lender_gets_its_share_back_before_an_older_borrower(shared, helper):
    borrowed = fill(shared, "math")
    fill(shared, "code")  # the reserve
    borrower = waiting(shared, helper, "math")
    lender = waiting(shared, helper, "code", 2)
    assert shared.pressure()["waiting"] == 2
    assert shared.pressure()["oldest_wait_s"] > 0
    shared.free(borrowed[:2])
    assert [lender.line(), lender.line()] == ["0", "1"]
    shared.free(borrowed[2:9])  # 28 MiB are left to math: its next block is within its share
    assert borrower.line() == "0"
    with inspect.look(shared.address) as seen:
        took = [
            one["process"]
            for one in seen.events()
            if one["event"] == "reserve" and f"({os.getpid()})" not in one["process"]
        ]
    pids = [int(name.rpartition("(")[2].rstrip(")")) for name in took]
    assert pids == [lender.process.pid, lender.process.pid, borrower.process.pid]


def test_a_waiter_that_comes_to_be_within_its_share_is_one_of_those(shared, helper):
    """Two who borrowed when they began: the share of the younger one is freed, so it need not wait for the older."""
    math, code, rest = fill(shared, "math", 8), fill(shared, "code", 4), fill(shared, "other", 4)
    older = waiting(shared, helper, "code")
    younger = waiting(shared, helper, "math")
    shared.free(math[:1])
    assert younger.line() == "0"
    shared.free([*math[1:3], *code[:1], *rest[:1]])
    assert older.line() == "0"


def test_the_place_of_a_process_is_that_of_its_best_thread(shared):
    first, second = (Waiting(shared, 1, 1, "", "block", 1.0, 64 * MIB) for _ in range(2))
    first._become(within=False)
    shared._queue(True)
    tickets = [ticket_of(shared)]
    second._become(within=True)
    tickets.append(ticket_of(shared))
    second.leave()
    tickets.append(ticket_of(shared))
    shared._queue(False)
    assert [ticket >> 63 for ticket in tickets] == [1, 0, 1]
    assert len({ticket & ~(1 << 63) for ticket in tickets}) == 1


# ------------------------------------------------------------------------------------------------------------ fairness


def ticket_of(arena):
    """This process's ticket; there is no other process of this pid in the table."""
    raw = arena._look().processes()
    entries = (struct.unpack_from("<QQQQ", raw, at) for at in range(0, len(raw), 128))
    return next(ticket for used, ticket, _, pid in entries if used and pid == os.getpid())


class Recorded(Waiting):
    """Notes the ticket it waits with, and whether it looked often enough not to be passed by as stopped."""

    last = None

    def next(self, code, borrows):
        now = time.monotonic()
        self.looked = getattr(self, "looked", True) and now - getattr(self, "at", now) < 0.15
        self.at = now
        spills = super().next(code, borrows)
        if self._queued:
            self.ticket = ticket_of(self._arena)
        return spills

    def leave(self):
        super().leave()
        Recorded.last = self


def writer(address, source, count):
    """Puts blocks; of each that waited a line: ticket, event number of its reserve, whether it looked all the time."""
    with Arena.attach(address) as arena:
        arena._waiting = lambda *how: Recorded(arena, *how)
        for _ in range(int(count)):
            Recorded.last = None
            handle = arena.put(bytes(250_000), tag=f"run/{source}/g", timeout_s=120)
            if (turn := Recorded.last) is not None and hasattr(turn, "ticket"):
                numbers = [
                    e[0] for e in arena._look().events(0) if e[1] == 1 and e[4:6] == (handle.slot, handle.generation)
                ]
                print(turn.ticket, numbers[0], int(turn.looked), flush=True)
        print("done", flush=True)
        sys.stdin.readline()


def listen(one, said):
    """Collects the lines of a writer until it is done."""
    while (line := one.line()) != "done":
        said.append(tuple(map(int, line.split())))


@pytest.mark.parametrize(("hog", "shares"), [(27, {"busy": 0.5}), (0, {"idle": 1.0})], ids=["within", "borrowing"])
def test_under_load_nobody_is_overtaken_by_a_later_ticket_of_its_class(helper, hog, shares):
    """Four writers offer four times the capacity; one block is freed whenever all that are not done yet wait."""
    with Arena.create("8MiB", run_id="test", shares=shares) as arena:
        for _ in range(hog):
            arena.put(bytes(250_000), tag="run/hog", on_full="raise")
        writers, waits = [helper(writer, arena.address, "busy", 32) for _ in range(4)], []
        listeners = [threading.Thread(target=listen, args=(one, waits)) for one in writers]
        for listener in listeners:
            listener.start()
        while unfinished := sum(listener.is_alive() for listener in listeners):
            ready = [row for row in arena.ls() if row["tag"] == "run/busy/g" and row["state"] == "ready"]
            if ready and arena.pressure()["waiting"] == unfinished:
                handle = Handle.parse(max(ready, key=lambda row: row["age_s"])["handle"])
                arena.adopt(handle)
                arena.free(handle)
        grants = [number for _, number, looked in sorted(waits) if looked]
        assert len(waits) > 40
        assert len(grants) > 20
        assert {ticket >> 63 for ticket, _, _ in waits} == {int(not hog)}
        assert grants == sorted(grants)
        stats = arena.stats(exact=True)
        assert stats["created"] == 128 + hog
        assert stats["peak_bytes"] <= (8 if hog else 7) * MIB
        arena.discard("run")
        assert arena.fsck() == []
        arena.unlink()


# ------------------------------------------------------------------------------------------------------- what is told


def test_statistics_by_source_have_share_and_borrowed(shared):
    fill(shared, "math", 9), fill(shared, "a", 3), fill(shared, "b", 2)
    rows = shared.stats(by="source")["by"]
    assert rows == {
        "math": {"blocks": 9, "bytes": 36 * MIB, "share": 32 * MIB, "borrowed": 4 * MIB},
        "a": {"blocks": 3, "bytes": 12 * MIB, "share": 16 * MIB, "borrowed": 4 * MIB},
        "b": {"blocks": 2, "bytes": 8 * MIB, "share": 16 * MIB, "borrowed": 4 * MIB},
        "code": {"blocks": 0, "bytes": 0, "share": 16 * MIB, "borrowed": 0},
    }
    told = render.stats(commands.stats(shared.address, "source"))
    assert [line.split() for line in told.splitlines() if line.startswith(("SOURCE", "math", "code"))] == [
        ["SOURCE", "BLOCKS", "BYTES", "SHARE", "BORROWED"],
        ["math", "9", "36.0", "MiB", "32.0", "MiB", "4.0", "MiB"],
        ["code", "0", "0", "B", "16.0", "MiB", "0", "B"],
    ]


def test_top_shows_shares_and_who_waits(shared, helper):
    fill(shared, "math"), fill(shared, "code")
    other = waiting(shared, helper, "math")
    told = overview.top(commands.top(shared.address, 1))
    (line,) = [line for line in told.splitlines() if "waiting for space" in line]
    assert re.fullmatch(rf"  waiting for space: .*\({other.process.pid}\) for \d+\.\d s, wants 4\.0 MiB", line), line
    assert "leaks: none by rule, but somebody waits: " in told
    rows = [line.split() for line in told.splitlines()]
    assert ["SOURCE", "BYTES", "BLOCKS", "SHARE", "BORROWED"] in rows
    assert ["math", "56.0", "MiB", "14", "32.0", "MiB", "24.0", "MiB"] in rows
    other.kill()


def test_an_arena_without_shares_shows_none(arena):
    arena.put(b"x", tag="run/math/g")
    assert arena.stats(by="source")["by"] == {"math": {"blocks": 1, "bytes": 256}}
    assert "SHARE" not in render.stats(commands.stats(arena.address, "source"))


# -------------------------------------------------------------------------------------------------------------- deaths


def churn(address):
    """Writes, holds and frees in three sources until it is killed."""
    arena = Arena.attach(address)
    for i in itertools.count():
        handles = [
            arena.put(bytes(n), tag=f"run/{source}/g") for source, n in (("math", 70_000), ("code", 900), ("x", 0))
        ]
        block = arena.reserve(300_000, tag="run/code/g")
        arena.free(handles)
        block.free()
        if i == 3:
            print("churns", flush=True)


def test_counters_are_exact_after_kills(shared, helper):
    for _ in range(5):
        other = helper(churn, shared.address)
        assert other.line() == "churns"
        other.kill()
        assert shared.sweep() == 1
        assert shared.fsck() == []
        by_source = {source: row["bytes"] for source, row in shared.stats(by="source", exact=True)["by"].items()}
        used = {source: used for source, _, used in shared._look().shares()}
        assert (by_source["math"], by_source["code"], by_source.get("x", 0)) == (used["math"], used["code"], used[""])
        shared.discard("run")


# ---------------------------------------------------------------------------------------------------------- corruption


def test_more_shares_than_there_can_be_are_refused(shared):
    with words(shared) as ctl:
        at = layout.at("share_count")
        ctl[at : at + 4] = struct.pack("<I", 17)
        with pytest.raises(ArenaCorrupt):
            Arena.attach(shared.address)
        shared.free(shared.put(b"x", tag="run/math/g"))  # what was checked at attach is what counts


def test_a_counter_that_lies_is_told_by_fsck(shared):
    with words(shared) as ctl:
        write(ctl, layout.at("shares") + 64 + 56, 12345)
        assert shared.fsck() == ["share 1 (math) counts 12345 bytes, its blocks own 0"]


def test_a_block_of_no_share_is_kept_and_told(shared):
    handle = shared.put(bytes(1000), tag="run/math/g")
    with words(shared) as ctl:
        at = layout.block(ctl, handle.slot) + 60
        ctl[at : at + 4] = struct.pack("<I", 9)
        assert "block 0 generation 0: share 9 of 3" in shared.fsck()


def test_names_without_an_end_lead_nowhere(shared):
    with words(shared) as ctl:
        at = layout.at("shares")
        ctl[at : at + 1024] = b"\xff" * 1024
        shared.free(shared.put(bytes(1000), tag="run/math/g"))  # of no name's share, then
        assert [fault[:7] for fault in shared.fsck()] == ["share 0", "share 1", "share 2"]
        assert set(shared.stats(by="source")["by"]) == {"\ufffd" * 48}
