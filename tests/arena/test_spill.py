"""Blocks in files of the spill directory: the same handle, the same verbs, and no file outlives its block."""

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from shmrl.arena import Arena, Handle, commands, unlink
from shmrl.arena.inspect import gc, look
from shmrl.errors import AlreadyFreed, ArenaCorrupt, ArenaFull, ForeignArena, NotSealed, StaleHandle, ViewsAlive
from tests.arena.test_processes import wait_for
from tests.support.clock import wait_until

MIB = 1 << 20


@pytest.fixture
def spilling(tmp_path):
    """An arena of 1 MiB that may spill."""
    with Arena.create("1MiB", run_id="test", spill_dir=str(tmp_path)) as made:
        yield made
        made.unlink()
    assert list(tmp_path.iterdir()) == []


def files(directory):
    """Names of the spilled blocks' files under a spill_dir."""
    return sorted(path.name for path in Path(directory).glob("*/*"))


def spill(arena, data, **kwargs):
    """A block that is in a file for certain: of an arena that is full."""
    filler = arena.put(bytes(arena.stats()["capacity_bytes"] - 65536), on_full="spill", tag="filler")
    handle = arena.put(data, on_full="spill", timeout_s=0, **kwargs)
    arena.free(filler)
    return handle


# -------------------------------------------------------------------------------------------------- what helpers do


def spiller(address, nbytes):
    """A spilled block that is sealed, and one that never will be."""
    with Arena.attach(address) as arena:
        print(arena.put(b"s" * int(nbytes), tag="run/s", on_full="spill", timeout_s=0), flush=True)
        with arena.reserve(int(nbytes), on_full="spill", timeout_s=0):
            wait_for()


def reader(address, handle):
    with Arena.attach(address) as arena, arena.get(Handle.parse(handle), verify=True) as view:
        print(len(view), flush=True)
        wait_for()


def flood(address, seed, count, nbytes):
    """Offers more than there is room for; every block says what it contains."""
    with Arena.attach(address) as arena:
        for i in range(int(count)):
            data = bytes([int(seed) * 16 + i % 16]) * (int(nbytes) + i)
            print(arena.put(data, tag=f"run/f{seed}", on_full="spill", timeout_s=0.01), flush=True)
        wait_for()


# ------------------------------------------------------------------------------------------------------ one process


def test_only_what_does_not_fit_is_spilled_and_only_on_request(spilling, tmp_path):
    first = spilling.put(bytes(600_000), on_full="spill")
    assert (spilling.stats()["spilled"], files(tmp_path)) == (0, [])
    for on_full in ("block", "raise"):
        with pytest.raises(ArenaFull, match=r'\(on_full="spill" would put this one there\)'):
            spilling.put(bytes(600_000), on_full=on_full, timeout_s=0.01)
    second = spilling.put(bytes(600_000), on_full="spill", timeout_s=0.01)
    stats = spilling.stats()
    assert (stats["blocks"], stats["spilled"], files(tmp_path)) == (2, 1, [f"{second.slot}-{second.generation}"])
    assert stats["used_bytes"] == 10 * 65536  # the spilled one takes nothing from the arena
    path = next(tmp_path.glob("*/*"))
    assert stats["spilled_bytes"] == path.stat().st_size >= 600_000
    assert [stat.S_IMODE(at.stat().st_mode) for at in (path, path.parent)] == [0o600, 0o700]
    assert [row["flags"] for row in spilling.ls()] == [(), ("spilled",)]
    assert spilling.free([first, second]) == 2
    assert files(tmp_path) == []
    assert spilling.fsck() == []


def test_without_a_spill_dir_nothing_spills(arena):
    with pytest.raises(ValueError, match="no spill_dir"):
        arena.put(b"x", on_full="spill")
    assert arena.stats()["blocks"] == 0


def test_a_spilled_block_is_read_as_any_other(spilling):
    data = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    with spilling.reserve(2 * MIB, on_full="spill") as block:  # larger than the arena: at once
        block.buffer[:300_000] = data
        block.buffer[300_000:] = bytes(2 * MIB - 300_000)
        handle = block.seal(columns=[("data", 0, 1000, 300), ("zero", 300_000, 1, 2 * MIB - 300_000)])
    with spilling.get(handle, verify=True) as view:
        assert np.array_equal(np.frombuffer(view, np.uint8)[:300_000], data)
        with pytest.raises(ValueError, match="read-only"):
            np.frombuffer(view, np.uint8)[0] = 1
    with spilling.get(handle, field="data", rows=(7, 9), verify=True) as view:
        assert bytes(view) == data[7000:9000].tobytes()
    assert [column.name for column in spilling.columns(handle)] == ["data", "zero"]
    stats = spilling.stats(by="field")
    assert sum(row["bytes"] for row in stats["by"].values()) == stats["used_bytes"] == 0
    spilling.free(handle)
    with pytest.raises(StaleHandle):
        spilling.get(handle)


