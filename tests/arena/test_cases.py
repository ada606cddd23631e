"""Faults that users of comparable systems met, as tests of the arena. Those that had a test already are found here:

SH-01  a reader's exit removes the segment       below; test_processes.py::test_attaching_and_leaving_changes_nothing
SH-02  SIGBUS when tmpfs is full                 below; test_memory.py: ..._an_error_not_a_signal, ..._crashes_nobody
SH-03  64 MB of /dev/shm in containers          below; the same at other sizes in test_memory.py
SH-05  SIGKILL leaks segments                    test_storms.py: a whole run; test_memory.py: ..._no_byte_is_left;
                                                 test_crashes_python.py: at every point of every operation
SH-08  pid liveness is wrong across namespaces   below; test_processes.py::..._in_another_pid_namespace_is_alive
SH-10  no ordering between data and flag         below; test_core.py under ThreadSanitizer
SH-11  a writer waits for a dead reader          below
SH-12  waiting is mistaken for the fault         below; test_processes.py::test_a_stopped_holder_of_the_lock_is_...;
                                                 ten minutes: e2e/test_by_hand.py::test_ten_idle_minutes_are_silent
SH-13  one descriptor per tensor                 test_processes.py: a hundred thousand blocks of eight processes
SH-15  an array outlives the mapping             test_blocks.py: ..._refused_and_the_data_stays; test_views.py: the end
SH-17  a slice pins or pickles its parent        test_reading.py; test_blocks.py::test_a_view_is_not_pickled
SH-18  first touch dominates writes              test_memory.py: ..._touched_is_taken_first; benches/bench_arena.py
SH-19  pages on the wrong socket                 test_placement.py
SH-20  names collide, a stale file is in the way below; test_files.py::test_the_next_create_removes_the_dead_...;
                                                 of a directory in use: node/test_host.py
SH-22  a result arrives after it was dropped     below
SH-25  kernel-owned lifetime                     test_memory.py: a read-only /dev/shm; test_storms.py[memfd]
FR-01  checksums survive a cut                   test_columns.py: a flipped bit; payload/test_assemble.py: a cut one
FR-04  who holds which bytes                     test_commands.py: tables sum to the arena's use; suspects of old steps
FR-05  bounded memory                            orchestrator/test_full_arena.py; test_spill.py: four times what fits
FR-07  a rank reads its layers and tokens        payload/test_gather.py: an eighth of the pages; test_assemble.py there
"""

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from setproctitle import setproctitle

from shmrl.arena import Arena, commands, files, overview, render
from shmrl.errors import AlreadyFreed, ArenaFull, PeerDied
from tests.arena import layout
from tests.arena.test_core import ROOT
from tests.arena.test_corruption import words, write
from tests.arena.test_crashes import build
from tests.arena.test_memory import MIB, on_small_shm
from tests.arena.test_processes import reader, writer
from tests.support.clock import wait_until

ENDS = ("pass", "a.close()", "sys.exit(3)", "raise RuntimeError('mine')", "os._exit(0)")


def interpreters():
    """{version: path} of this one, and of others that can import what the arena needs: one shared object serves all."""
    names = [os.environ.get("SHMRL_TEST_PYTHONS", "").split(os.pathsep), [f"python3.{n}" for n in range(11, 15)]]
    found = {sys.executable: sys.version_info[:2]}
    for name in filter(None, [path for group in names for path in group]):
        path = shutil.which(name)
        code = "import sys, posix_ipc; print(*sys.version_info[:2])"
        done = path and subprocess.run([path, "-c", code], capture_output=True, text=True)
        if done and done.returncode == 0:
            found.setdefault(path, tuple(map(int, done.stdout.split())))
    return {version: path for path, version in found.items()}


