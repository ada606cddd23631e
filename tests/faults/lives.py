"""Where the roles live that `roles` has: in this process (`Local`), or each in one of its own (`Remote`), forked by the
nursery, which can be killed at any moment. A role does one verb at a time, as it is told.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import time
from multiprocessing.connection import Client

from tests.faults.roles import SMALL, Node, Orchestrator, Rank, Worker, tree

ROLES = {"worker": Worker, "orchestrator": Orchestrator, "rank": Rank, "node": Node}


class Local:
    """A role in this process. Killed, it leaves its blocks as a dead process does: what is sealed has no owner."""

    def __init__(self, role, *args):
        self.role = ROLES[role](*args)
        self.twice = self.role.arena.twice

    def __call__(self, verb, *args):
        return getattr(self.role, verb)(*args)

    def kill(self, moment, verb, *args):
        """Dies before or after what a verb does to the arena."""
        if moment:
            self(verb, *args)
        self.role.close()

    def close(self):
        self.role.close()


class Remote:
    """A role in a process of its own, forked by the nursery. A call returns its answer or raises its error."""

    nursery = listener = None  # of the test that runs it

    def __init__(self, role, *args):
        self.twice = []
        self.nursery.say(" ".join(map(str, (self.listener.address, role, *args))))
        self.pipe = self.listener.accept()
        self.pidfd = os.pidfd_open(self.pipe.recv())

    def __call__(self, verb, *args):
        self.pipe.send((verb, args))
        assert self.pipe.poll(60), f"{verb} hangs"
        kind, value, self.twice[:] = self.pipe.recv()
        if kind == "error":
            raise AssertionError(f"{verb} raised {value}")
        return value

    def kill(self, moment, verb, *args):
        """SIGKILL so many seconds after it was told to do something: before, while or after it does it."""
        self.pipe.send((verb, args))
        time.sleep(moment)
        with contextlib.suppress(ProcessLookupError):  # it closed, and left
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self._gone()

    def close(self):
        self("close")
        self._gone()

    def _gone(self):
        """Its end; the kernel has let go of its locks by then."""
        assert select.select([self.pidfd], [], [], 60)[0], "it does not end"
        os.close(self.pidfd)
        self.pipe.close()


def live(path, role, *args):
    """Until told to close: (verb, arguments) -> ("ok", value, freed twice) or ("error", text, freed twice)."""
    for module, name, value in SMALL:
        setattr(module, name, value)
    with Client(path) as pipe:
        one = ROLES[role](args[0], *(int(arg) if arg.isdigit() else arg for arg in args[1:]))
        pipe.send(os.getpid())
        verb = None
        while verb != "close":
            verb, given = pipe.recv()
            try:
                answer = "ok", getattr(one, verb)(*given)
            except Exception as error:
                answer = "error", f"{type(error).__name__}: {error}"
            pipe.send((*answer, one.arena.twice))


def nursery():
    """Forks a role for every line "path role address ...": a fork is fifty times cheaper than an interpreter."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.disable(logging.WARNING)
    tree()
    for line in sys.stdin:
        if os.fork() == 0:
            live(*line.split())
            os._exit(0)