@pytest.mark.parametrize("nbytes", [0, 1, 70_000])
@pytest.mark.parametrize("checksum", [True, False])
def test_sizes_and_checksums(spilling, tmp_path, nbytes, checksum):
    handle = spill(spilling, b"x" * nbytes, checksum=checksum)
    assert len(files(tmp_path)) == (nbytes > 0)  # an empty block takes nothing, there is always room for it
    with spilling.get(handle, verify=checksum) as view:
        assert bytes(view) == b"x" * nbytes
    spilling.free(handle)
    assert files(tmp_path) == []


def test_views_outlive_free_and_close(spilling, tmp_path):
    handle = spill(spilling, b"x" * 200_000)
    other = Arena.attach(spilling.address)
    view = other.get(handle)
    array = np.frombuffer(view, np.uint8)
    with pytest.raises(ViewsAlive):
        view.release()
    spilling.free(handle)
    other.close()
    assert files(tmp_path) == [f"{handle.slot}-{handle.generation}"]  # until the last view
    assert array.sum() == 200_000 * ord("x")
    del array, view
    assert (files(tmp_path), spilling.stats()["blocks"]) == ([], 0)


def test_leaving_unsealed_and_writable_arrays(spilling, tmp_path):
    with spilling.reserve(2 * MIB, on_full="spill") as block:
        with pytest.raises(NotSealed):
            spilling.get(Handle.parse(spilling.ls()[0]["handle"]))
        assert len(files(tmp_path)) == 1
    assert files(tmp_path) == []
    block = spilling.reserve(2 * MIB, on_full="spill")
    array = np.frombuffer(block.buffer, np.uint8)
    spilling.free(block.seal())
    array[-1] = 7  # the mapping and the file stay as long as somebody could write
    assert len(files(tmp_path)) == 1
    del array
    assert files(tmp_path) == []


def test_ship_done_and_discard(spilling, tmp_path):
    shipped, dropped = spill(spilling, b"a" * 100_000), spill(spilling, b"b" * 100_000, tag="run/gone")
    spilling.ship(shipped, readers=2, step=3)
    spilling.done(shipped, reader=0)
    spilling.discard("run/gone")
    assert files(tmp_path) == [f"{shipped.slot}-{shipped.generation}"]
    spilling.done(shipped, reader=1)
    block = spilling.reserve(2 * MIB, tag="run/late", on_full="spill")
    spilling.discard("run/late")
    with pytest.raises(AlreadyFreed, match="discarded"):
        block.seal()
    assert (files(tmp_path), spilling.stats()["blocks"]) == ([], 0)
    with pytest.raises(StaleHandle):
        spilling.get(dropped)


