"""What an operator reads first: who keeps a full arena and who waits for it, the worst arena on top, what is dead."""

import os
import re
import sys

import pytest

from shmrl.arena import Arena, commands, inspect, overview, printed, render
from shmrl.errors import ConfigError
from tests.support.clock import wait_until

MIB = 1 << 20


def wanting(address, nbytes):
    """Waits for space until it is killed."""
    with Arena.attach(address) as arena:
        print("begins", flush=True)
        arena.put(bytes(int(nbytes)), tag="run/full", timeout_s=600)


def viewing(address, text):
    from shmrl.arena import Handle

    with Arena.attach(address) as arena, arena.get(Handle.parse(text)):
        print("views", flush=True)
        sys.stdin.readline()


def leaving(capacity):
    """Creates an arena with a block and waits to be killed."""
    arena = Arena.create(capacity, run_id="doomed")
    arena.put(bytes(100_000), tag="run/src/g")
    print(arena.address, flush=True)
    sys.stdin.readline()


@pytest.fixture
def waiter(helper):
    """waiter(arena, nbytes): a process that waits for so much of an arena."""

    def start(arena, nbytes):
        other = helper(wanting, arena.address, nbytes)
        assert other.line() == "begins"
        wait_until(lambda: arena.pressure()["waiting"] == 1)
        return other

    return start


def line_of(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_a_full_arena_names_who_keeps_it_and_what_is_waited_for(arena, waiter):
    handles = [arena.put(bytes(30 * MIB), tag=f"run/math/{n}") for n in range(2)]
    other = waiter(arena, 8 * MIB)
    (row,) = commands.top(arena.address)
    assert row["keeper"]["bytes"] == row["used_bytes"]
    assert row["keeper"]["oldest_s"] >= max(one["age_s"] for one in row["oldest"]) - 0.01  # both are rounded
    text = overview.top([row])
    waiting = line_of(text, "  waiting for space: ")
    assert re.fullmatch(rf".*\({other.process.pid}\) for [\d.]+ s, wants 8\.0 MiB", waiting), waiting
    told = line_of(text, "  leaks: ")
    assert re.fullmatch(
        rf"  leaks: none by rule, but somebody waits: .*\({os.getpid()}\) keeps 100% of what is used, the oldest of "
        r"its blocks for [\d.]+ s; no block has a step, so whether one is old for its step cannot be judged",
        told,
    ), told
    arena.ship(handles, readers=1, step=3)
    assert "judged" not in overview.top(commands.top(arena.address))
    other.kill()
    arena.free(handles)
    assert commands.top(arena.address)[0]["keeper"] is None


def test_a_block_that_a_view_keeps_is_its_readers_and_not_its_owners(arena, helper):
    old, new = arena.put(bytes(5000), tag="run/old"), arena.put(bytes(5000), tag="run/new")
    arena.ship(old, readers=1, step=1)
    arena.ship(new, readers=1, step=9)
    other = helper(viewing, arena.address, old)
    assert other.line() == "views"
    arena.done(old, reader=0)
    (row,) = commands.top(arena.address)
    assert row["suspects"]["rows"][0]["why"] == ["done with, but a view keeps it", "shipped 8 steps ago"]
    kept = f"-c {arena.address} ({other.process.pid})"
    lines = [line for line in overview.top([row]).splitlines() if line.startswith("run/old ")]
    assert [kept in line for line in lines] == [True, True, True]  # of suspects, largest and oldest
    assert not any(f"({os.getpid()})" in line for line in lines)
    listed = line_of("\n".join(render.blocks(arena.ls(), None)), "   5.0 KiB  retired")
    assert f"({os.getpid()})" in listed
    assert kept in listed
    other.say()
    other.wait()
    arena.free(new)


def test_what_suspects_have_is_the_sum_of_all(arena):
    handles = [arena.put(bytes(5000), tag=f"run/old/{n}") for n in range(12)]
    new = arena.put(b"x", tag="run/new")
    arena.ship(handles, readers=1, step=1)
    arena.ship(new, readers=1, step=9)
    (row,) = commands.top(arena.address, 3)
    assert row["suspects"]["bytes"] == sum(one["span_bytes"] for one in arena.ls() if one["tag"] != "run/new")
    assert "  leaks: 12 blocks are suspects, 60.0 KiB: below the oldest 3, with why" in overview.top([row])
    arena.free([*handles, new])


def test_the_arena_that_somebody_waits_in_comes_first_on_a_small_terminal(arena, waiter):
    handle = arena.put(bytes(60 * MIB), tag="run/math/g")
    other = waiter(arena, 8 * MIB)
    with Arena.create("1MiB", run_id="idle-" + "x" * 50) as idle:
        rows = sorted(commands.top(), key=lambda row: row["address"] == arena.address)
        text = overview.screen(overview.top(rows, 80, 24), 80, 24)
        idle.unlink()
    lines = text.splitlines()
    assert len(lines) == 23
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].split() == ["ARENA", "USED", "OF", "WAITING", "SUSPECTS", "RUN"]
    first = arena.address.removeprefix("shm:")[:8]
    assert re.match(rf"{first}  93\.8%  64\.0 MiB  1 for [\d.]+ s +-  +test$", lines[1])
    assert lines[2].startswith(idle.address.removeprefix("shm:")[:8])
    assert lines[4].startswith(f"{first}  run test  60.1 MiB (93.8%) of 64.0 MiB used")
    whole = " ".join(line.strip() for line in lines)
    assert f"({other.process.pid}) for " in whole
    assert f"({os.getpid()}) keeps 100% of what is used" in whole
    assert re.fullmatch(r"\.\.\. \d+ more lines: a taller terminal, or `shmrl arena top ADDRESS \| less`", lines[-1])
    piped = overview.top(rows).splitlines()
    assert piped[1].startswith(arena.address)
    assert any(line.startswith(f"{idle.address}  run idle-") for line in piped[3:])
    other.kill()
    arena.free(handle)


