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

PDEATHSIG, CHILD_SUBREAPER = 1, 36
"""Options of `prctl` (linux/prctl.h)."""


def prctl(option: int, value: int) -> None:
    """prctl(2) of this process. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def die_with(end: socket.socket) -> None:
    """A thread that ends this process and its children when the peer hangs up, even if the main thread is stuck."""
    watch = select.poll()
    watch.register(end.fileno(), select.POLLRDHUP)

    def wait() -> None:
        watch.poll()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="death", daemon=True).start()
