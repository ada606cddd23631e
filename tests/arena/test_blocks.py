"""One process: what each verb does to a block, and which error says what."""

import gc
import os
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shmrl.arena import Arena, Handle
from shmrl.errors import (
    AlreadyFreed,
    ArenaClosed,
    ArenaCorrupt,
    ArenaFull,
    ForeignArena,
    NotOwner,
    NotSealed,
    StaleHandle,
    ViewsAlive,
)


def blocks(arena):
    return arena.stats()["blocks"]


def test_put_get_free(arena):
    handle = arena.put(b"hello", tag="run/src/g/e")
    assert handle.nbytes == 5
    with arena.get(handle, verify=True) as view:
        assert bytes(view) == b"hello"
    assert arena.free(handle) == 1
    with pytest.raises(StaleHandle):
        arena.get(handle)
    stats = arena.stats()
    assert (stats["blocks"], stats["used_bytes"], stats["created"], stats["freed"]) == (0, 0, 1, 1)


def test_free_frees_all_it_can_then_raises(arena):
    first, second, third = (arena.put(b"x") for _ in range(3))
    arena.free(second)
    with pytest.raises(AlreadyFreed, match="2 others were freed now"):
        arena.free([first, second, third])
    assert blocks(arena) == 0


def test_only_the_owner_frees_and_ships(arena):
    handle = arena.put(b"x")
    with Arena.attach(arena.address) as other:
        mine = rf"is owned by another attachment of this process, .* \({os.getpid()}\); adopt it first"
        with pytest.raises(NotOwner, match=mine):
            other.free(handle)
        with pytest.raises(NotOwner):
            other.ship(handle, readers=1)
        other.adopt(handle)
        with pytest.raises(NotOwner):
            arena.free(handle)
        assert other.free(handle) == 1
    with pytest.raises(StaleHandle):
        arena.adopt(handle)


def test_reserve_fill_seal(arena):
    with arena.reserve(4) as block:
        block.buffer[:] = b"abcd"
        with pytest.raises(NotSealed):
            arena.get(Handle.parse(arena.ls()[0]["handle"]))
        handle = block.seal()
        with pytest.raises(BufferError, match="sealed or freed"):
            block.buffer  # noqa: B018
        with pytest.raises(ValueError, match="already"):
            block.seal()
    with arena.get(handle) as view:
        assert bytes(view) == b"abcd"
    arena.free(handle)


def test_leaving_without_seal_frees(arena):
    with arena.reserve(100_000):
        assert blocks(arena) == 1
    assert blocks(arena) == 0
    with pytest.raises(RuntimeError, match="mine"), arena.reserve(100_000):
        raise RuntimeError("mine")
    assert blocks(arena) == 0


def test_an_unsealed_block_with_a_live_array_keeps_its_bytes(arena):
    block = arena.reserve(100_000)
    array = np.frombuffer(block.buffer, np.uint8)
    block.free()
    assert blocks(arena) == 1
    array[:] = 1  # would be another block's bytes otherwise
    del array
    assert blocks(arena) == 0


def test_a_sealed_block_with_a_writable_array_keeps_its_bytes(arena):
    block = arena.reserve(1000)
    array = np.frombuffer(block.buffer, np.uint8)
    handle = block.seal()
    arena.free(handle)
    assert blocks(arena) == 1
    del array
    assert blocks(arena) == 0


def test_a_discarded_block_with_a_writable_array_keeps_its_bytes(arena):
    block = arena.reserve(262_144, tag="run/x/g")
    array = np.frombuffer(block.buffer, np.uint8)
    arena.discard("run/x")
    with pytest.raises(AlreadyFreed, match="before it was sealed"):
        block.seal()
    other = arena.put(bytes(262_144), tag="run/y")
    array[:] = 1
    with arena.get(other, verify=True) as view:
        assert not any(memoryview(view)[:100])
    arena.free(other)
    assert blocks(arena) == 1
    del array
    assert (blocks(arena), arena.fsck()) == (0, [])


def test_dropping_a_reserved_block_warns_and_frees(arena):
    block = arena.reserve(10, tag="run/lost")
    with pytest.warns(ResourceWarning, match="'run/lost', was dropped unsealed"):
        del block
    assert blocks(arena) == 0


def test_a_view_outlives_free(arena):
    handle = arena.put(b"x" * 1000)
    view = arena.get(handle)
    arena.free(handle)
    with pytest.raises(StaleHandle):
        arena.get(handle)
    assert blocks(arena) == 1
    assert bytes(view) == b"x" * 1000
    view.release()
    view.release()
    assert blocks(arena) == 0
    with pytest.raises(BufferError, match="released"):
        memoryview(view)


