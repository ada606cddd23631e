"""Bounds: sizes, a small /dev/shm, a cgroup's limit, growth in steps."""

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shmrl.arena import Arena, memory
from tests.arena.conftest import UNSHARE

MIB = 1 << 20


def on_small_shm(size, code):
    """Runs code in a mount namespace whose /dev/shm has `size` bytes -> (exit code, stdout, stderr)."""
    script = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {sys.executable} -c '{code}'"
    done = subprocess.run([*UNSHARE, "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_headroom():
    assert memory.Limit("m", 64 * MIB, 0).headroom == 8 * MIB
    assert memory.Limit("m", 16 << 30, 0).headroom == 1 << 30
    assert memory.Limit("m", 100 << 30, 0).headroom == 5 << 30


def test_a_capacity_above_shared_memory_is_refused_with_both_sizes():
    code, left, said = on_small_shm(
        16 * MIB,
        """
import atexit, os
from shmrl import Arena
atexit.register(lambda: print(os.listdir("/dev/shm")))
Arena.create(16 * 1024 * 1024 + 1)""",
    )
    assert (code, left) == (1, "[]\n")
    assert "ArenaFull" in said
    assert f"an arena of {16 * MIB + 65536} bytes" in said
    assert f"/dev/shm has {16 * MIB} bytes" in said
    assert "--shm-size=17m" in said


def test_a_memfd_is_not_bound_by_shared_memory():
    code, said, logged = on_small_shm(
        MIB,
        """
from shmrl import Arena
with Arena.create(16 << 20, backing="memfd") as arena:
    with arena.get(arena.put(bytes(12 << 20)), verify=True) as view:
        print(len(view))
    arena.unlink()
""",
    )
    assert (code, said) == (0, f"{12 * MIB}\n"), logged


def test_all_of_a_small_mount_is_usable_and_its_end_is_an_error_not_a_signal():
    """Capacity == available starts; filled to the brim, the answer is ArenaFull naming the limit."""
    code, said, logged = on_small_shm(
        16 * MIB,
        """
import os
from shmrl import Arena
from shmrl.errors import ArenaFull
with Arena.create(16 << 20) as arena:
    n = 0
    try:
        while True:
            arena.put(bytes(1 << 19), timeout_s=0)
            n += 1
    except ArenaFull as error:
        print(n, "blocks", error)
    arena.unlink()
print(os.listdir("/dev/shm"))
""",
    )
    assert code == 0, logged
    assert "does not grow: /dev/shm has" in logged
    blocks = int(said.rsplit(" blocks no room", 1)[0].split()[-1])
    assert 20 <= blocks <= 30
    assert "it cannot grow: /dev/shm has" in said
    assert said.endswith("[]\n")


def test_another_program_filling_shared_memory_crashes_nobody():
    code, said, logged = on_small_shm(
        32 * MIB,
        """
import os
from shmrl import Arena
from shmrl.errors import ArenaFull
with Arena.create(16 << 20) as arena:
    handle = arena.put(bytes(1 << 20))
    with open("/dev/shm/other", "wb", buffering=0) as other:
        try:
            while other.write(bytes(65536)):
                pass
        except OSError as error:
            print(error.errno)
    arena.get(handle, verify=True).release()
    for _ in range(14):
        arena.put(bytes(1 << 20), timeout_s=0)
    print("all committed memory is ours")
    arena.unlink()
""",
    )
    assert (code, said) == (0, "28\nall committed memory is ours\n"), logged


def test_a_cgroup_limit_is_an_error_not_a_kill(tmp_path):
    """A limit below the capacity: refused at create, by name, and nobody is killed for trying."""
    root = next(
        (p for p in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists()), None
    )
    group = root and root / f"shmrl-test-{os.getpid()}"
    try:
        group.mkdir()
    except (OSError, AttributeError):
        pytest.skip("no memory cgroup can be made here")
    limit = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    try:
        (group / limit).write_text(str(64 * MIB))
        code = "from shmrl import Arena; Arena.create('1GiB')"
        script = f'echo $$ > {group}/cgroup.procs && exec {sys.executable} -c "{code}"'
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"cgroup {group} has" in done.stderr
    finally:
        group.rmdir()


def test_memory_is_committed_in_steps_ahead_of_use():
    with Arena.create("512MiB") as arena:
        assert arena.stats()["committed_bytes"] == 256 * MIB
        handles = [arena.put(bytes(50 * MIB), hot=True) for _ in range(4)]  # 56 MiB left: below one step
        arena._ahead.join()
        assert arena.stats()["committed_bytes"] == 320 * MIB
        handles.append(arena.put(bytes(150 * MIB)))  # more than a step at once
        assert arena.stats()["committed_bytes"] >= 352 * MIB
        arena.free(handles)
        assert arena.fsck() == []
        arena.unlink()


def test_pressure_counts_what_growth_may_still_take(monkeypatch):
    with Arena.create("512MiB") as arena:
        assert arena.pressure()["capacity_bytes"] == 512 * MIB
        limit = memory.Limit("cgroup /small", limit=320 * MIB, free=100 * MIB)  # 40 MiB of it are left alone
        monkeypatch.setattr(arena, "_room", (0.0, 0))  # the second is over
        monkeypatch.setattr(memory, "limits", lambda directory, mount: [limit])
        assert arena.pressure()["capacity_bytes"] == (256 + 60) * MIB
        arena.unlink()


def test_memory_that_was_touched_is_taken_first():
    """What one pass of blocks has faulted in, the next one finds mapped."""
    data, faults = bytes(8 * MIB), []
    with Arena.create("128MiB") as arena:
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            handles = [arena.put(data) for _ in range(8)]
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            arena.free(handles)
        arena.unlink()
    assert faults[0] >= 64 * MIB // mmap.PAGESIZE // 16
    assert faults[1] < faults[0] / 100


def test_preallocate_commits_everything():
    with Arena.create("300MiB", preallocate=True) as arena:
        assert arena.stats()["committed_bytes"] == 300 * MIB
        arena.unlink()
