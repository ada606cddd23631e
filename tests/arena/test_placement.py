"""Huge pages, read back from the kernel; NUMA policy: its arguments on other machines, the real call on this one."""

import ctypes
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from shmrl.arena import Arena, placement
from shmrl.errors import ArenaError
from tests.arena.conftest import UNSHARE

MIB = 1 << 20
TMPFS = placement.Mount("/dev/shm", "tmpfs", "never")
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def collapses():
    """Whether this kernel gives huge pages to shared memory by asking (Linux 6.1, unless they are denied)."""
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    return release >= (6, 1) and placement.mount_of(None).huge != "deny"


needs_collapse = pytest.mark.skipif(not collapses(), reason="MADV_COLLAPSE of shared memory: Linux 6.1")


def in_namespace(options, code):
    """What code prints, in a mount namespace with a tmpfs of these options at /dev/shm."""
    script = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$0" -c "$1"'
    command = [*UNSHARE, "-m", "sh", "-c", script, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -------------------------------------------------------------------------------------------------------- huge pages


@needs_collapse
@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_always_makes_all_of_it_huge_in_every_process_and_at_every_step(backing):
    with Arena.create("384MiB", backing=backing, huge_pages="always") as arena:
        assert arena.placement()["huge_bytes"] == 256 * MIB
        data = np.arange(300 * MIB // 8, dtype=np.int64)
        handle = arena.put(data)
        committed = arena.stats()["committed_bytes"]
        assert committed >= 300 * MIB
        with Arena.attach(arena.address) as reader:
            view = reader.get(handle, verify=True)
            assert np.array_equal(np.frombuffer(view, np.int64), data)
            assert reader.placement()["huge_bytes"] >= 300 * MIB // placement.HUGE_PAGE * placement.HUGE_PAGE
            view.release()
        arena.free(handle)
        arena.unlink()


@pytest.mark.parametrize("setting", ["never", "advise", "within_size", "always"])
@pytest.mark.parametrize("huge_pages", ["auto", "never"])
def test_auto_takes_what_the_mount_gives(setting, huge_pages):
    """The mount may give huge pages unasked; asking matters where it wants to be asked."""
    code = f"""
from pathlib import Path
from shmrl.arena import Arena, placement
print(placement.mount_of(Path("/dev/shm")))
with Arena.create(32 << 20, huge_pages="{huge_pages}") as arena:
    arena.free(arena.put(bytes(16 << 20)))
    print(arena.placement()["huge_bytes"] >> 20)
    arena.unlink()
"""
    mount, huge = in_namespace(f"size=64m,huge={setting}", code).splitlines()
    assert mount == f"/dev/shm (tmpfs, huge={setting})"
    if setting == "never" or (setting, huge_pages) == ("advise", "never"):
        assert int(huge) == 0
    elif collapses() or setting != "advise":
        assert int(huge) >= 16


def test_a_disk_has_none_and_says_so(tmp_path):
    mount = placement.mount_of(tmp_path)
    if mount.kind == "tmpfs":
        pytest.skip("the temporary directory is a tmpfs")
    with pytest.raises(ArenaError, match=rf"0 B of 4.0 MiB became huge pages on {mount.path} \({mount.kind}\)"):
        Arena.create("4MiB", backing="file", base=str(tmp_path), huge_pages="always")
    assert list(tmp_path.iterdir()) == []
    Arena.create("4MiB", backing="file", base=str(tmp_path)).close()  # auto asks for nothing there


def test_less_than_a_huge_page_is_refused():
    with pytest.raises(ArenaError, match=r"0 B of 1.0 MiB became huge pages on memfd \(shmem_enabled="):
        Arena.create("1MiB", backing="memfd", huge_pages="always")


def test_only_mappings_inside_are_counted(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "200000-600000 r--s 00000000 00:01 1 /memfd:a\nShmemPmdMapped:  4096 kB\nFilePmdMapped: 0 kB\n"
        "600000-a00000 r--s 00400000 00:01 1 /memfd:a\nShmemPmdMapped:  2048 kB\n"
        "a00000-c00000 r--s 00000000 00:01 2 /memfd:b\nShmemPmdMapped:  2048 kB\n"
    )
    assert placement.huge_bytes(0x200000, 0x800000, smaps) == 6 * MIB


# -------------------------------------------------------------------------------------------------------------- NUMA


def machine(directory, has_memory, allowed):
    (directory / "has_memory").write_text(has_memory + "\n")
    (directory / "status").write_text(f"Mems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
    return placement.nodes(directory, directory / "status")


def test_the_nodes_are_those_with_memory_that_the_process_may_use(tmp_path):
    assert machine(tmp_path, "0-3,8", "0-63") == [0, 1, 2, 3, 8]
    assert machine(tmp_path, "0-1", "1") == [1]
    assert placement.nodes(tmp_path / "none", tmp_path / "none") == [0]  # a kernel without NUMA
    assert set(placement.nodes()) == placement.numbers((placement.SYSFS / "has_memory").read_text())


@pytest.mark.parametrize(
    ("numa", "here", "policy"),
    [
        ("none", [0, 1], None),
        ("interleave", [0, 1], ("interleave", [0, 1])),
        ("interleave", [0], None),
        ("bind:1", [0, 1], ("bind", [1])),
        ("bind:0-1,3", [0, 1, 2, 3], ("bind", [0, 1, 3])),
        ("bind:0", [0], None),
    ],
)
def test_what_a_policy_means_on_a_machine(numa, here, policy):
    assert placement.numa_policy(numa, here) == policy


@pytest.mark.parametrize("numa", ["bind:2", "bind:", "bind:x", "bind", "spread", "bind:0-99999999999"])
def test_what_a_machine_does_not_have_is_refused(numa):
    with pytest.raises(ValueError, match=rf"numa='{numa}': "):
        placement.numa_policy(numa, [0, 1])


class Recorder:
    """Stands for the system call on a machine with more nodes than this one."""

    def __init__(self, errno=0):
        self.calls, self.errno = [], errno

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.errno


@pytest.mark.parametrize(
    ("mode", "nodes", "number", "mask", "maxnode"),
    [
        ("interleave", [0, 1], 3, b"\x03" + bytes(7), 65),
        ("bind", [2], 2, b"\x04" + bytes(7), 65),
        ("bind", [0, 64], 2, b"\x01" + bytes(7) + b"\x01" + bytes(7), 129),
    ],
)
def test_the_arguments_of_mbind(mode, nodes, number, mask, maxnode):
    call = Recorder()
    placement.place(0x7F0000000000, 512 << 30, mode, nodes, call)
    assert call.calls == [(0x7F0000000000, 512 << 30, number, mask, maxnode, 0)]


def test_a_container_that_forbids_mbind_is_told_what_it_needs():
    with pytest.raises(ArenaError, match=r"mbind\(bind, nodes 1\) of 1.0 GiB: .*not permitted .*--cap-add SYS_NICE"):
        placement.place(0x7F0000000000, 1 << 30, "bind", [1], Recorder(errno=1))


def test_the_kernel_takes_the_policy_before_a_page_exists(monkeypatch):
    """The real call, on the mapping of a real arena, as on a machine with two nodes; read back by get_mempolicy."""
    if placement.mbind(0, 0, 0, bytes(8), 65, 0):
        pytest.skip("mbind is forbidden here")
    seen = []

    def place(address, nbytes, mode, on):
        resident = sum(placement.bytes_by_node(".data").values())
        seen.append((nbytes, mode, on, resident))
        real(address, nbytes, mode, [0])

    real = placement.place
    monkeypatch.setattr(placement, "nodes", lambda: [0, 1])
    monkeypatch.setattr(placement, "place", place)
    with Arena.create("8MiB", numa="bind:0") as arena:
        assert seen == [(8 * MIB, "bind", [0], 0)]
        handle = arena.put(bytes(MIB))
        assert policy_at(arena._data_at()[0]) == (placement.MODES["bind"], 1)
        assert arena.placement()["node_bytes"][0] >= MIB
        with Arena.attach(arena.address) as other:  # the policy is the file's, not one mapping's
            assert policy_at(other._data_at()[0]) == (placement.MODES["bind"], 1)
        arena.free(handle)
        arena.unlink()


def policy_at(address):
    mode, mask = ctypes.c_int(), ctypes.c_ulong()
    arguments = (ctypes.byref(mode), ctypes.byref(mask), ctypes.c_ulong(64), ctypes.c_void_p(address), 2)
    assert ctypes.CDLL(None, use_errno=True).syscall(GET_MEMPOLICY[platform.machine()], *arguments) == 0
    return mode.value, mask.value


def test_on_one_node_there_is_nothing_to_do_and_nothing_is_said(monkeypatch, caplog):
    call = Recorder()
    monkeypatch.setattr(placement, "nodes", lambda: [0])
    monkeypatch.setattr(placement, "place", call)
    for numa in ("interleave", "bind:0"):
        with Arena.create("1MiB", numa=numa) as arena:
            arena.unlink()
    assert (call.calls, caplog.records) == ([], [])
    with pytest.raises(ValueError, match="may use the nodes 0 "):
        Arena.create("1MiB", numa="bind:1")


def test_a_disk_has_no_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(placement, "nodes", lambda: [0, 1])
    if placement.mount_of(tmp_path).kind == "tmpfs":
        pytest.skip("the temporary directory is a tmpfs")
    with pytest.raises(ValueError, match="have no policy"):
        Arena.create("1MiB", backing="file", base=str(tmp_path), numa="interleave")


def test_pages_by_node_are_read_from_numa_maps(tmp_path):
    maps = tmp_path / "numa_maps"
    maps.write_text(
        "7f00 interleave:0-1 file=/dev/shm/shmrl-0-ab.data dirty=300 mapmax=2 N0=100 N1=200 kernelpagesize_kB=4\n"
        "7f40 interleave:0-1 file=/dev/shm/shmrl-0-ab.data dirty=2 N1=2 kernelpagesize_kB=2048\n"
        "7f80 default file=/dev/shm/shmrl-0-ab.ctl dirty=7 N0=7 kernelpagesize_kB=4\n"
    )
    assert placement.bytes_by_node("shmrl-0-ab.data", maps) == {0: 400 << 10, 1: (800 << 10) + (4 << 20)}
    assert placement.bytes_by_node("shmrl-0-ab.data", maps.with_name("gone")) == {}


def test_an_arena_sees_its_own_pages():
    with Arena.create("8MiB", backing="memfd") as arena:
        arena.free(arena.put(os.urandom(4 * MIB)))
        assert 4 * MIB <= sum(arena.placement()["node_bytes"].values()) <= 8 * MIB
        arena.unlink()