def test_release_with_live_arrays_is_refused_and_the_data_stays(arena):
    handle = arena.put(np.arange(1000, dtype=np.int32))
    with arena.get(handle) as view:
        array = np.frombuffer(view, np.int32)
        with pytest.raises(ViewsAlive, match="1 buffers"):
            view.release()
        with pytest.raises(BufferError):
            view.release()
    arena.free(handle)
    assert array[999] == 999  # leaving `with` deferred
    assert blocks(arena) == 1
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    row = array[5:10].copy()
    del array, view
    gc.collect()
    assert blocks(arena) == 0  # a copied row pins nothing
    assert row.tolist() == [5, 6, 7, 8, 9]


def test_a_view_is_not_pickled(arena):
    handle = arena.put(b"x" * 100_000)
    with arena.get(handle) as view, pytest.raises(TypeError, match="send its handle"):
        pickle.dumps(view)
    assert len(pickle.dumps(handle)) < 200
    arena.free(handle)


def test_a_reused_slot_does_not_answer_to_the_old_handle(arena):
    old = arena.put(b"A" * 5000)
    arena.free(old)
    new = arena.put(b"B" * 5000)
    assert (new.slot, new.generation) == (old.slot, old.generation + 1)
    with pytest.raises(StaleHandle):
        arena.get(old)
    with pytest.raises(AlreadyFreed):
        arena.free(old)
    with arena.get(new) as view:
        assert bytes(view) == b"B" * 5000
    arena.free(new)


def test_a_forged_handle_is_refused(arena):
    real = arena.put(b"x")
    fields = {"node": real.node, "arena": real.arena, "slot": real.slot, "generation": real.generation, "nbytes": 1}
    for change in ({"nonce": b"\1" * 8}, {"slot": 7}, {"slot": 2**32 - 1}, {"generation": 9}):
        with pytest.raises(StaleHandle):
            arena.get(Handle.pack(**{"nonce": real.nonce, **fields, **change}))
    for change in ({"node": 1}, {"arena": 1}):
        with pytest.raises(ForeignArena):
            arena.get(Handle.pack(**{"nonce": real.nonce, **fields, **change}))
    with pytest.raises(TypeError, match="Handle"):
        arena.get("h00")
    arena.free(real)


def test_zero_bytes(arena):
    handle = arena.put(b"")
    with arena.get(handle, verify=True) as view:
        assert (len(view), bytes(view)) == (0, b"")
    assert arena.stats()["used_bytes"] == 0
    arena.free(handle)


def test_bad_arguments(arena):
    with pytest.raises(ValueError, match="113 bytes"):
        arena.put(b"x", tag="t" * 113)
    with pytest.raises(ValueError, match="nbytes=-1"):
        arena.reserve(-1)
    with pytest.raises(ValueError, match="on_full='maybe'"):
        arena.put(b"x", on_full="maybe")
    with pytest.raises(ValueError, match="not C-contiguous"):
        arena.put(np.zeros((4, 4))[:, 1])
    with pytest.raises(ArenaFull, match=r"no room for 64\.0 MiB"):
        arena.reserve(64 << 20, on_full="raise")
    with pytest.raises(ValueError, match="empty prefix"):
        arena.discard("/")
    with pytest.raises(ValueError, match="timeout_s=nan"):
        arena.put(b"x", timeout_s=float("nan"))
    assert blocks(arena) == 0
    handle = arena.put(b"x")
    for step in (-1, 1 << 63):
        with pytest.raises(ValueError, match=f"step={step}: 0 to"):
            arena.ship(handle, readers=1, step=step)
    with pytest.raises(ValueError, match="readers=257"):
        arena.ship(handle, readers=257)
    with pytest.raises(TypeError, match="float"):
        arena.ship(handle, readers=1.5)
    arena.ship(handle, readers=1, step=0)
    with pytest.raises(TypeError, match="float"):
        arena.done(handle, reader=0.5)
    with pytest.raises(ValueError, match="reader=256"):
        arena.done(handle, reader=256)
    arena.done(handle, reader=255)
    assert blocks(arena) == 0


def test_ship_and_done(arena):
    handle = arena.put(b"x")
    with pytest.raises(ValueError, match="never shipped"):
        arena.done(handle)
    arena.ship([handle], readers=2, step=3)
    arena.done(handle, reader=0)
    arena.done(handle, reader=0)
    assert arena.stats(by="step")["by"]["3"]["blocks"] == 1
    arena.done(handle, reader=1)
    arena.done(handle, reader=1)
    assert blocks(arena) == 0


def test_shipping_again_forgets_who_was_done(arena):
    handle = arena.put(b"x")
    arena.ship(handle, readers=2, step=1)
    arena.done(handle, reader=0)
    arena.ship(handle, readers=2, step=1)
    arena.done(handle, reader=1)
    assert blocks(arena) == 1
    arena.done(handle, reader=0)
    assert blocks(arena) == 0


