"""A /dev/shm and a loopback of the test session's own: two sessions on one machine, such as the workers of
`pytest -n 2`, neither sweep nor count each other's arenas nor take each other's ports.

Called by tests/conftest.py before the session has threads that matter; every descendant inherits both, and the kernel
drops them with all that is in them when the last of those is gone.
"""

import ctypes
import fcntl
import os
import socket
import struct

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter() -> bool:
    """An empty tmpfs, as large as the machine's, over /dev/shm, and a network that is loopback alone -> whether the
    kernel let us: it lets root alone."""
    there = os.statvfs("/dev/shm")
    options = f"size={there.f_blocks * there.f_frsize},mode=1777".encode()
    libc = ctypes.CDLL(None)
    if (
        libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET)
        or libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), options)
    ):
        return False
    _start_loopback()
    return True


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