@pytest.mark.parametrize("version", interpreters())
def test_sh_01_a_reader_that_exits_removes_nothing(arena, version):
    handle = arena.put(b"abcd")
    for end in ENDS:
        code = (
            "import os, sys; from shmrl.arena import Arena, Handle;"
            f"a = Arena.attach({arena.address!r}); print(bytes(a.get(Handle.parse({str(handle)!r}))))\n{end}"
        )
        done = subprocess.run(
            [interpreters()[version], "-W", "ignore::ResourceWarning", "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.stdout in ("b'abcd'\n", ""), done.stderr  # os._exit flushes nothing
        assert "resource_tracker" not in done.stderr
        assert "leaked" not in done.stderr
        assert ("Traceback" in done.stderr) == end.startswith("raise")
    with arena.get(handle, verify=True) as view:
        assert bytes(view) == b"abcd"
    arena.sweep()
    arena.free(handle)


def test_sh_02_four_mib_on_a_mount_of_one_are_an_error_and_leave_no_file():
    code, left, said = on_small_shm(
        MIB,
        """
import atexit, os
from shmrl import Arena
atexit.register(lambda: print(os.listdir("/dev/shm")))
Arena.create("4MiB")""",
    )
    assert (code, left) == (1, "[]\n")
    assert f"ArenaFull: an arena of {4 * MIB} bytes" in said
    assert f"/dev/shm has {MIB} bytes" in said


def test_sh_03_in_64_mib_just_as_much_starts_and_a_byte_more_does_not():
    code, said, logged = on_small_shm(
        64 * MIB,
        """
from shmrl import Arena
from shmrl.errors import ArenaFull
for backing, capacity in (("shm", 64 << 20), ("shm", (64 << 20) + 1), ("memfd", 128 << 20)):
    try:
        with Arena.create(capacity, backing=backing) as arena:
            print(arena.stats()["capacity_bytes"] >> 20, arena.address.split(":")[0])
            arena.unlink()
    except ArenaFull as error:
        print(error)
""",
    )
    started, refused, memfd = said.splitlines()
    assert (code, started, memfd) == (0, "64 shm", "128 memfd"), logged
    assert f"an arena of {64 * MIB + 65536} bytes" in refused
    assert f"/dev/shm has {64 * MIB} bytes" in refused
    assert "--shm-size=65m" in refused


def test_sh_08_a_dead_holder_whose_pid_lives_again_is_swept(arena, helper):
    handle = arena.put(b"abcd")
    other = helper(reader, arena.address, handle)
    assert other.line() == "abcd"
    other.signal(signal.SIGSTOP)
    with words(arena) as ctl:
        pid_at = layout.PROCESSES_OFF + layout.size("process") + 24
        assert struct.unpack_from("<Q", ctl, pid_at)[0] == other.process.pid
        write(ctl, pid_at, 999_999_999)  # a pid that nobody has: alive all the same
        assert arena.sweep() == 0
        write(ctl, pid_at, os.getpid())  # a pid that somebody else has: dead all the same
        other.kill()
        assert arena.sweep() == 1
    arena.sweep()
    assert arena.holders(handle)["held_by"] == ()
    arena.free(handle)


def test_sh_11_a_writer_goes_on_after_the_death_of_who_held_the_space(arena, helper):
    handle = arena.put(bytes(40 * MIB))
    other = helper(reader, arena.address, handle)
    other.line()
    arena.free(handle)  # the reader's hold is all that is left of it
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(arena.put, bytes(40 * MIB), timeout_s=30)
        wait_until(lambda: arena.pressure()["used_bytes"] and arena.stats()["waits"])
        assert not writing.done()
        other.kill()
        arena.free(writing.result(20))  # long before the writer's own deadline


def test_sh_11_whose_death_leaves_nobody_to_wait_for_is_named_with_what_it_held(arena, helper):
    other = helper(writer, arena.address, 40 * MIB)
    other.line()
    other.kill()
    with pytest.raises(PeerDied, match="all 1 blocks") as caught:  # and not ArenaFull, which a deadline raises
        arena.put(bytes(40 * MIB), timeout_s=30)
    assert f"left: 40.1 MiB in 1 by -c {arena.address} ({other.process.pid}), and nobody else" in str(caught.value)
    assert arena.discard("run/w") == 1


def test_sh_11_no_wait_outlasts_its_deadline(arena, helper):
    handle = arena.put(bytes(40 * MIB))
    other = helper(reader, arena.address, handle)
    other.line()
    arena.free(handle)
    began = time.monotonic()
    with pytest.raises(ArenaFull):
        arena.put(bytes(40 * MIB), timeout_s=0.5)
    assert 0.5 <= time.monotonic() - began < 10
    other.say()
    assert other.wait() == 0


def rank(address, handle):
    """A reader with the title of a role."""
    setproctitle("shmrl:trainer:3")
    reader(address, handle)


def test_sh_12_a_wait_names_the_role_that_is_stopped_and_then_less_often(arena, helper, monkeypatch, caplog):
    """Told after 0.1, 0.2, 0.4 and 0.8 s, and nothing while there is room."""
    monkeypatch.setattr("shmrl.arena.waiting.PATIENCE_S", 0.1)
    handle, mine = arena.put(bytes(40 * MIB)), arena.put(b"mine")
    other = helper(rank, arena.address, handle)
    other.line()
    arena.free(handle)  # the reader's hold is all that is left of it
    here = f"trainer:3 ({other.process.pid}), "
    with pytest.raises(ArenaFull, match=f"{re.escape(here)}alive, attached "):
        arena.put(bytes(40 * MIB), on_full="raise")
    other.signal(signal.SIGSTOP)
    wait_until(lambda: arena._is_stopped(other.process.pid))
    assert caplog.messages == []
    with pytest.raises(ArenaFull):
        arena.put(bytes(40 * MIB), timeout_s=1.2)
    assert 2 <= len(caplog.messages) <= 4
    for message in caplog.messages:
        assert message.startswith("still waiting: no room for 40.0 MiB after ")
        assert re.search(rf"{re.escape(here)}STOPPED, attached \d+ s ago: 40\.1 MiB in 1 blocks", message)
        assert re.search(rf" \({os.getpid()}\), alive, attached \d+ s ago: 256 B in 1 blocks", message)
    assert re.search(rf"\n  STOPPED +{other.process.pid}  trainer:3\n", render.stats(commands.stats(arena.address)))
    assert f"\n  STOPPED: trainer:3 ({other.process.pid})\n" in overview.top(commands.top(arena.address))
    other.signal(signal.SIGCONT)
    wait_until(lambda: not arena._is_stopped(other.process.pid))
    assert "STOPPED" not in overview.top(commands.top(arena.address))
    other.say()
    assert other.wait() == 0
    arena.free(mine)


def test_sh_12_an_idle_arena_says_nothing(arena, helper, caplog):
    """All that roles do while nothing happens, as often as in ten minutes."""
    handle = arena.put(b"abcd", tag="run/idle")
    other = helper(rank, arena.address, handle)
    other.line()
    for _ in range(600):
        assert arena.sweep() == 0
        assert arena.pressure()["waiting"] == 0
    arena.stats(), commands.top(arena.address)
    assert caplog.messages == []
    other.say()
    assert other.wait() == 0
    arena.free(handle)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sh_10_ten_million_payloads_are_never_torn(tmp_path):
    driver = build(tmp_path, "core_driver", ["-O2"])
    done = subprocess.run([driver, "publish", "10000000"], capture_output=True, text=True, timeout=850)
    assert (done.stdout, done.returncode) == ("ok\n", 0)


def test_sh_20_two_runs_at_once_share_no_name(arena):
    with Arena.create("1MiB", run_id="test") as other:
        ours, theirs = (files.parse(one.address).key for one in (arena, other))
        assert len(ours) == len(theirs) == 32  # 128 bits
        assert ours != theirs
        other.free(other.put(b"x"))
        assert arena.stats()["created"] == 0
        other.unlink()
    assert len([path for path in files.SHM.iterdir() if ours in path.name]) == 3


def test_sh_22_results_of_a_cancelled_group_are_freed_as_they_arrive(arena):
    late = [arena.reserve(70_000, tag=f"run/e/g7/{i}") for i in range(3)]
    kept = arena.put(b"kept", tag="run/e/g70/0")
    assert arena.discard("run/e/g7") == 3
    for block in late:
        with pytest.raises(AlreadyFreed, match="discarded"):
            block.seal()
    stats = arena.stats(exact=True)
    assert (stats["blocks"], stats["created"], stats["freed"]) == (1, 4, 3)
    assert arena.free(kept) == 1
