"""How processes of an env server end with whoever needs them: by a thread that watches a socket, or by the kernel.

Used in workers, templates and session processes.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

PDEATHSIG, CHILD_SUBREAPER = 1, 36
"""Options of `prctl` (linux/prctl.h)."""
DYING_MS = 500
"""A killed process closes its sockets a moment before it is dead."""


def prctl(option: int, value: int) -> None:
    """prctl(2) of this process. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


_main = os.getpid()


def keep_from_forks(end: socket.socket) -> None:
    """A fork of this process has the end of a closed file instead of this one: what its parent is asked, it would take
    away, and what it answers would be taken for its parent's."""

    def hide() -> None:
        with open(os.devnull, "r+b", buffering=0) as nothing:
            os.dup2(nothing.fileno(), number, inheritable=False)

    number = end.fileno()
    os.register_at_fork(after_in_child=hide)


def exit_as_a_fork() -> None:
    """Where only the process that loaded this may go on: a fork that an environment lets return to us ends."""
    if os.getpid() != _main:
        os._exit(1)


_heirs: list[tuple[int, Callable[[], object]]] = []
_tidying = threading.Lock()


def inherit(tidy: Callable[[], object]) -> None:
    """`tidy` is called at this process's end if the parent is dead by then: one that was killed removes nothing."""
    with suppress(OSError):  # it is gone already; no pidfd here
        _heirs.append((os.pidfd_open(os.getppid()), tidy))


def tidy_after_the_dead() -> None:
    """What is inherited of a parent that died, done when this returns. Of several children each may come first; of
    this one's main thread and the thread that ends it, the second waits for the first."""
    with _tidying:
        while _heirs:
            parent, tidy = _heirs.pop()
            gone = select.poll()
            gone.register(parent, select.POLLIN)
            if gone.poll(DYING_MS):
                with suppress(Exception):
                    tidy()


def die_with(end: socket.socket) -> None:
    """A thread that ends this process and its children when the peer hangs up, even if the main thread is stuck."""
    watch = select.poll()
    watch.register(end.fileno(), select.POLLRDHUP)

    def wait() -> None:
        watch.poll()
        tidy_after_the_dead()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="death", daemon=True).start()