def test_a_short_id_is_an_address_as_long_as_it_is_one_arenas(arena):
    start = arena.address.removeprefix("shm:")[:8]
    assert commands.stats(start)[0]["address"] == arena.address
    none = "0" * 8 if start != "0" * 8 else "1" * 8
    with pytest.raises(ConfigError, match=f"0 arenas here have an id that begins with {none}"):
        commands.stats(none)
    with pytest.raises(ConfigError, match="not an arena address"):
        commands.stats("0" * 7)
    alike = [f"shm:{'ab' * 8}{n:016x}" for n in (1, 2)]
    assert printed.short([*alike, "file:/x/copy"]) == {
        alike[0]: "ab" * 8 + "0" * 15 + "1",
        alike[1]: "ab" * 8 + "0" * 15 + "2",
        "file:/x/copy": "file:/x/copy",
    }


def test_long_cells_lose_their_middle_and_numbers_stay():
    rows = [
        ("TAG", "BYTES", "OWNER"),
        ("run/" + "x" * 60 + "/g7/3", "12.5 MiB", "a-very-long-name-of-a-script (16205)"),
    ]
    text = printed.columns(rows, 60)
    assert [len(line) <= 60 for line in text.splitlines()] == [True, True]
    assert re.fullmatch(r"run/x+\.\.\.x*/g7/3  12\.5 MiB  a-very-.*\.\.\..*\(16205\)", text.splitlines()[1])
    assert printed.elided("run/words/g7/3", 10) == "run/...7/3"
    assert printed.columns(rows).splitlines()[1].split() == [" ".join(rows[1]).split()[n] for n in range(5)]


def test_a_dead_arena_begins_with_that_and_has_no_suspects(helper):
    gone = helper(leaving, "2MiB")
    address = gone.line()
    assert commands.top(address)[0]["state"] == "alive"
    gone.kill()
    text = overview.top(commands.top(address))
    first, second, *_ = text.splitlines()
    assert first == ("DEAD, holds 2.0 MiB: no process is attached, `shmrl arena gc` removes it; as it was left:")
    assert second.startswith(f"{address}  run doomed  128.0 KiB")
    assert "SUSPECTS" not in text
    assert "leaks:" not in text
    inspect.gc()


def test_where_no_arena_lives_it_says_what_shows_the_dead(tmp_path):
    with Arena.create("1MiB", backing="file", base=str(tmp_path)):
        pass
    assert [row["state"] for row in commands.ls(str(tmp_path))] == ["dead"]
    for text in (overview.top(commands.top(str(tmp_path))), render.stats(commands.stats(str(tmp_path)))):
        assert text == "no live arenas (shmrl arena ls shows the dead too)"


def test_groups_without_a_name_say_what_is_in_them(arena):
    handle = arena.put(bytes(5000), tag="run")
    text = overview.top(commands.top(arena.address))
    assert line_of(text, "(no column: plain payload, tail, rounding)").split()[-3:] == ["5.0", "KiB", "1"]
    assert line_of(text, "(no step) ")
    assert line_of(text, "(no source in the tag) ")
    assert "(no source in the tag) " in render.stats(commands.stats(arena.address))
    arena.free(handle)


def test_runs_of_one_name_are_told_apart_by_age_and_directory(arena, helper, tmp_path, monkeypatch):
    log = tmp_path / "runs" / "words" / "logs" / "attempt_1" / "run.log"
    log.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (row,) = [one for one in commands.ls() if one["address"] == arena.address]
    assert row["directory"] == str(tmp_path)
    with log.open("w"):
        (row,) = [one for one in commands.ls() if one["address"] == arena.address]
    assert row["directory"] == str(tmp_path / "runs" / "words")
    assert 0 <= row["age_s"] < 600
    heading, line = render.ls([row]).splitlines()[:2]
    assert heading.split()[:4] == ["ADDRESS", "STATE", "AGE", "RUN"]
    assert line.endswith(f"  {tmp_path / 'runs' / 'words'}")
    narrow = render.ls([row], 100).splitlines()[1]
    assert narrow.startswith(arena.address.removeprefix("shm:")[:8] + "  alive")
    assert len(narrow) <= 100
