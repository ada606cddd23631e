"""The operator's tools, over live and dead arenas: what they say, and that they need no slot and change nothing."""

import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shmrl.arena import Arena, commands, doctor, inspect, overview, render
from shmrl.errors import ArenaFull, ForeignArena, StaleHandle

LOCK, USED = 192, 256  # offsets of srl_header.lock and used_bytes


def shmrl(*arguments):
    command = [sys.executable, "-m", "shmrl", "arena", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def doomed(capacity):
    """Leaves a sealed block, an unsealed one and a view, and waits to be killed."""
    arena = Arena.create(capacity, run_id="doomed")
    handle = arena.put(b"x" * 100_000, tag="run/src/g/e")
    block = arena.reserve(70_000, tag="run/src/g/unsealed")
    print(arena.address, handle, flush=True)
    sys.stdin.readline()
    del block


def reader(address, text):
    from shmrl.arena import Handle

    with Arena.attach(address) as arena, arena.get(Handle.parse(text)):
        print("reading", flush=True)
        sys.stdin.readline()


def rank(address):
    from setproctitle import setproctitle

    setproctitle("shmrl:trainer:1")
    with Arena.attach(address):
        print("attached", flush=True)
        sys.stdin.readline()


def writer(address):
    """Puts and frees as fast as it can."""
    with Arena.attach(address) as arena:
        print("writing", flush=True)
        while True:
            arena.free(arena.put(b"x" * 5000, tag="run/busy", checksum=False))


def ctl_path(address):
    return Path(f"/dev/shm/shmrl-{os.geteuid()}-{address.removeprefix('shm:')}.ctl")


def test_events_tell_the_life_of_a_block(arena):
    handle = arena.put(b"x" * 1000, tag="run/src/g/e")
    arena.ship(handle, readers=2, step=7)
    arena.done(handle, reader=0)
    live = commands.holders(str(handle))
    assert [one["event"] for one in live["events"]] == ["reserve", "seal", "ship", "done"]
    assert {one["tag"] for one in live["events"]} == {"run/src/g/e"}
    arena.done(handle, reader=1)
    told = commands.tail(arena.address)
    assert [one["number"] for one in told] == list(range(len(told)))
    about = [one for one in told if one["event"] != "sweep"]
    assert [one["event"] for one in about] == ["reserve", "seal", "ship", "done", "done", "retire", "free"]
    assert [one["detail"] for one in about] == [1000, 1000, 2, 0, 1, 1000, 1000]
    assert all(f"({os.getpid()})" in one["process"] and one["age_s"] < 60 for one in about)
    lines = [render.event(one) for one in about]
    assert "ship      block 0 generation 0 to 2 readers" in lines[2]
    assert lines[6].endswith("free      block 0 generation 0 1000 B")


def test_the_last_4096_events_are_kept(arena):
    for _ in range(1100):
        arena.free(arena.put(b""))
    told = commands.tail(arena.address)
    assert len(told) == 4096
    assert [one["number"] for one in told] == list(range(told[0]["number"], told[0]["number"] + 4096))
    assert commands.tail(arena.address, told[-2]["number"])[0] == {**told[-2], "age_s": pytest.approx(0, abs=60)}


def test_a_full_arena_leaves_one_event(arena):
    with pytest.raises(OSError, match="no room"):
        arena.put(bytes(80 << 20), on_full="raise")
    assert [(one["event"], one["detail"]) for one in commands.tail(arena.address)][-1] == ("full", 80 << 20)


def test_events_about_no_block_bear_none_of_its_marks(arena):
    """Their slot is 0, or a process: not the block in that place."""
    handle = arena.put(b"x", tag="run/innocent")
    with pytest.raises(ArenaFull, match="no wait helps: the block is larger than the arena"):
        arena.put(bytes(arena.stats()["capacity_bytes"] + 1), timeout_s=30)
    assert [one["tag"] for one in commands.tail(arena.address) if one["event"] == "full"] == [""]
    assert [one["event"] for one in commands.holders(str(handle))["events"]] == ["reserve", "seal"]
    arena.free(handle)


def test_top_orders_by_bytes(arena):
    handles = [arena.put(bytes(n << 16), tag=f"run/s{n}/g") for n in (1, 5, 3)]
    (row,) = commands.top(arena.address, 2)
    assert [one["source"] for one in row["source"]] == ["s5", "s3", "(1 others)"]
    assert [one["tag"] for one in row["largest"]] == ["run/s5/g", "run/s3/g"]
    text = overview.top([row])
    assert text.index("s5") < text.index("s3")
    arena.free(handles)


def test_holders_names_owner_and_readers_dead_or_alive(arena, helper):
    handle = arena.put(b"x" * 1000, tag="run/src")
    other = helper(reader, arena.address, handle)
    other.line()
    text = render.holders(commands.holders(str(handle)))
    assert f"read by     -c {arena.address} ({other.process.pid})" in text
    other.kill()
    text = render.holders(commands.holders(str(handle), arena.address))
    assert f"({other.process.pid}), DEAD" in text
    arena.free(handle)
    arena.sweep()
    with pytest.raises(StaleHandle, match="slot is free"):
        commands.holders(str(handle))
    with pytest.raises(ForeignArena, match="begins with"):
        commands.holders("h01" + "0" * 62)


def test_a_dead_arena_is_read_and_left_as_it_was(helper):
    gone = helper(doomed, "2MiB")
    address, handle = gone.line().split()
    gone.kill()
    before = ctl_path(address).read_bytes()
    assert commands.fsck(address) == [{"address": address, "faults": [], "totals_checked": True}]
    assert [one["event"] for one in commands.tail(address)] == ["reserve", "seal", "reserve"]
    assert render.holders(commands.holders(handle)).count("DEAD") == 1
    assert commands.top(address)[0]["blocks"] == 2
    assert ctl_path(address).read_bytes() == before
    inspect.gc()


def test_a_lock_with_a_dead_owner_is_no_fault(helper):
    gone = helper(doomed, "2MiB")
    address, _ = gone.line().split()
    gone.kill()
    with ctl_path(address).open("r+b", buffering=0) as ctl:
        ctl.seek(LOCK)
        assert struct.unpack("<Q", ctl.read(8))[0] & 0xFFFFFFFF == 0
        ctl.seek(LOCK)
        ctl.write(struct.pack("<Q", 99 << 32 | 1 << 16))  # owned by process 0, which is dead
        ctl.seek(USED)
        ctl.write(struct.pack("<Q", 12345))  # used_bytes as an interrupted allocation left it
    (row,) = commands.fsck(address)
    assert (row["faults"], row["totals_checked"]) == ([], True)
    inspect.gc()


def test_fsck_finds_faults_and_exits_with_one(helper):
    gone = helper(doomed, "2MiB")
    address, _ = gone.line().split()
    gone.kill()
    with ctl_path(address).open("r+b", buffering=0) as ctl:
        ctl.seek(USED)
        ctl.write(struct.pack("<Q", 12345))
    done = shmrl("fsck", address)
    assert (done.returncode, done.stderr) == (1, "")
    assert "blocks own 262144 bytes, the allocator counts 12345" in done.stdout
    inspect.gc()


def test_fsck_of_a_busy_arena_is_clean_and_stops_nobody(arena, helper):
    busy = helper(writer, arena.address)
    busy.line()
    grew, deadline = 0, time.monotonic() + 60
    while grew < 5:  # checks during which the writer went on; on a busy machine it is not always its turn
        created = arena.stats()["created"]
        (row,) = commands.fsck(arena.address)
        assert row["faults"] == []
        grew += arena.stats()["created"] > created
        assert time.monotonic() < deadline
    busy.kill()
    arena.sweep()
    assert commands.fsck(arena.address) == [{"address": arena.address, "faults": [], "totals_checked": True}]


def test_gc_of_an_address_with_nothing_there_is_refused(arena):
    arena.close()
    arena.unlink()
    done = shmrl("gc", arena.address)
    assert (done.returncode, f"{arena.address} is not on this host" in done.stderr) == (1, True), done.stderr


def test_gc_takes_the_dead_and_tells_what_the_living_keep_of_theirs(arena, helper):
    gone = helper(doomed, "2MiB")
    address, _ = gone.line().split()
    kept = helper(sealing, arena.address)
    kept.line()
    for one in (gone, kept):
        one.kill()
    arena.sweep()
    done = shmrl("gc")
    assert f"removed {address}\n" in done.stdout
    assert f"left {arena.address}, which lives, with 1 orphans (128.0 KiB): a process attached to it" in done.stdout
    (left,) = [one for one in commands.gc()["left"] if one["address"] == arena.address]
    assert left == {
        "address": arena.address,
        "orphaned": 1,
        "orphaned_bytes": 2 << 16,
        "unswept": 0,
        "unswept_bytes": 0,
    }
    assert "1 orphaned (128.0 KiB)" in render.stats(commands.stats(arena.address))
    arena.discard("run")
    assert [one for one in commands.gc()["left"] if one["address"] == arena.address] == []


def test_what_the_dead_have_is_told_before_anyone_sweeps(arena, helper):
    mine = arena.put(b"mine", tag="run/mine")
    gone = helper(sealing, arena.address)
    gone.line()
    told = "1 blocks of the dead (128.0 KiB), not swept yet"
    assert told not in shmrl("stats", arena.address).stdout
    gone.kill()
    before = ctl_path(arena.address).read_bytes()
    assert f"\n{arena.address} lives and keeps {told}: whoever attaches" in shmrl("ls").stdout
    assert "nothing is to be deleted" not in shmrl("ls").stdout
    assert f"\n  {told}\n" in shmrl("stats", arena.address).stdout
    assert f"left {arena.address}, which lives, with {told}: " in shmrl("gc").stdout
    found = next(one for one in doctor.doctor() if one["name"] == "arenas")
    assert re.search(r" and [1-9]\d* blocks of the dead \(.*\), not swept yet, ", found["detail"])  # of all arenas
    for order in ((), ("--sort", "size"), ("--sort", "age"), ("--sort", "tag")):
        heading, *rows = shmrl("ls", arena.address, "--state", "orphan", *order).stdout.splitlines()
        assert len(rows) == 1, rows
        assert f"({gone.process.pid}), DEAD" in rows[0]
    assert heading.split() == ["BYTES", "STATE", "STEP", "AGE", "OWNER", "READ", "BY", "TAG", "HANDLE"]
    orphans = inspect.Filter(state="orphan", holder=str(os.getpid()))
    assert list(commands.blocks(arena.address, orphans)) == []
    assert ctl_path(arena.address).read_bytes() == before
    arena.sweep()
    (row,) = commands.blocks(arena.address, inspect.Filter(state="orphan"))
    assert (row["tag"], row["owner"], row["owner_dead"]) == ("run/src", None, False)
    assert commands.stats(arena.address)[0]["unswept"] == 0
    arena.discard("run/src")
    arena.free(mine)


def sealing(address):
    arena = Arena.attach(address)
    print(arena.put(bytes(100_000), tag="run/src"), flush=True)
    sys.stdin.readline()


def test_inspectors_need_no_slot():
    with Arena.create("1MiB", max_processes=1) as arena:
        handle = arena.put(b"abc", tag="run/src")
        for command in (["top"], ["fsck"], ["tail"], ["holders", handle]):
            address = [] if command[0] == "holders" else [arena.address]
            done = shmrl(*command, *address)
            assert (done.returncode, done.stderr) == (0, "")
            assert arena.address in done.stdout or command == ["tail"]
            json.loads(shmrl(*command, *address, "--json").stdout)
        arena.unlink()


def test_bad_arguments_are_usage_errors():
    assert shmrl("holders", "h12").returncode == 2
    assert shmrl("fsck", "nowhere").returncode == 2
    done = shmrl("tail", "shm:" + "0" * 32)
    assert done.returncode == 1
    assert done.stderr.startswith("shmrl: error: ")


def test_follow_prints_what_happens_until_the_arena_is_gone(arena):
    command = [sys.executable, "-m", "shmrl", "arena", "tail", arena.address, "--follow", "--json"]
    arena.put(b"", tag="run/first")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen = [json.loads(process.stdout.readline()) for _ in range(2)]
        arena.put(b"", tag="run/second")
        seen += [json.loads(process.stdout.readline()) for _ in range(2)]
        arena.unlink()
        assert process.wait(60) == 1
    assert [(one["event"], one["tag"]) for one in seen] == [
        ("reserve", "run/first"),
        ("seal", "run/first"),
        ("reserve", "run/second"),
        ("seal", "run/second"),
    ]


def test_another_layout_version_is_refused_with_both_numbers(arena):
    with ctl_path(arena.address).open("r+b", buffering=0) as ctl:
        ctl.seek(8)
        (version,) = struct.unpack("<I", ctl.read(4))
        ctl.seek(8)
        ctl.write(struct.pack("<I", version - 1))
        with pytest.raises(ForeignArena, match=f"layout version {version - 1}, this shmrl reads version {version}"):
            Arena.attach(arena.address)
        (row,) = [row for row in commands.ls() if row["address"] == arena.address]
        assert (row["state"], arena.address in render.ls([row])) == ("foreign", True)
        ctl.seek(8)
        ctl.write(struct.pack("<I", version))
    Arena.attach(arena.address).close()


def test_every_table_sums_to_the_arenas_use(arena):
    """FR-04: ten sources of known sizes; bytes by source, step, holder, age and field equal what is used."""
    handles = [arena.put(bytes((n + 1) * 70_000), tag=f"run/s{n}/g") for n in range(10)]
    with arena.reserve(5000, tag="run/s0/columns") as block:
        handles.append(block.seal(columns=[("routing", 0, 100, 20), ("text", 2000, 1, 10)]))
    arena.ship(handles[:3], readers=1, step=4)
    (row,) = commands.top(arena.address)
    assert row["used_bytes"] == sum(one["span_bytes"] for one in arena.ls())
    for by in ("source", "step", "holder", "age", "field"):
        assert sum(one["bytes"] for one in row[by]) == row["used_bytes"], by
    assert {one["field"]: one["bytes"] for one in row["field"]} | {"": 0} == {"routing": 2000, "text": 10, "": 0}
    spans = {one["tag"]: one["span_bytes"] for one in arena.ls()}
    by_source = arena.stats(by="source", exact=True)["by"]
    assert by_source["s9"] == {"blocks": 1, "bytes": spans["run/s9/g"]}
    assert by_source["s0"]["blocks"] == 2
    arena.free(handles)


def test_spilled_blocks_are_told_apart(tmp_path):
    """They take nothing of the arena, so the tables' bytes leave them out; the heads of all views have them."""
    with Arena.create("1MiB", run_id="run", spill_dir=str(tmp_path)) as arena:
        handles = [arena.put(bytes(600_000), tag=f"run/s/g/{i}", on_full="spill", timeout_s=0) for i in range(3)]
        size = "1.1 MiB"
        assert arena.stats()["spilled_bytes"] == pytest.approx(2 * 600_000, rel=1e-3)
        (listed,) = commands.ls(arena.address)
        assert render.ls([listed]).splitlines()[1].split()[-5:-1] == ["1.0", "MiB", *size.split()]
        assert f"2 spilled ({size}), 0 waits" in render.stats(commands.stats(arena.address))
        assert f"3 blocks, 0 orphans, 2 spilled ({size})" in overview.top(commands.top(arena.address)).splitlines()[0]
        rows = list(commands.blocks(arena.address, inspect.Filter(state="spilled")))
        assert [row["tag"] for row in rows] == ["run/s/g/1", "run/s/g/2"]
        assert "600000 (640.0 KiB of the arena)" in render.holders(commands.holders(str(handles[0]), arena.address))
        assert "600000 (in a file)" in render.holders(commands.holders(str(handles[1]), arena.address))
        arena.free(handles)
        arena.unlink()


def test_blocks_of_old_steps_and_of_the_dead_are_suspects(arena, helper):
    old, new = arena.put(b"x", tag="run/old"), arena.put(b"x", tag="run/new")
    arena.ship(old, readers=1, step=3)
    arena.ship(new, readers=1, step=6)
    assert commands.top(arena.address)[0]["suspects"] == {"blocks": 0, "bytes": 0, "rows": []}
    arena.ship(new, readers=1, step=7)
    other = helper(reader, arena.address, new)
    other.line()
    other.kill()
    (row,) = commands.top(arena.address)
    found = {one["tag"]: one["why"] for one in row["suspects"]["rows"]}
    assert found == {"run/old": ["shipped 4 steps ago"], "run/new": ["a reader is dead, not swept yet"]}
    arena.sweep()
    arena.free([old, new])


def test_blocks_that_a_run_retains_are_no_suspects(arena, helper):
    """A shipper is the last reader of its blocks, behind the ranks: those of a retained step wait for it alone."""
    trainer = helper(rank, arena.address)
    trainer.line()
    kept, lost, behind, new = (arena.put(bytes(5000), tag=f"run/{name}") for name in ("kept", "lost", "behind", "new"))
    arena.ship([kept, lost, behind], readers=3, step=3)
    arena.ship(new, readers=3, step=9)
    for handle, readers in ((kept, (0, 1)), (lost, (1, 2)), (behind, (1,))):  # ranks are 0 and 1, the shipper is 2
        for one in readers:
            arena.done(handle, reader=one)
    (row,) = commands.top(arena.address)
    assert row["kept"] == {
        "blocks": 1,
        "bytes": next(one["span_bytes"] for one in arena.ls() if one["tag"] == "run/kept"),
    }
    assert {one["tag"] for one in row["suspects"]["rows"]} == {"run/lost", "run/behind"}
    assert "  kept: 1 blocks of old steps, 5.0 KiB: " in overview.top([row])
    trainer.say()
    arena.free([kept, lost, behind, new])


def test_which_of_several_arenas_is_asked_for_by_run(arena):
    with Arena.create(capacity="2MiB", run_id="another") as other:
        handle = other.put(b"x", tag="another/a")
        with pytest.raises(ForeignArena, match=f"live arenas, give the address of one: .*{other.address} .run another"):
            commands.tail()
        assert f"of {other.address} (run another)" in render.holders(commands.holders(str(handle)))
        other.free(handle)
        with pytest.raises(StaleHandle, match=f"of {other.address} .run another. is gone"):
            commands.holders(str(handle))
        other.unlink()


def test_ls_filters_sorts_and_limits(arena):
    sizes = {"a": 3, "b": 9, "c": 1}
    handles = [arena.put(bytes(n << 16), tag=f"run/{name}/g") for name, n in sizes.items()]
    arena.ship(handles[1], readers=1, step=5)

    def tags(*arguments):
        done = shmrl("ls", arena.address, "--json", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line)["tag"] for line in done.stdout.splitlines()]

    assert tags("--sort", "size", "--limit", "2") == ["run/b/g", "run/a/g"]
    assert tags("--sort", "age") == ["run/a/g", "run/b/g", "run/c/g"]
    assert tags("--step", "5") == tags("--state", "shipped") == tags("--source", "b") == ["run/b/g"]
    assert len(tags("--holder", os.getpid())) == 3
    assert tags("--state", "orphan") == []
    assert shmrl("ls", arena.address, "--state", "lost").returncode == 2
    assert shmrl("ls", arena.address, "--limit", "1").stdout.splitlines()[-1].startswith("... and more")
    arena.free(handles)


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_arenas_without_a_name_in_dev_shm_are_found(tmp_path, backing):
    base = str(tmp_path) if backing == "file" else None
    with Arena.create("1MiB", backing=backing, base=base) as arena:
        handle = arena.put(b"abc", tag="run/src")
        assert arena.address in [row["address"] for row in commands.ls()]
        assert commands.holders(str(handle))["tag"] == "run/src"
        if backing == "file":
            assert [row["address"] for row in commands.ls(base)] == [arena.address]
        arena.unlink()


