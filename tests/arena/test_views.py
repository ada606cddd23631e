"""Views: many at once, what keeps one alive, and who else may look at the bytes without a copy."""

import gc
import itertools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from shmrl.arena import Arena
from shmrl.errors import ForeignArena, StaleHandle, ViewsAlive
from shmrl.types import Handle


def blocks(arena):
    return arena.stats()["blocks"]


def address_of(array):
    return array.__array_interface__["data"][0]


# ------------------------------------------------------------------------------------------------------- many at once


def test_many_views_come_in_order(arena):
    handles = [arena.put(bytes([i]) * i) for i in range(50)]
    views = arena.get_many(reversed(handles))
    assert [bytes(view) for view in views] == [bytes([i]) * i for i in reversed(range(50))]
    arena.free(handles)
    assert blocks(arena) == 50
    del views
    assert blocks(arena) == 0


@pytest.mark.parametrize("bad", ["stale", "foreign", "none"])
def test_many_views_or_none(arena, bad):
    handles = [arena.put(b"x") for _ in range(10)]
    lost = arena.put(b"x")
    arena.free(lost)
    wrong, error = {
        "stale": (lost, StaleHandle),
        "foreign": (Handle.pack(node=1, arena=1, slot=0, generation=0, nbytes=1, nonce=bytes(8)), ForeignArena),
        "none": (None, TypeError),
    }[bad]
    with Arena.attach(arena.address) as reader:
        with pytest.raises(error):
            reader.get_many([*handles, wrong, handles[0]])
        assert [row["held_by"] for row in arena.ls()] == [()] * 10
    assert arena.free(handles) == 10
    assert blocks(arena) == 0


# ------------------------------------------------------------------------------------- who may look, and as what