def test_the_ledger_as_last_reader(arena):
    """Two ranks, one of which restarts; the block lives until the ledger says that the step is durable."""
    handle = arena.put(b"x")
    arena.ship(handle, readers=3, step=9)
    for rank in (0, 0, 1):  # rank 0 ran twice
        arena.done(handle, reader=rank)
    with arena.get(handle) as view:
        assert bytes(view) == b"x"
    arena.done(handle, reader=2)
    assert blocks(arena) == 0


def test_whoever_comes_too_late_is_told_who_ended_the_block_and_how(arena, helper):
    kept, dropped, shipped = (arena.put(b"x", tag=f"run/{name}") for name in ("kept", "drop", "ship"))
    block = arena.reserve(10, tag="run/drop/later")
    other = helper(discarder, arena.address, "run/drop")
    assert other.line() == "2"
    here, there = (rf"by .* \({pid}\), \d+\.\d s ago" for pid in (os.getpid(), other.process.pid))
    with pytest.raises(AlreadyFreed, match=rf"was discarded {there}; 1 others were freed now"):
        arena.free([dropped, kept])
    with pytest.raises(AlreadyFreed, match=rf"block 'run/drop/later' was discarded {there}, before it was sealed"):
        block.seal()
    for verb in (arena.get, arena.adopt, lambda handle: arena.ship(handle, readers=1)):
        with pytest.raises(StaleHandle, match=rf"was discarded {there}"):
            verb(dropped)
        with pytest.raises(StaleHandle, match=rf"was freed {here}"):
            verb(kept)
    arena.ship(shipped, readers=1)
    arena.done(shipped)
    with pytest.raises(AlreadyFreed, match=rf"was freed {here}"):
        arena.free(shipped)
    for _ in range(1500):
        arena.free(arena.put(b""))
    with pytest.raises(AlreadyFreed, match="was freed already; 0 others"):  # no event says so any more
        arena.free(dropped)
    with pytest.raises(StaleHandle, match="was freed, or its slot belongs to another generation"):
        arena.get(dropped)


def discarder(address, tag):
    with Arena.attach(address) as own:
        print(own.discard(tag), flush=True)
        sys.stdin.readline()


def test_discard_is_by_path_component(arena):
    handles = [arena.put(b"x", tag=tag) for tag in ("r/e/g1", "r/e/g1/x", "r/e/g10")]
    block = arena.reserve(10, tag="r/e/g1/y")
    assert arena.discard("r/e/g1") == 3
    with pytest.raises(AlreadyFreed, match="discarded"):
        block.seal()
    assert [row["tag"] for row in arena.ls()] == ["r/e/g10"]
    arena.free(handles[2])
    assert blocks(arena) == 0


def test_statistics_add_up(arena):
    sizes = {f"src{i}": 1000 * (i + 1) ** 3 for i in range(10)}
    handles = [arena.put(bytes(n), tag=f"run/{source}/g/e") for source, n in sizes.items()]
    for by in ("source", "step", "holder", "field"):
        stats = arena.stats(by=by, exact=True)
        assert sum(row["bytes"] for row in stats["by"].values()) == stats["used_bytes"]
    assert set(arena.stats(by="source")["by"]) == set(sizes)
    assert arena.stats(by="source")["by"]["src9"]["bytes"] == 16 * 65536  # 1,000,000 bytes and a tail of 80
    arena.free(handles)
    stats = arena.stats()
    assert (stats["created"], stats["freed"], stats["used_bytes"]) == (10, 10, 0)
    assert stats["peak_bytes"] > 3_000_000


def test_holders(arena):
    handle = arena.put(b"x", tag="run/a")
    with Arena.attach(arena.address) as other, other.get(handle):
        row = arena.holders(handle)
    assert (row["tag"], row["state"], len(row["held_by"])) == ("run/a", "ready", 1)
    assert str(os.getpid()) in row["owner"]
    arena.free(handle)
    with pytest.raises(StaleHandle):
        arena.holders(handle)


def test_closed_is_closed(arena):
    other = Arena.attach(arena.address)
    view = other.get(arena.put(b"kept"))
    other.close()
    other.close()
    assert other.closed
    for call in (lambda: other.put(b"x"), other.stats, other.sweep, lambda: other.get(view.handle)):
        with pytest.raises(ArenaClosed):
            call()
    assert bytes(view) == b"kept"
    view.release()
    arena.free(view.handle)
    assert blocks(arena) == 0


def test_dropping_an_attached_arena_warns(arena):
    other = Arena.attach(arena.address)
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del other


def test_close_turns_owned_blocks_into_orphans(arena):
    with Arena.attach(arena.address) as other:
        handle = other.put(b"published")
    assert arena.stats()["orphaned"] == 1
    arena.adopt(handle)
    assert arena.stats()["orphaned"] == 0
    arena.free(handle)


