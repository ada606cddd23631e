"""A /dev/shm of the test session's own: two sessions on one machine neither sweep nor count each other's arenas.

Called by tests/conftest.py before the session has threads; every descendant inherits the mount, and the kernel drops it
with all that is in it when the last of them is gone.
"""

import ctypes
import os

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000


def enter() -> bool:
    """An empty tmpfs, as large as the machine's, over /dev/shm -> whether the kernel let us: it lets root alone."""
    there = os.statvfs("/dev/shm")
    options = f"size={there.f_blocks * there.f_frsize},mode=1777".encode()
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options) == 0
    )