WAYS = {
    "frombuffer": lambda view: np.frombuffer(view, np.uint8),
    "asarray": np.asarray,
    "array_interface": lambda view: np.asarray(SimpleNamespace(__array_interface__=view.__array_interface__)),
    "dlpack": np.from_dlpack,
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@EVERY_WAY
@pytest.mark.parametrize("nbytes", [0, 1, 100_000])
def test_arrays_share_the_mapping_read_only_and_count(arena, way, nbytes):
    data = np.arange(nbytes, dtype=np.uint8)
    view = arena.get(arena.put(data))
    array = way(view)
    assert (array.dtype, array.shape, array.flags.writeable) == (np.uint8, (nbytes,), False)
    assert nbytes == 0 or address_of(array) == address_of(np.frombuffer(view, np.uint8))
    assert (array == data).all()
    with pytest.raises(ViewsAlive, match="1 buffers"):
        view.release()
    arena.free(view.handle)
    piece = array[3:5]
    del array
    with pytest.raises(ViewsAlive):
        view.release()
    assert piece.tolist() == data[3:5].tolist()
    del piece
    view.release()
    assert blocks(arena) == 0
    with pytest.raises(BufferError, match="released"):
        way(view)


def test_a_field_is_what_its_view_exports(arena):
    with arena.reserve(240) as block:
        block.buffer[:] = bytes(range(240))
        handle = block.seal(columns=[("rows", 40, 20, 10)])
    with arena.get(handle, field="rows", rows=(2, 5)) as view:
        for way in WAYS.values():
            assert way(view).reshape(view.rows, -1).tolist() == np.arange(80, 140).reshape(3, 20).tolist()


def test_a_capsule_says_what_it_is(arena):
    view = arena.get(arena.put(b"abc"))
    assert view.__dlpack_device__() == (1, 0)
    for asked in ({}, {"max_version": (0, 8)}, {"copy": False}, {"dl_device": (1, 0), "copy": None}):
        with pytest.raises(BufferError, match=r"DLPack can say from 1\.0 on"):
            view.__dlpack__(**asked)
    with pytest.raises(BufferError, match=r"dl_device=\(2, 0\)"):
        view.__dlpack__(max_version=(1, 0), dl_device=(2, 0))
    with pytest.raises(ValueError, match="stream=1"):
        view.__dlpack__(max_version=(1, 0), stream=1)
    with pytest.raises(BufferError, match="names no dl_device"):
        view.__dlpack__(max_version=(1, 0), copy=False)
    view.release()  # none of those kept anything
    with pytest.raises(BufferError, match="released"):
        view.__dlpack__(max_version=(1, 0))


def test_copies_are_writable_and_hold_nothing(arena):
    view = arena.get(arena.put(b"abc"))
    array = np.from_dlpack(view, copy=True)
    array[0] = 7
    assert bytes(view) == b"abc"
    for asked in ({"copy": True}, {"max_version": (1, 0)}, {"max_version": (1, 1), "copy": True}):
        view.__dlpack__(**asked)
    view.release()
    assert array.tolist() == [7, 98, 99]


def test_a_capsule_nobody_took_lets_go(arena):
    view = arena.get(arena.put(b"abc"))
    capsule = view.__dlpack__(max_version=(1, 3), dl_device=(1, 0), copy=False)
    with pytest.raises(ViewsAlive):
        view.release()
    del capsule
    view.release()


# ------------------------------------------------------------------------------------------------- who outlives whom


@EVERY_WAY
def test_things_go_in_any_order(arena, way):
    """The bytes are there until the array is gone, and then nothing of the reader is left."""
    for order in itertools.permutations(("handle", "view", "arena", "array")):
        handle = arena.put(b"x" * 5000)
        there = {"handle": handle, "arena": Arena.attach(arena.address)}
        there["view"] = there["arena"].get(handle)
        there["array"] = way(there["view"])
        for name in order:
            if name == "arena":
                there["arena"].close()
            del there[name]
            if "array" in there:
                assert there["array"].sum() == 5000 * ord("x")
        assert arena.ls()[0]["held_by"] == (), order
        arena.free(handle)
        assert blocks(arena) == 0


def test_a_view_in_a_cycle_with_its_arena_is_collected(arena):
    handle = arena.put(b"x")
    reader = Arena.attach(arena.address)
    reader.kept = reader.get(handle)
    reader.close()
    del reader
    gc.collect()
    assert arena.ls()[0]["held_by"] == ()
    arena.free(handle)


@EVERY_WAY
def test_arrays_die_in_other_threads(arena, way):
    handles = [arena.put(bytes([i]) * 1000) for i in range(64)]
    arrays = [[way(arena.get(handle)) for handle in handles] for _ in range(8)]

    def drop(mine):
        while mine:
            assert mine[-1].sum() == 1000 * (len(mine) - 1)
            mine.pop()

    threads = [threading.Thread(target=drop, args=(mine,)) for mine in arrays]
    for thread in threads:
        thread.start()
    arena.free(handles)
    for thread in threads:
        thread.join()
    assert blocks(arena) == 0


@EVERY_WAY
def test_a_forked_child_that_drops_its_arrays_takes_nothing_from_the_parent(arena, way):
    handle = arena.put(b"x" * 1000)
    array = way(arena.get(handle))
    arena.free(handle)
    child = os.fork()
    if child == 0:
        try:
            assert array.sum() == 1000 * ord("x")
            del array
            gc.collect()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert blocks(arena) == 1
    assert array.sum() == 1000 * ord("x")
    del array
    assert blocks(arena) == 0


ALIVE_AT_EXIT = """
import sys, threading
import numpy as np
from shmrl.arena import Arena
arena = Arena.attach(sys.argv[1])
handle = arena.put(b"x" * 100_000)
view = arena.get(handle)
kept = [np.frombuffer(view, np.uint8), np.from_dlpack(view), np.asarray(view), memoryview(view)]
capsule = view.__dlpack__(max_version=(1, 0), dl_device=(1, 0), copy=None)
local = threading.local()
local.view = arena.get(handle)
np.kept = np.from_dlpack(arena.get(handle))
threading.Thread(target=lambda kept, wait: wait(), args=(kept, threading.Event().wait), daemon=True).start()
if sys.argv[2] == "closed":
    arena.close()
if sys.argv[2] == "raising":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "code"), [("closed", 0), ("open", 0), ("raising", 3)])
def test_an_interpreter_ends_quietly_with_live_views(arena, how, code):
    done = subprocess.run(
        [sys.executable, "-c", ALIVE_AT_EXIT, arena.address, how], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    arena.sweep()
    (row,) = arena.ls()
    assert (row["flags"], row["held_by"]) == (("orphan",), ())
    handle = Handle.parse(row["handle"])
    arena.adopt(handle)
    arena.free(handle)
    assert blocks(arena) == 0
