"""Writes nonsense over the control words of a live arena, then does everything to it. Run as a helper process.

Every corruption is a function of (seed, number): `python -m tests.arena.corruptions SEED FIRST COUNT` repeats some of
them. Whatever an operation answers must be a typed error, or right; whoever reads our lines notices a crash or a hang.
"""

import contextlib
import gc
import logging
import mmap
import os
import random
import resource
import sys

from shmrl.arena import Arena, commands, files, inspect, overview, render
from shmrl.errors import ArenaError
from tests.arena import layout

CAPACITY = 2 << 20
ADDRESSES = 2 << 30  # bytes: several times what it takes
SIZES = (0, 100, 5000, 60_000, 70_000, 200_000)
VALUES = (0, 1, 2, 0xFFFF, 0xFFFFFFFF, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)


class Scene:
    """An arena with blocks in every state; its ctl and data as bytes that can be put back."""

    def __init__(self):
        self.arena = Arena.create(CAPACITY, run_id="noise", shares={"s1": 0.25, "columns": "64KiB"})
        self.data = {self.arena.put(bytes([i]) * n, tag=f"run/s{i}/g"): bytes([i]) * n for i, n in enumerate(SIZES)}
        with self.arena.reserve(3000, tag="run/columns") as block:
            block.buffer[:] = b"c" * 3000
            self.columns = block.seal(columns=[("a", 0, 8, 100), ("b", 1000, 4, 500)])
        self.shipped = self.arena.put(b"shipped", tag="run/shipped")
        self.arena.ship(self.shipped, readers=2, step=3)
        self.writing = self.arena.reserve(1000, tag="run/writing")
        self.viewed = self.arena.put(bytes(80_000), tag="run/viewed")
        self.view = self.arena.get(self.viewed)
        self.arena.free(self.viewed)  # RETIRED
        self.arena.free(self.arena.put(bytes(9000)))  # a free cell and a free descriptor
        where = files.parse(self.arena.address)
        self.ctl, self.bytes = (mmap.mmap(where.open(part, write=True), 0) for part in ("ctl", "data"))
        self.good = bytes(self.ctl), bytes(self.bytes)
        self.regions = layout.regions(self.ctl)

    def restore(self):
        self.ctl[:], self.bytes[:] = self.good

    def close(self):
        self.view.release()
        self.writing.free()
        self.arena.discard("run")
        self.arena.close()
        self.arena.unlink()


def corrupt(scene, rng):
    """One word, one byte, or a range, in a part of ctl that is in use."""
    start, stop = rng.choice(scene.regions)
    kind, at = rng.randrange(4), rng.randrange(start, stop)
    if kind == 0:
        scene.ctl[at] = rng.randrange(256)
    elif kind == 1:
        n = min(stop - at, rng.choice((16, 64, 256, 4096)))
        scene.ctl[at : at + n] = rng.randbytes(n) if rng.random() < 0.7 else bytes(n)
    else:
        width = rng.choice((4, 8))
        at = at // width * width
        old = int.from_bytes(scene.ctl[at : at + width], "little")
        near = old + rng.choice((-1, 1)), old ^ 1 << rng.randrange(64)
        value = rng.choice((rng.getrandbits(64), rng.choice(VALUES), *near))
        scene.ctl[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


# ------------------------------------------------------------------------------------------------------- operations


def read(scene, arena, rng):
    handle = rng.choice(list(scene.data))
    with arena.get(handle, verify=True) as view:
        assert bytes(view) == scene.data[handle], f"foreign bytes under {handle!r}"


def look(scene, arena, rng):
    """Without verifying: bytes may be any, a crash may not be."""
    with arena.get(rng.choice(list(scene.data))) as view:
        assert 0 <= sum(bytes(view)[:1]) < 256


def column(scene, arena, rng):
    try:
        view = arena.get(scene.columns, field="b", rows=(3, 9), verify=True)
    except (ValueError, KeyError):  # no such columns, it says
        return
    assert bytes(view) == b"c" * 24


def put(scene, arena, rng):
    data = bytes([7]) * rng.choice(SIZES)
    handle = arena.put(data, tag="run/new", on_full="raise", timeout_s=0)
    with arena.get(handle, verify=True) as view:
        assert bytes(view) == data
    arena.free(handle)


def reserve(scene, arena, rng):
    with arena.reserve(500, tag="run/new", on_full="raise", timeout_s=0) as block:
        block.buffer[:] = b"n" * 500
        block.seal(columns=[("x", 0, 5, 100)])


def own(scene, arena, rng):
    handle = rng.choice(list(scene.data))
    arena.adopt(handle)
    arena.ship(handle, readers=1, step=1)
    arena.done(handle) if rng.random() < 0.5 else arena.free(handle)


def done(scene, arena, rng):
    with contextlib.suppress(ValueError):  # not shipped, it says
        arena.done(scene.shipped, reader=rng.randrange(3))


def count(scene, arena, rng):
    arena.stats(by=rng.choice((None, "source", "step", "holder", "field")), exact=rng.random() < 0.5)
    arena.ls()


def inspect_it(scene, arena, rng):
    address = scene.arena.address
    with inspect.look(address) as seen:
        rng.choice((seen.fsck, seen.events, lambda: list(seen.rows(inspect.Filter(), "size"))))()
    render.stats(commands.stats(address))
    overview.top(commands.top(address))


def collect(scene, arena, rng):
    assert not files.remove_if_dead(files.parse(scene.arena.address))  # two processes have it


OPERATIONS = (
    read, look, column, put, put, reserve, own, done, count, inspect_it, collect,
    lambda scene, arena, rng: arena.fsck(),
    lambda scene, arena, rng: arena.sweep(),
    lambda scene, arena, rng: arena.discard("run/s1"),
    lambda scene, arena, rng: arena.holders(scene.shipped),
)  # fmt: skip


def one(scene, rng):
    """Corrupts before or after the attach, then does everything in some order -> how many answers were errors."""
    errors, attached = 0, None
    early = rng.random() < 0.5
    try:
        if early:
            corrupt(scene, rng)
        attached = Arena.attach(scene.arena.address, reader=1)
        if not early:
            corrupt(scene, rng)
        for operation in rng.sample(OPERATIONS, len(OPERATIONS)):
            try:
                operation(scene, attached, rng)
            except ArenaError:
                errors += 1
    except ArenaError:
        errors += 1
        with contextlib.suppress(ArenaError):
            inspect_it(scene, None, rng)
    finally:
        if attached is not None:
            attached.close()
        scene.restore()
    return errors


def main(seed, first, count):
    """A line per corruption: its number and how many operations answered with an error; then "clean"."""
    logging.disable(logging.CRITICAL)
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # which maps terabytes
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))  # no count is to be believed
    scene = Scene()
    for number in range(int(first), int(first) + int(count)):
        print(number, one(scene, random.Random(f"{seed}/{number}")), flush=True)
    gc.collect()
    for handle, data in scene.data.items():
        with scene.arena.get(handle, verify=True) as view:
            assert bytes(view) == data
    assert scene.arena.fsck() == []
    scene.close()
    print("clean", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
