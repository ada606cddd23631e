"""SIGKILL at every crash point of every operation as Python calls it. Run with an extension built with crash points.

One trial: this process puts its blocks, forks a child that attaches for itself and is killed at the n-th point of one
operation, recovers, and looks: whatever the child was doing, fsck is clean, nobody holds what it held, other blocks
have their bytes, and after a discard nothing is left. n goes up until the child comes to its end.
"""

import ctypes
import os
import signal
import sys

from shmrl.arena import Arena, _arena
from shmrl.errors import StaleHandle

PAYLOADS = {name: name.encode() * n for name, n in (("kept", 100), ("large", 20_000), ("target", 17_000), ("small", 9))}


class Scene:
    """Blocks of the parent, and what the child prepared before it was armed."""

    def __init__(self, arena):
        self.arena = arena
        self.handles = {name: arena.put(data, tag=f"run/{name}") for name, data in PAYLOADS.items()}
        self.shipped = arena.put(b"shipped", tag="run/shipped")
        arena.ship(self.shipped, readers=2, step=1)
        self.extra = None

    @property
    def target(self):
        return self.handles["target"]


def hold(arena, scene):
    scene.extra = arena.get(scene.target)


def own(arena, scene):
    arena.adopt(scene.target)


def own_and_hold(arena, scene):
    own(arena, scene)
    hold(arena, scene)


def reserve(arena, scene):
    scene.extra = arena.reserve(70_000, tag="run/new")


def one_is_done(arena, scene):
    arena.done(scene.shipped, reader=0)


def own_two(arena, scene):
    own(arena, scene)
    arena.put(bytes(100_000), tag="run/new")


def leave_a_dead_process(arena, scene):
    """One that owned, held and was writing."""
    pid = os.fork()
    if pid == 0:
        dead = Arena.attach(scene.arena.address)
        own_two(dead, scene)
        _kept = dead.get(scene.target), dead.get(scene.shipped), dead.reserve(10, tag="run/new")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def reserve_and_seal(arena, scene):
    with arena.reserve(5000, tag="run/new") as block:
        block.buffer[:] = bytes(5000)
        block.seal(columns=[("a", 0, 8, 100)])


def attach(arena, scene):
    Arena.attach(scene.arena.address).close()


# name: (what the child does before, what it is killed in)
OPERATIONS = {
    "put": (None, lambda arena, scene: arena.put(b"n" * 1000, tag="run/new")),
    "put large": (None, lambda arena, scene: arena.put(bytes(300_000), tag="run/new")),
    "reserve and seal": (None, reserve_and_seal),
    "seal": (reserve, lambda arena, scene: scene.extra.seal()),
    "leave unsealed": (reserve, lambda arena, scene: scene.extra.free()),
    "get": (None, lambda arena, scene: arena.get(scene.target, verify=True)),
    "release": (hold, lambda arena, scene: scene.extra.release()),
    "adopt": (None, own),
    "ship": (own, lambda arena, scene: arena.ship(scene.target, readers=3, step=2)),
    "done": (None, one_is_done),
    "last done": (one_is_done, lambda arena, scene: arena.done(scene.shipped, reader=1)),
    "free": (own, lambda arena, scene: arena.free(scene.target)),
    "free while held": (own_and_hold, lambda arena, scene: (arena.free(scene.target), scene.extra.release())),
    "discard": (None, lambda arena, scene: arena.discard("run/large")),
    "sweep": (leave_a_dead_process, lambda arena, scene: arena.sweep()),
    "close": (own_two, lambda arena, scene: arena.close()),
    "attach": (None, attach),
    "stats": (None, lambda arena, scene: (arena.stats(exact=True), arena.fsck())),
}


def child(scene, name, at):
    before, run = OPERATIONS[name]
    arena = Arena.attach(scene.arena.address, reader=1)
    if before is not None:
        before(arena, scene)
    ctypes.CDLL(_arena.__file__).srl_die_at(ctypes.c_uint64(at))
    run(arena, scene)
    os._exit(0)


def killed(scene, name, at):
    """Whether the child died at its point; else it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            child(scene, name, at)
        except BaseException as error:
            print(f"FAULT {name} {at}: {error!r}", flush=True)
        os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if status not in (0, signal.SIGKILL):
        raise SystemExit(f"FAULT {name} at {at}: status {status}")
    return status == signal.SIGKILL


def check(scene, name):
    arena = scene.arena
    arena.sweep()
    assert arena.fsck() == [], arena.fsck()
    rows = arena.ls()
    assert all(row["held_by"] == () and row["state"] == "ready" for row in rows), rows
    stats = arena.stats(exact=True)
    assert stats["created"] == stats["freed"] + stats["blocks"]
    assert stats["used_bytes"] == sum(row["span_bytes"] for row in rows)
    gone = {"free": {"target"}, "free while held": {"target"}, "discard": {"large"}}.get(name, set())
    for which, handle in scene.handles.items():
        try:
            with arena.get(handle, verify=True) as view:
                assert bytes(view) == PAYLOADS[which], f"{which} has other bytes"
        except StaleHandle:
            assert which in gone, f"{which} is lost"
    arena.discard("run")
    stats = arena.stats(exact=True)
    assert (stats["blocks"], stats["used_bytes"]) == (0, 0), stats
    assert stats["created"] == stats["freed"]


def main(stride):
    """Prints "operation kills" for each, and "kills=N"; or what is wrong. Every stride-th point is killed at."""
    total = 0
    with Arena.create("4MiB", run_id="crashes") as arena:
        for name in OPERATIONS:
            kills, at = 0, 1
            while True:
                scene = Scene(arena)
                dead = killed(scene, name, at)
                try:
                    check(scene, name)
                except Exception as error:
                    raise SystemExit(f"FAULT {name} at {at}: {error!r}") from None
                if not dead:
                    break
                kills, at = kills + 1, at + int(stride)
            print(name, kills, flush=True)
            total += kills
        arena.unlink()
    print(f"kills={total}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