def test_random_sizes_against_a_dict_coalesce_again(arena):
    rng, kept = random.Random(3), {}
    for _ in range(3000):
        if kept and rng.random() < 0.48:
            handle, data = kept.popitem() if rng.random() < 0.5 else (key := next(iter(kept)), kept.pop(key))
            with arena.get(handle) as view:
                assert bytes(view) == data
            arena.free(handle)
            continue
        data = rng.randbytes(rng.choice((0, 1, 255, 256, 257, 1000, 4096, 20_000, 33_000, 65_536, 65_537, 250_000)))
        try:
            kept[arena.put(data, on_full="raise")] = data
        except ArenaFull:
            assert arena.stats()["used_bytes"] > 40 << 20
    assert arena.fsck() == []
    arena.free(list(kept))
    assert arena.fsck() == []
    assert arena.stats()["used_bytes"] == 0
    arena.free(arena.put(bytes((64 << 20) - 65536)))  # everything but the page of its tail: one span


def test_threads_that_write_first_at_the_same_time(arena):
    for _ in range(20):
        with Arena.attach(arena.address) as other, ThreadPoolExecutor(8) as pool:
            barrier = threading.Barrier(8)

            def put(i, other=other, barrier=barrier):
                barrier.wait()
                return other.put(bytes([i]) * 100)

            handles = list(pool.map(put, range(8)))
            assert [bytes(other.get(handle)) for handle in handles] == [bytes([i]) * 100 for i in range(8)]
            other.free(handles)


def test_a_hundred_thousand_blocks_grow_the_table():
    with Arena.create("64MiB") as arena:
        handles = [arena.put(b"") for _ in range(100_000)]
        assert arena.stats()["blocks"] == 100_000
        assert len({handle.slot for handle in handles}) == 100_000
        assert arena.free(handles) == 100_000
        assert arena.fsck() == []
        arena.unlink()


@pytest.mark.long
def test_more_than_four_gib_and_a_million_blocks():
    with Arena.create("6GiB") as arena:
        with arena.reserve((4 << 30) + 10) as block:
            block.buffer[-1] = 7
            handle = block.seal(columns=[("big", 0, 1 << 20, 4096), ("end", 4 << 30, 10, 1)])
        assert handle.nbytes == (4 << 30) + 10
        with arena.get(handle, field="end", verify=True) as view:
            assert bytes(view) == b"\0" * 9 + b"\7"
        arena.free(handle)
        handles = [arena.put(b"x" * 200, checksum=False) for _ in range(1_000_000)]
        assert arena.stats()["blocks"] == 1_000_000
        assert arena.free(handles) == 1_000_000
        assert arena.fsck() == []
        arena.unlink()


def test_what_is_no_handle_or_no_number_is_said_at_once(arena, tmp_path):
    handle = arena.put(b"x")
    with Arena.create("1MiB", backing="memfd") as other:
        foreign = other.put(b"y")
        for call in (arena.get, arena.holders):
            with pytest.raises(ForeignArena, match="arena"):
                call(foreign)
            with pytest.raises(TypeError, match="expected a Handle, got NoneType"):
                call(None)
        other.free(foreign)
    with pytest.raises(TypeError, match="float"):
        arena.reserve(1.5)
    for call in (lambda: arena.put(b"x", tag=None), lambda: arena.reserve(1, tag=None), lambda: arena.discard(None)):
        with pytest.raises(TypeError, match=r"'tag\w*' has incorrect type \(expected str, got NoneType\)"):
            call()
    with pytest.raises(TypeError, match="float"):
        Arena.attach(arena.address, reader=1.5)
    with pytest.raises(ValueError, match="not an arena address: None"):
        Arena.attach(None)
    with pytest.raises(ValueError, match="capacity=-1"):
        Arena.create(-1)
    for directory in ("", str(tmp_path / ("d" * 300))):
        with pytest.raises(ValueError, match="not an existing directory"):
            Arena.create("1MiB", spill_dir=directory)
    arena.free(handle)
    with pytest.raises(AlreadyFreed, match=r"Handle\(slot=0"):
        arena.free([bytes(handle)])


def test_an_empty_ctl_is_corrupt(tmp_path):
    with Arena.create("1MiB", backing="file", base=str(tmp_path)) as arena:
        ctl = next(tmp_path.glob("*.ctl"))
        nbytes = ctl.stat().st_size
        (tmp_path / "copy.ctl").touch()
        for part in ("live", "data"):
            os.link(ctl.with_suffix(f".{part}"), tmp_path / f"copy.{part}")
        with pytest.raises(ArenaCorrupt, match="empty ctl"):
            Arena.attach(f"file:{tmp_path / 'copy'}")
        assert ctl.stat().st_size == nbytes
        arena.unlink()
