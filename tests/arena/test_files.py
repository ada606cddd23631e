"""Names and lives: where the files are, who may open them, what removes the dead."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from shmrl.arena import Arena, commands, doctor, files, inspect, placement, render, unlink
from shmrl.errors import ArenaCorrupt, ForeignArena


def creator(capacity):
    """Creates an arena with one block and waits to be killed."""
    arena = Arena.create(capacity, run_id="doomed")
    arena.put(b"x" * 100_000, tag="run/src/g/e")
    print(arena.address, flush=True)
    signal.pause()


def names_of(address):
    return sorted(name for name in os.listdir("/dev/shm") if address.split(":")[1] in name)


def test_three_files_for_the_owner_alone():
    before = os.umask(0o777)
    try:
        arena = Arena.create("1MiB")
    finally:
        os.umask(before)
    with arena:
        found = names_of(arena.address)
        assert [name.rsplit(".", 1)[1] for name in found] == ["ctl", "data", "live"]
        assert {stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) for name in found} == {0o600}
        Arena.attach(arena.address).close()
        arena.unlink()
        assert names_of(arena.address) == []
        arena.free(arena.put(b"still works"))
        with pytest.raises(ForeignArena, match="not on this host"):
            Arena.attach(arena.address)
        unlink(arena.address)


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_other_backings(backing, tmp_path):
    with Arena.create("1MiB", backing=backing, base=str(tmp_path) if backing == "file" else None) as arena:
        handle = arena.put(b"abc")
        code = (
            f"from shmrl import Arena, Handle; a = Arena.attach({arena.address!r});"
            f"v = a.get(Handle.parse({str(handle)!r})); print(bytes(v)); v.release(); a.free(a.put(b'x')); a.close()"
        )
        assert subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True) == "b'abc'\n"
        assert len(list(tmp_path.iterdir())) == (3 if backing == "file" else 0)
        arena.unlink()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ForeignArena):
        Arena.attach(arena.address)


def test_a_killed_creators_memory_is_reclaimed(helper):
    doomed = helper(creator, "2MiB")
    address = doomed.line()
    assert inspect.gc() == []
    doomed.kill()
    (row,) = [row for row in inspect.list_arenas() if row["address"] == address]
    assert (row["state"], row["run_id"], row["blocks"], row["orphaned"]) == ("dead", "doomed", 1, 0)
    assert address in commands.gc()["removed"]
    assert names_of(address) == []


def test_the_next_create_removes_the_dead_and_not_the_living(helper):
    doomed, living = helper(creator, "1MiB"), helper(creator, "1MiB")
    gone, kept = doomed.line(), living.line()
    doomed.kill()
    with Arena.create("1MiB") as arena:
        assert names_of(gone) == []
        assert len(names_of(kept)) == 3
        arena.unlink()
    living.kill()
    assert kept in inspect.gc()


def test_what_a_creator_left_half_made_is_garbage():
    where = files.new("shm", None)
    os.close(where.create("live"))
    (row,) = [row for row in inspect.list_arenas() if row["address"] == where.address]
    assert row["state"] == "unfinished"
    with pytest.raises(ArenaCorrupt, match="no ctl"):
        inspect.check(where.address)
    assert where.address in inspect.gc()


def test_a_living_arena_whose_ctl_was_cut_is_no_unfinished_one(tmp_path):
    with Arena.create("1MiB", backing="file", base=str(tmp_path)) as arena:
        path = next(tmp_path.glob("*.ctl"))
        whole = path.read_bytes()
        os.truncate(path, 4096)
        (row,) = inspect.list_arenas(str(tmp_path))
        path.write_bytes(whole)
        assert row["state"] == "corrupt"
        assert row["error"] == f"the arena's ctl was cut: 4096 of {len(whole)} bytes are left"
        assert [row["state"] for row in inspect.list_arenas(str(tmp_path))] == ["alive"]
        arena.unlink()


def test_a_pipe_in_place_of_a_part_is_not_waited_for(tmp_path):
    with Arena.create("1MiB", backing="file", base=str(tmp_path)) as arena:
        data = next(tmp_path.glob("*.data"))
        data.rename(tmp_path / "kept")
        os.mkfifo(data)
        with pytest.raises(ArenaCorrupt, match="a data file of 0 bytes"):
            Arena.attach(arena.address)
        (tmp_path / "kept").rename(data)
        arena.unlink()


def test_a_ctl_of_noise_is_refused():
    with Arena.create("1MiB") as arena:
        path = f"/dev/shm/{names_of(arena.address)[0]}"
        with open(path, "r+b") as ctl:
            good = ctl.read(4096)
            for at in (0, 8, 40, 48, 56, 60, 300):  # magic, version, capacity, sizes, counters
                ctl.seek(at)
                ctl.write(b"\xfe\xca" * 4)
                ctl.flush()
                with pytest.raises(ForeignArena if at == 8 else ArenaCorrupt):
                    Arena.attach(arena.address)
                ctl.seek(0)
                ctl.write(good)
                ctl.flush()
        arena.unlink()


def test_another_uid_is_told_so():
    """Seen from a user namespace in which we are nobody, or (as root) by changing the uid."""
    nobody = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else ["unshare", "-U"]
    with Arena.create("1MiB") as arena:
        code = f"from shmrl import Arena\ntry: Arena.attach({arena.address!r})\nexcept Exception as e: print(repr(e))"
        said = subprocess.check_output([*nobody, sys.executable, "-c", code], text=True)
        assert said.startswith("ForeignArena"), said
        arena.unlink()


@pytest.mark.parametrize("address", ["", "shm", "shm:", "shm:../x", "ftp:abc"])
def test_bad_addresses(address):
    with pytest.raises(ValueError, match="not an arena address"):
        Arena.attach(address)


@pytest.mark.parametrize(
    "arguments",
    [
        {"capacity": "lots"},
        {"capacity": -1},
        {"capacity": "1MiB", "max_processes": 257},
        {"capacity": "1MiB", "backing": "disk"},
        {"capacity": "1MiB", "backing": "file"},
        {"capacity": "1MiB", "spill_dir": "/tmp/none"},
        {"capacity": "1MiB", "orphan_ttl_s": -1},
        {"capacity": "1MiB", "orphan_ttl_s": float("nan")},
        {"capacity": "1MiB", "orphan_ttl_s": float("inf")},
    ],
)
def test_bad_arguments_leave_nothing(arguments):
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(ValueError, match=r"size|capacity|max_processes|backing|spill_dir|orphan_ttl_s"):
        Arena.create(**arguments)
    assert set(os.listdir("/dev/shm")) - before == set()


def test_commands_show_what_is_there(arena):
    handle = arena.put(bytes(100_000), tag="run/src/g/e")
    assert arena.address in render.ls(commands.ls())
    (row,) = commands.stats(arena.address)
    assert (row["run_id"], row["blocks"], row["used_bytes"]) == ("test", 1, 131_072)
    assert row["by_source"] == {"src": {"blocks": 1, "bytes": 131_072}}
    assert [(p["pid"], p["alive"]) for p in row["attached"]] == [(os.getpid(), True)]
    text = render.stats([row])
    assert "1 blocks, 128.0 KiB used" in text
    assert str(os.getpid()) in text
    assert render.gc(commands.gc()).endswith("freed")
    arena.free(handle)


def test_doctor_finds_the_machine_able():
    findings = {one["name"]: one for one in doctor.doctor()}
    assert findings["kernel byte locks"]["status"] == "ok"
    assert findings["/dev/shm"]["status"] in ("ok", "warn")
    assert "shmrl" not in findings["address space"]["detail"]
    assert findings["NUMA nodes"]["detail"].split()[0] == ",".join(map(str, placement.nodes()))
    for backing in ("shm", "memfd"):
        huge = findings[f"huge pages, {backing}"]
        assert "(4.0 MiB tried)" in huge["detail"] if huge["status"] == "ok" else "became huge pages" in huge["fix"]


def test_doctor_only_looks(monkeypatch):
    """Dead arenas are what an operator asks it about: they stay until `gc`, or until the next arena is made."""
    removed = []
    monkeypatch.setattr(files, "remove_if_dead", removed.append)
    assert "dead holding" in {one["name"]: one for one in doctor.doctor()}["arenas"]["detail"]
    assert removed == []
