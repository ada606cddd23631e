"""`Pinned`: the arena's committed data registered with CUDA, so that copies from views to the device need no bounce.

Made once in a trainer rank on a CUDA device, the only process that copies to one. What is committed later is registered
by the next `extend()`. Pages of an arena never move or go back, so a window stays registered until close().
Imports no torch: the CUDA runtime is the one that this process has loaded already.
"""

from __future__ import annotations

import ctypes
import logging
import re
from pathlib import Path
from typing import Self

from shmrl.arena.arena import Arena
from shmrl.arena.memory import human, rlimit
from shmrl.units import PAGE

log = logging.getLogger(__name__)

WINDOW = 1 << 30  # bytes; one call for all of a large arena takes seconds and fails as a whole
PORTABLE, READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly: consumers map the data PROT_READ


def loaded_cudart() -> ctypes.CDLL | None:
    """The CUDA runtime library of this process, or None when none is loaded."""
    found = re.search(r"\s(/\S*/libcudart[^/\s]*\.so[^/\s]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    if found is None:
        return None
    library = ctypes.CDLL(found[1])
    library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


class Pinned:
    """Registered windows of an arena. A failure is one warning and the end of registering; copies work without."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._cudart = arena, loaded_cudart()
        self._windows: list[int] = []  # their addresses
        self._failed = self._cudart is None
        self.nbytes = 0  # registered, from the start of the data
        if self._failed:
            log.warning("the arena is not registered with CUDA: no libcudart is loaded in this process")

    def extend(self) -> None:
        """Registers what was committed since, in windows that end at multiples of WINDOW."""
        start, _ = self._arena._data_at()
        committed = self._arena._header()["committed_pages"] * PAGE
        while not self._failed and self.nbytes < committed:
            end = min(committed, (self.nbytes // WINDOW + 1) * WINDOW)
            self._register(start + self.nbytes, end - self.nbytes)

    def _register(self, address: int, nbytes: int) -> None:
        assert self._cudart is not None
        code = self._cudart.cudaHostRegister(address, nbytes, PORTABLE | READ_ONLY)
        if code == 0:
            self._windows.append(address)
            self.nbytes += nbytes
            return
        self._failed = True
        self._cudart.cudaGetLastError()  # or the next launch would report it
        reason, locked = self._cudart.cudaGetErrorString(code).decode(), rlimit("RLIMIT_MEMLOCK")
        log.warning(
            "cudaHostRegister of %s of the arena behind %s failed: %s (%d)%s; copies to the device take the slower way",
            human(nbytes),
            human(self.nbytes),
            reason,
            code,
            f"; RLIMIT_MEMLOCK is {human(locked.limit)}: {locked.remedy}" if locked and locked.limit < nbytes else "",
        )

    def close(self) -> None:
        """Takes every window back; before the arena is closed. Idempotent."""
        while self._windows:
            assert self._cudart is not None
            self._cudart.cudaHostUnregister(self._windows.pop())
        self._failed, self.nbytes = True, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