def test_a_full_disk_is_an_error_in_numbers(spilling, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(
            ArenaFull, match=rf"spill directory .*{tmp_path.name}.* has .* free of .*, 0 B in 0"
        ) as full:
            spilling.put(bytes(3 * MIB), on_full="spill")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.value.errno == errno.ENOSPC
    assert (files(tmp_path), spilling.stats()["blocks"]) == ([], 0)


def test_a_full_disk_counts_the_wait_for_memory(spilling, tmp_path):
    filler = spilling.put(bytes(600_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
    try:
        with pytest.raises(ArenaFull, match=r"after 0\.[2-9] s"):
            spilling.put(bytes(600_000), on_full="spill", timeout_s=0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (files(tmp_path), spilling.free(filler)) == ([], 1)


def test_a_small_file_system(tmp_path):
    """ENOSPC of the disk itself, in a mount namespace of its own: no SIGBUS, nothing left."""
    code = (
        "import sys; from shmrl import Arena; from shmrl.errors import ArenaFull\n"
        "with Arena.create('1MiB', spill_dir=sys.argv[1]) as arena:\n"
        "    kept = [arena.put(bytes(2 << 20), on_full='spill') for _ in range(3)]\n"
        "    try: arena.put(bytes(4 << 20), on_full='spill')\n"
        "    except ArenaFull as error: print(error)\n"
        "    print(sum(bytes(arena.get(h)) == bytes(2 << 20) for h in kept), arena.free(kept)); arena.unlink()\n"
    )
    mount = f'mount -t tmpfs -o size=8m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(["unshare", "-m", "-r", "sh", "-c", mount, code], capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("no mount namespaces for this user")
    assert done.returncode == 0, done.stderr
    full, kept = done.stdout.splitlines()
    assert " free of 8.0 MiB" in full
    assert "in 3 spilled blocks" in full
    assert kept == "3 3"


def test_a_file_that_was_removed_or_cut_is_named(spilling, tmp_path):
    handles = [spill(spilling, b"x" * 100_000) for _ in range(2)]
    first, second = sorted(tmp_path.glob("*/*"))
    first.unlink()
    os.truncate(second, 4096)
    for handle in handles:
        with pytest.raises(ArenaCorrupt, match="was removed or cut, or the arena unlinked"):
            spilling.get(handle)
    assert spilling.free(handles) == 2


@pytest.mark.parametrize("replace", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_a_file_that_was_replaced_is_named_and_not_waited_for(spilling, tmp_path, replace):
    handle = spill(spilling, b"x" * 100_000)
    (path,) = tmp_path.glob("*/*")
    path.rename(tmp_path / "kept")
    replace(path)
    with pytest.raises(ArenaCorrupt, match="was replaced by a link, a pipe or something else"):
        spilling.get(handle)
    assert [fault.endswith("is gone, cut or replaced") for fault in spilling.fsck()] == [True]
    path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "kept").rename(path)
    with spilling.get(handle, verify=True) as view:
        assert len(view) == 100_000
    spilling.free(handle)


def test_fsck_names_the_block_whose_file_is_gone(spilling, tmp_path):
    whole, lost = spill(spilling, b"w" * 5000), spill(spilling, b"l" * 5000)
    assert spilling.fsck() == []
    path = next(tmp_path.glob(f"*/{lost.slot}-{lost.generation}"))
    os.truncate(path, 4999)
    block = f"block {lost.slot} generation {lost.generation}"
    fault = f"{block}: its file of 5000 bytes in {path.parent} is gone, cut or replaced"
    assert spilling.fsck() == [fault]
    assert [row["faults"] for row in commands.fsck(spilling.address)] == [[fault]]
    spilling.free([whole, lost])
    assert spilling.fsck() == []


def test_events_and_inspectors_show_it(spilling):
    handle = spill(spilling, b"x" * 1000, tag="run/told")
    with look(spilling.address) as seen:
        told = [one["event"] for one in seen.events() if one["slot"] == handle.slot]
        counts, _ = seen.counts()
    assert [name for name in told if name != "full"][-2:] == ["spill", "seal"]
    assert (counts["spilled"], counts["spilled_bytes"]) == (1, spilling.stats()["spilled_bytes"])
    spilling.free(handle)


# ------------------------------------------------------------------------------------------------ several processes


def test_a_dead_writers_files_go_with_its_blocks(spilling, tmp_path, helper):
    other = helper(spiller, spilling.address, 2 * MIB)
    handle = Handle.parse(other.line())
    wait_until(lambda: len(files(tmp_path)) == 2)
    other.kill()
    assert spilling.sweep() == 1
    assert files(tmp_path) == [f"{handle.slot}-{handle.generation}"]
    spilling.adopt(handle)
    with spilling.get(handle, verify=True) as view:
        assert bytes(view) == b"s" * (2 * MIB)
    spilling.free(handle)
    assert files(tmp_path) == []


def test_a_dead_reader_holds_no_file(spilling, tmp_path, helper):
    handle = spill(spilling, b"x" * 100_000)
    other = helper(reader, spilling.address, handle)
    assert other.line() == "100000"
    spilling.free(handle)
    assert len(files(tmp_path)) == 1
    other.kill()
    assert spilling.sweep() == 1
    assert files(tmp_path) == []


def test_four_times_what_fits_comes_back_byte_for_byte(tmp_path, helper):
    with Arena.create("4MiB", spill_dir=str(tmp_path)) as arena:
        writers = [helper(flood, arena.address, seed, 32, 256 * 1024) for seed in range(2)]
        handles = [[Handle.parse(one.line()) for _ in range(32)] for one in writers]
        stats = arena.stats(exact=True)
        assert (stats["blocks"], stats["peak_bytes"] <= 4 * MIB) == (64, True)
        assert stats["spilled"] == len(files(tmp_path)) >= 48
        for seed, mine in enumerate(handles):
            for i, handle in enumerate(mine):
                with arena.get(handle, verify=True) as view:
                    assert bytes(view) == bytes([seed * 16 + i % 16]) * (256 * 1024 + i)
        for one in writers:
            one.say()
            assert one.wait() == 0
        assert arena.stats()["orphaned"] == 64
        arena.adopt(handles[0] + handles[1])
        assert arena.free(handles[0] + handles[1]) == 64
        assert (files(tmp_path), arena.fsck()) == ([], [])
        arena.unlink()


def test_a_wait_ends_in_memory_if_room_comes_in_time(spilling):
    handle = spilling.put(bytes(600_000))
    threading.Timer(0.2, spilling.free, [handle]).start()
    late = spilling.put(bytes(600_000), on_full="spill", timeout_s=30)
    assert spilling.stats()["spilled"] == 0
    spilling.free(late)


def test_an_arena_that_spills_beside_its_own_files_is_found_at_its_address(tmp_path):
    with Arena.create("1MiB", backing="file", base=str(tmp_path), spill_dir=str(tmp_path)) as arena:
        handle = arena.put(bytes(2 * MIB), on_full="spill", tag="run/s")
        assert os.path.isdir(arena.address.removeprefix("file:"))
        assert [row["address"] for row in commands.stats(arena.address)] == [arena.address]
        assert [one["event"] for one in commands.tail(arena.address)] == ["full", "spill", "seal"]
        assert commands.holders(str(handle), arena.address)["tag"] == "run/s"
        assert [row["address"] for row in commands.ls(str(tmp_path))] == [arena.address]
        arena.free(handle)
        arena.unlink()
    assert list(tmp_path.iterdir()) == []


def test_names_go_with_the_directory(tmp_path):
    with Arena.create("1MiB", spill_dir=str(tmp_path)) as arena:
        handle = arena.put(bytes(2 * MIB), on_full="spill")
        with arena.get(handle) as view:
            unlink(arena.address)
            assert list(tmp_path.iterdir()) == []
            assert bytes(view) == bytes(2 * MIB)
        arena.free(handle)


def create_another():
    with Arena.create("1MiB") as arena:
        arena.unlink()


@pytest.mark.parametrize("collect", [gc, create_another])
def test_a_dead_arenas_directory_is_collected(tmp_path, helper, collect):
    arena = Arena.create("1MiB", spill_dir=str(tmp_path))
    other = helper(spiller, arena.address, 2 * MIB)
    other.line()
    wait_until(lambda: len(files(tmp_path)) == 2)
    arena.close()
    gc()
    assert len(files(tmp_path)) == 2  # somebody lives
    other.kill()
    collect()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_whose_arena_is_gone_is_swept_by_the_next_that_spills_there(tmp_path, helper):
    """memfd: the kernel has taken the header that named it."""
    other = helper(memfd_owner, tmp_path)
    other.line()
    alive = next(tmp_path.iterdir())
    with Arena.create("1MiB", spill_dir=str(tmp_path)) as arena:
        assert alive.exists()
        arena.unlink()
    other.kill()
    with Arena.create("1MiB", spill_dir=str(tmp_path)) as arena:
        assert not alive.exists()
        arena.unlink()
    assert list(tmp_path.iterdir()) == []


def memfd_owner(directory):
    with Arena.create("1MiB", backing="memfd", spill_dir=directory) as arena:
        arena.put(bytes(2 * MIB), on_full="spill")
        print("there", flush=True)
        wait_for()


def test_attach_needs_the_directory(spilling, tmp_path):
    directory = next(tmp_path.iterdir())
    directory.rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(ForeignArena, match=directory.name):
            Arena.attach(spilling.address)
    finally:
        (tmp_path / "elsewhere").rename(directory)


def test_a_directory_that_is_being_removed_is_not_attached_to(spilling, tmp_path):
    directory = next(tmp_path.iterdir())
    spilling.close()
    collector = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(collector, fcntl.LOCK_EX)
        with pytest.raises(ForeignArena, match="removed meanwhile"):
            Arena.attach(spilling.address)
    finally:
        os.close(collector)


def test_bad_directories(tmp_path):
    with pytest.raises(ValueError, match="not an existing directory"):
        Arena.create("1MiB", spill_dir=str(tmp_path / "none"))
    deep = tmp_path
    for _ in range(3):
        deep = deep / ("d" * 200)
    deep.mkdir(parents=True)
    with pytest.raises(ValueError, match="more than 511 bytes"):
        Arena.create("1MiB", spill_dir=str(deep))
