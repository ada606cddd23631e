"""Processes that do to an arena what they are told over a socket, one verb at a time. Driven by test_machine.py."""

import os
import signal
import sys
from multiprocessing.connection import Client

from shmrl.arena import Arena, Handle


class Player:
    def __init__(self, address):
        self.arena = Arena.attach(address, reader=0)
        self.views = {}
        self.blocks = {}

    def put(self, data, checksum, tag):
        return str(self.arena.put(data, tag=tag, on_full="spill", timeout_s=0, checksum=checksum))

    def reserve(self, key, nbytes, tag):
        self.blocks[key] = self.arena.reserve(nbytes, tag=tag, on_full="spill", timeout_s=0)

    def seal(self, key, data, columns, checksum):
        block = self.blocks.pop(key)
        block.buffer[:] = data
        return str(block.seal(checksum=checksum, columns=columns))

    def abort(self, key):
        self.blocks.pop(key).free()

    def get(self, handle, keep, **how):
        view = self.arena.get(Handle.parse(handle), **how)
        data = bytes(view)
        if keep:
            self.views.setdefault(handle, []).append(view)
        else:
            view.release()
        return data

    def get_many(self, handles):
        return [bytes(view) for view in self.arena.get_many([Handle.parse(h) for h in handles])]

    def release(self, handle):
        self.views[handle].pop().release()

    def adopt(self, handle):
        self.arena.adopt(Handle.parse(handle))

    def ship(self, handle, readers):
        self.arena.ship(Handle.parse(handle), readers=readers, step=1)

    def done(self, handle, reader):
        self.arena.done(Handle.parse(handle), reader=reader)

    def free(self, handle):
        return self.arena.free(Handle.parse(handle))

    def discard(self, prefix):
        return self.arena.discard(prefix)

    def close(self):
        for block in self.blocks.values():
            block.free()
        self.arena.close()
        self.views.clear()


def play(path, address):
    """Until told to close: (verb, arguments, keywords) -> ("ok", value) or ("error", name of its type)."""
    with Client(path) as pipe:
        player = Player(address)
        pipe.send(os.getpid())
        verb = None
        while verb != "close":
            verb, args, kwargs = pipe.recv()
            try:
                answer = "ok", getattr(player, verb)(*args, **kwargs)
            except Exception as error:
                answer = "error", type(error).__name__
            pipe.send(answer)


def nursery():
    """Forks a player for every line "path address": a fork is fifty times cheaper than an interpreter."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            play(*line.split())
            os._exit(0)
