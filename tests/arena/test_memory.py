"""Bounds: sizes, a small /dev/shm, a cgroup's limit, growth in steps."""

import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shmrl.arena import Arena, memory
from tests.arena.conftest import UNSHARE
from tests.support.clock import wait_until

MIB = 1 << 20


def on_small_shm(size, code):
    """Runs code in a mount namespace whose /dev/shm is a tmpfs of that size -> (exit code, stdout, stderr)."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" -c "$1"'
    command = [*UNSHARE, "-m", "sh", "-c", script, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
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


def test_a_read_only_dev_shm_is_named_and_a_memfd_does_without():
    """SH-25: created there, attached by a late process through the first one's descriptors."""
    code, said, logged = on_small_shm(
        "1m,ro",
        """
import subprocess, sys
from shmrl import Arena
try:
    Arena.create("1MiB")
except Exception as error:
    print(repr(error))
with Arena.create("64MiB", backing="memfd") as arena:
    handle = arena.put(b"late")
    code = (
        f"from shmrl import Arena, Handle; a = Arena.attach({arena.address!r});"
        f"v = a.get(Handle.parse({str(handle)!r})); print(bytes(v)); v.release(); a.close()"
    )
    print(subprocess.check_output([sys.executable, "-c", code], text=True))
    arena.free(handle)
    arena.unlink()
""",
    )
    assert code == 0, logged
    assert "/dev/shm is missing or cannot be written to" in said
    assert "b'late'" in said


@pytest.mark.parametrize("where", ["", ", backing='file', base='/dev/shm'"], ids=["shm", "file"])
def test_another_program_filling_the_mount_crashes_nobody(where):
    code, said, logged = on_small_shm(
        32 * MIB,
        f"""
import os
from shmrl import Arena
from shmrl.errors import ArenaFull
with Arena.create(16 << 20{where}) as arena:
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


class Cgroup:
    """A memory cgroup of its own. `command` starts an interpreter in it."""

    def __init__(self):
        roots = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
        root = next((root for root in roots if (root / "cgroup.procs").exists()), None)
        if root is None or not os.access(root, os.W_OK):
            pytest.skip("no memory cgroup can be made here")
        self.path = root / f"shmrl-test-{os.getpid()}"
        self.path.mkdir()

    def limit(self, nbytes):
        name = "memory.limit_in_bytes" if (self.path / "memory.limit_in_bytes").exists() else "memory.max"
        (self.path / name).write_text(str(nbytes))

    def command(self, code):
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$0" -uc "$1"', sys.executable, code]

    def run(self, code):
        """(exit code, stdout, stderr)"""
        done = subprocess.run(self.command(code), capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def shared_memory(self):
        """Bytes of it that are charged here, whoever lives."""
        return int(dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())["shmem"])


@pytest.fixture
def cgroup():
    made = Cgroup()
    yield made
    made.path.rmdir()


def test_a_capacity_above_a_cgroups_limit_is_refused_by_name_and_nobody_is_killed(cgroup):
    cgroup.limit(64 * MIB)
    code, _, said = cgroup.run('from shmrl import Arena; Arena.create("1GiB")')
    assert code == 1
    assert f"1073741824 bytes (1.0 GiB) are needed, cgroup {cgroup.path} has " in said
    assert f" available of {64 * MIB} (64.0 MiB): docker run --memory=" in said


HOLDERS = """
import signal, subprocess, sys
from shmrl import Arena
arena = Arena.create("128MiB", backing={backing!r}, base={base!r})
handle = arena.put(bytes(100 << 20))
reader = f"import signal; from shmrl import Arena; a = Arena.attach({{arena.address!r}}); print(1); signal.pause()"
child = subprocess.Popen([sys.executable, "-uc", reader], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid)
signal.pause()
"""


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_after_sigkill_of_every_process_no_byte_is_left(backing, cgroup):
    """SH-05: with memfds at once; of named files those in the base of the next create."""
    base = tempfile.mkdtemp(dir="/dev/shm") if backing == "file" else None
    command = cgroup.command(HOLDERS.format(backing=backing, base=base))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as creator:
        reader = int(creator.stdout.readline())
        assert cgroup.shared_memory() >= 100 * MIB
        os.kill(reader, signal.SIGKILL)
        creator.kill()
    wait_until((lambda: not (cgroup.path / "cgroup.procs").read_text()), 10, "both are gone")
    if base is not None:
        assert cgroup.shared_memory() >= 100 * MIB
        with Arena.create("1MiB", backing="file", base=base) as arena:
            arena.unlink()
        os.rmdir(base)
    wait_until(lambda: cgroup.shared_memory() < MIB, 10, "the kernel frees it")


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_growth_stops_before_a_cgroups_limit(cgroup, backing):
    """Another program took what create() had seen free: the answer is ArenaFull, and never the kernel's kill."""
    cgroup.limit(768 * MIB)
    code, said, logged = cgroup.run(
        f"""
import mmap
from shmrl import Arena
from shmrl.errors import ArenaFull
with Arena.create(600 << 20, backing="{backing}") as arena:
    other = mmap.mmap(-1, 200 << 20)
    other.write(bytes(200 << 20))
    try:
        for _ in range(600):
            arena.put(bytes(1 << 20), timeout_s=0)
    except ArenaFull as error:
        print(arena.stats()["committed_bytes"] >> 20, error)
    arena.unlink()
""",
    )
    assert code == 0, logged
    committed, text = said.split(" ", 1)
    assert 256 <= int(committed) <= 576
    assert f"it cannot grow: cgroup {cgroup.path} has " in text


def under_limit(ulimit, code):
    """What code says on stderr, in a process under `ulimit ...`, which has to fail by an exception."""
    script = f'ulimit {ulimit}; exec "$0" -c "$1"'
    command = ["bash", "-c", script, sys.executable, f"from shmrl import Arena\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize(
    ("ulimit", "capacity", "said"),
    [
        ("-v 2097152", 4 << 30, "RLIMIT_AS has .* of 2147483648 .*: ulimit -v unlimited"),
        ("-v 2097152", 3 << 29, "RLIMIT_AS has .* of 2147483648 .*: ulimit -v unlimited"),
        ("-f 1024", 2 << 20, "RLIMIT_FSIZE has 1048576 bytes .*: ulimit -f unlimited"),
        ("-n 6", 2 << 20, "4 descriptors are needed, RLIMIT_NOFILE is 6, [345] are in use: ulimit -n 1024"),
    ],
    ids=["address space", "address space with the table", "file size", "descriptors"],
)
@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_a_limit_of_the_process_is_refused_with_the_command_that_raises_it(ulimit, capacity, said, backing):
    """Neither SIGXFSZ nor a bare ENOMEM or EMFILE."""
    stderr = under_limit(ulimit, f"Arena.create({capacity}, backing={backing!r})")
    assert re.search(f"ArenaFull: an arena of {capacity} bytes .* does not fit: .*{said}", stderr), stderr


@pytest.mark.parametrize(
    ("ulimit", "said"),
    [("-v 2097152", "RLIMIT_AS has .* of 2147483648"), ("-n 5", "4 descriptors are needed, RLIMIT_NOFILE is 5")],
    ids=["address space", "descriptors"],
)
def test_attach_says_which_limit_of_the_process_forbids_it(ulimit, said):
    with Arena.create("4GiB") as arena:
        stderr = under_limit(ulimit, f"Arena.attach({arena.address!r})")
        assert re.search(f"ArenaError: {arena.address} cannot be attached: .*{said}", stderr), stderr
        arena.unlink()


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
        monkeypatch.setattr(memory, "limits", lambda mount: [limit])
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