def test_a_reader_that_leaves_ends_the_listing(arena):
    for n in range(3000):
        arena.put(b"", tag=f"run/src/g{n}")
    piped = f"{sys.executable} -m shmrl arena ls {arena.address} --json | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{piped}; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=60
    )
    assert (done.stderr, done.stdout.splitlines()[1]) == ("", "141")


def test_names_cannot_write_to_the_terminal():
    with Arena.create("1MiB", run_id="a\x1b[31m\nb") as arena:
        handle = arena.put(b"x", tag="run/\x1b[2J/ü\n")
        at = arena.address
        for command in (["ls"], ["ls", at], ["stats", at], ["top", at], ["tail", at]):
            said = shmrl(*command).stdout
            assert "\\x1b[" in said
            assert "\x1b" not in said
        assert r"tag         run/\x1b[2J/ü\n" in shmrl("holders", str(handle)).stdout.splitlines()
        arena.unlink()


def test_a_ctl_cut_short_is_refused(tmp_path):
    with Arena.create("1MiB", backing="file", base=str(tmp_path)) as arena:
        stem, copy = arena.address.removeprefix("file:"), tmp_path / "copy"
        for part in ("live", "ctl", "data"):
            (tmp_path / f"copy.{part}").write_bytes(Path(f"{stem}.{part}").read_bytes())
        for size, message in ((0, "empty ctl"), (100, "not an arena's"), (300_000, "was cut: 300000 of")):
            Path(f"{copy}.ctl").write_bytes(Path(f"{stem}.ctl").read_bytes()[:size])
            found = shmrl("stats", f"file:{copy}")
            assert (found.returncode, message in found.stderr, "Traceback" in found.stderr) == (1, True, False)
        arena.unlink()


