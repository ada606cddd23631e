"""Registering with CUDA, by a runtime library that is built here and writes down every call."""

import ctypes
import os
import subprocess

import pytest

from shmrl.arena import Arena, pinning
from shmrl.arena.pinning import PORTABLE, READ_ONLY, Pinned

MIB = 1 << 20
CUDART = r"""
#include <stdio.h>
#include <stddef.h>
static int registered, failing = -1, errors;
static void note(const char *what, void *at, size_t n, unsigned flags) {
    FILE *f = fopen(LOG, "a");
    fprintf(f, "%s %zu %zu %u\n", what, (size_t)at, n, flags);
    fclose(f);
}
void fail_at(int window) { failing = window; }
int cudaHostRegister(void *at, size_t n, unsigned flags) {
    if (registered++ == failing) { errors++; return 801; }
    for (volatile char *p = at; p < (char *)at + n; p += 4096) (void)*p; /* as pinning does: every page is there */
    note("register", at, n, flags);
    return 0;
}
int cudaHostUnregister(void *at) { note("unregister", at, 0, 0); return 0; }
int cudaGetLastError(void) { int n = errors; errors = 0; return n; }
const char *cudaGetErrorString(int code) { return code == 801 ? "operation not supported" : "?"; }
"""


class Recorder:
    """The fake library, loaded in this process."""

    def __init__(self, directory):
        self.log = directory / "calls"
        source, library = directory / "cudart.c", directory / "libcudart.so.12"
        source.write_text(CUDART)
        subprocess.run(["cc", "-shared", "-fPIC", f'-DLOG="{self.log}"', "-o", library, source], check=True)
        self.library = ctypes.CDLL(str(library))

    def calls(self):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(what, *map(int, numbers)) for what, *numbers in (line.split() for line in lines)]


@pytest.fixture
def cudart(tmp_path):
    made = Recorder(tmp_path)
    assert os.path.samefile(pinning.loaded_cudart()._name, tmp_path / "libcudart.so.12")
    yield made
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(made.library._handle))
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(made.library._handle))  # that of loaded_cudart() here


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(pinning, "WINDOW", 100 * MIB)


def test_windows_cover_exactly_what_is_committed_and_are_taken_back(cudart, small_windows):
    flags = PORTABLE | READ_ONLY
    with Arena.create("384MiB") as arena, Arena.attach(arena.address) as rank:
        start, _ = rank._data_at()
        with Pinned(rank) as pinned:
            pinned.extend()
            first = [("register", start + at * MIB, n * MIB, flags) for at, n in ((0, 100), (100, 100), (200, 56))]
            assert cudart.calls() == first
            pinned.extend()
            assert cudart.calls() == first
            arena.free(arena.put(bytes(300 * MIB)))  # commits more
            committed = arena.stats()["committed_bytes"]
            pinned.extend()
            more = cudart.calls()[3:]
            assert more[0][:2] == ("register", start + 256 * MIB)
            assert sum(nbytes for _, _, nbytes, _ in more) == committed - 256 * MIB
            assert pinned.nbytes == committed
            windows = [at for _, at, _, _ in cudart.calls()]
        assert cudart.calls()[len(windows) :] == [("unregister", at, 0, 0) for at in reversed(windows)]
        arena.unlink()


def test_the_window_that_fails_is_one_warning_with_the_reason(cudart, small_windows, caplog):
    cudart.library.fail_at(1)
    with Arena.create("256MiB") as arena, Pinned(arena) as pinned:
        for _ in range(3):
            pinned.extend()
        assert pinned.nbytes == 100 * MIB
        assert len(cudart.calls()) == 1
        (said,) = [record.getMessage() for record in caplog.records]
        assert (
            "cudaHostRegister of 100.0 MiB of the arena behind 100.0 MiB failed: operation not supported (801)" in said
        )
        assert cudart.library.cudaGetLastError() == 0  # nobody else meets it
        arena.unlink()
    assert [what for what, *_ in cudart.calls()] == ["register", "unregister"]


def test_without_the_library_it_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(pinning, "loaded_cudart", lambda: None)
    with Arena.create("1MiB") as arena, Pinned(arena) as pinned:
        pinned.extend()
        assert pinned.nbytes == 0
        arena.unlink()
    (record,) = caplog.records
    assert "no libcudart is loaded" in record.getMessage()
