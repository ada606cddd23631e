"""Processes by the hundred on one arena: forks from everywhere, every slot taken, a whole group killed at once."""

import multiprocessing
import os
import signal
import sys
import threading

from shmrl.arena import Arena, Handle
from shmrl.errors import ArenaClosed


def child_of(arena, view, address, depth):
    """In a forked child: the inherited arena is closed, an own one works, a grandchild finds the same."""
    for call in (lambda: arena.get(view.handle), lambda: arena.put(b"x"), arena.sweep, lambda: arena.free(view.handle)):
        try:
            call()
            return 1
        except ArenaClosed:
            continue
    view.release()  # the parent's hold, which must not end here
    arena.close()
    with Arena.attach(address) as own, own.get(view.handle, verify=True) as mine:
        ok = bytes(mine) == b"v" * 100_000
        own.free(own.put(bytes(70_000), tag="run/fork"))
        return int(not ok or (depth and forked(own, mine, address, depth - 1) != 0))


def forked(arena, view, address, depth=1):
    """Exit code of a child that does child_of()."""
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = child_of(arena, view, address, depth)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_storm(address, handle, count):
    """Two threads keep the allocator's lock busy, three and the main one fork; prints the exit codes there were."""
    arena = Arena.attach(address)
    view = arena.get(Handle.parse(handle))
    stop, codes = threading.Event(), []

    def busy():
        while not stop.is_set():
            arena.free(arena.put(bytes(5000), tag="run/busy"))

    def forks():
        codes.extend(forked(arena, view, address) for _ in range(int(count) // 4))

    threads = [threading.Thread(target=work) for work in (busy, busy, forks, forks, forks)]
    for thread in threads:
        thread.start()
    forks()
    for thread in threads[2:]:
        thread.join()
    stop.set()
    for thread in threads[:2]:
        thread.join()
    print(len(codes), *sorted(set(codes)), flush=True)
    sys.stdin.readline()
    view.release()
    arena.close()


def read_one(address, handle):
    """For multiprocessing: what a fresh process reads."""
    with Arena.attach(address) as arena, arena.get(Handle.parse(handle), verify=True) as view:
        return len(bytes(view))


def start_methods(address, handle):
    """Every start method of multiprocessing, from a process that is attached itself."""
    with Arena.attach(address):
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                print(method, *pool.starmap(read_one, [(address, handle)] * 4), flush=True)


def crowd(address, count):
    """As many attached children as asked for, each with a block and a view; prints how many, and waits with them."""
    said = []
    for i in range(int(count)):
        read, write = os.pipe()
        if os.fork() == 0:
            arena = Arena.attach(address)
            _view = arena.get(arena.put(bytes([i]) * 1000, tag="run/crowd"))
            os.write(write, b".")
            signal.pause()
        os.close(write)
        said.append(os.read(read, 1))
        os.close(read)
    print(said.count(b"."), flush=True)
    signal.pause()


def whole_run(backing, count):
    """A creator and `count` others in a process group of their own, in the middle of everything; prints the address."""
    os.setpgid(0, 0)
    arena = Arena.create("64MiB", backing=backing, run_id="doomed")
    handle = arena.put(b"v" * (8 << 20), tag="run/x")
    for i in range(int(count)):
        if os.fork() == 0:
            own = Arena.attach(arena.address)
            _kept = own.get(handle), own.reserve(1 << 20, tag="run/x")
            while True:
                own.free(own.put(bytes(1000 * (i + 1)), tag="run/x"))
    print(arena.address, flush=True)
    signal.pause()