def test_ls_says_what_may_be_deleted_and_top_what_may_leak(arena, helper):
    assert "nothing is to be deleted" in render.ls(commands.ls(arena.address))
    dead = {**commands.ls()[0], "state": "dead", "committed_bytes": 3 << 20}
    assert render.ls([dead]).splitlines()[-1] == (
        "1 dead, holding 3.0 MiB: no process is attached, `shmrl arena gc` removes them"
    )
    handle = arena.put(bytes(1 << 16), tag="run/math/g")
    (row,) = commands.top(arena.address)
    _, memory, leaks, *_ = overview.top([row]).splitlines()
    assert memory.startswith("  memory: most is of source math 100%, and of holder ")
    assert leaks.startswith("  leaks: none suspected")
    suspect = {
        "blocks": 2,
        "bytes": 9 << 16,
        "rows": [{**row["largest"][0], "why": ["an orphan"], "missing": {"count": 0}}],
    }
    assert "  leaks: 2 blocks are suspects, 576.0 KiB: below the oldest 1, with why" in overview.top(
        [{**row, "suspects": suspect}]
    )
    arena.free(handle)


def test_what_an_exception_leaves_is_gone_at_once(tmp_path):
    with pytest.raises(ZeroDivisionError), Arena.create("2MiB") as made:
        1 / 0  # noqa: B018
    with pytest.raises(ForeignArena):
        Arena.attach(made.address)
    with Arena.create("2MiB") as kept:
        with pytest.raises(ZeroDivisionError), Arena.attach(kept.address):
            1 / 0  # noqa: B018
        Arena.attach(kept.address).close()  # who only attached leaves it alone
        kept.unlink()
