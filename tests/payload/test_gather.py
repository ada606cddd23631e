"""Gather: any ranges and layers equal slicing the whole, and nothing else is read or written."""

import ctypes
import hashlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from shmrl.arena import Arena, Handle
from shmrl.errors import ChecksumError, PayloadError, StaleHandle
from shmrl.payload import encode, gather, zigzag
from tests.payload.branches import make
from tests.payload.test_assemble import TAG, flip_one_bit

T, L, K = 200, 48, 8


def stored(arena, rows, gap=64):
    """The rows behind `gap` other bytes, as an embedder would store them."""
    with arena.reserve(gap + rows.nbytes) as block:
        flat = np.frombuffer(block.buffer, np.uint8)
        flat[gap:] = rows.view(np.uint8).ravel()
        del flat
        return block.seal(columns=[("routing", gap, rows.nbytes // len(rows), len(rows))])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("layers", [None, range(12, 24), [47, 0, 1, 5]], ids=str)
def test_ranges_and_layers_equal_slices(arena, dtype, layers):
    rows = np.random.default_rng(0).integers(0, 256, (2, T, L, K)).astype(dtype)
    first, second = (stored(arena, part) for part in rows)
    ranges = [(first, 150, 200), (second, 0, 1), (first, 3, 3), (first, 10, 20)]
    places = range(L) if layers is None else layers
    out = np.full((80, len(places), K), 99, dtype)
    gather(arena, "routing", ranges, out, layers, verify=True)
    wanted = np.concatenate([rows[0, 150:200], rows[1, :1], rows[0, 10:20]])[:, list(places)]
    assert np.array_equal(out[:61], wanted)
    assert (out[61:] == 99).all()
    assert arena.free([first, second]) == 2
    assert arena.stats()["blocks"] == 0


def test_what_encode_stored_is_gathered_by_its_segments(arena):
    branch = make(40, 25, L=4)
    sample = encode(arena, branch, tag=TAG)
    handle, start, _ = sample.segments[0]
    out = np.empty((sample.R, 2, 2), np.uint8)
    gather(arena, "routing", [(handle, start, start + sample.R)], out, [1, 3])
    assert np.array_equal(out, branch.rows["routing"].values[:, [1, 3]])


def test_what_cannot_be_is_refused(arena):
    handle = stored(arena, np.zeros((T, L, K), np.uint8))
    out = np.full((T, L, K), 7, np.uint8)
    for ranges, to, layers, words in (
        ([(handle, 0, T + 1)], np.empty((T + 1, L, K), np.uint8), None, r"rows \[0, 201\) of 200"),
        ([(handle, 5, 4), (handle, 0, 9)], out, None, r"rows \[5, 4\) of 200"),
        ([(handle, 0, T)], out[:10], None, "200 rows into a C-contiguous array of 10"),
        ([(handle, 0, 9)], out[:, ::2], None, "9 rows into a C-contiguous array"),
        ([(handle, 0, 9)], np.empty((9, L), np.uint8), None, "rows of 384 bytes into rows of 48"),
        ([(handle, 0, 9)], np.empty((9, 2, K), np.uint8), [0, 48], r"layers \[0, 48\] of 48"),
        ([(handle, 0, 9)], np.empty((9, 2, 7), np.uint8), [0, 1], "2 layers of rows of 384 bytes"),
    ):
        with pytest.raises(PayloadError, match=words):
            gather(arena, "routing", ranges, to, layers)
    with pytest.raises(KeyError, match=r"no column 'head'; it has \['routing'\]"):
        gather(arena, "head", [(handle, 0, 1)], out)
    assert (out == 7).all()
    arena.free(handle)
    with pytest.raises(StaleHandle):
        gather(arena, "routing", [(handle, 0, 1)], out)
    assert arena.stats()["blocks"] == 0


def test_a_flipped_bit_matters_to_those_who_read_its_row_block(arena):
    """Row 5,000 of 10,000."""
    rows = np.random.default_rng(1).integers(0, 256, (10_000, 4, K)).astype(np.uint8)
    handle = stored(arena, rows)
    flip_one_bit(arena, rows[5000].tobytes())
    out = np.empty_like(rows)
    gather(arena, "routing", [(handle, 0, 4000)], out, verify=True)
    assert np.array_equal(out[:4000], rows[:4000])
    with pytest.raises(ChecksumError, match=f"field 'routing': row block {5000 // 512} does"):
        gather(arena, "routing", [(handle, 0, 6000)], out, verify=True)
    arena.free(handle)


# Rows whose every layer is two pages, so that the memory management unit can count what is read.
TRAP_TOKENS, LAYER_NBYTES, STAGES, CONTEXT = 16, 8192, 4, 2
PROT_NONE, PROT_READ = 0, 1


def gather_trapped(address, handle, then):
    """One rank's share, with every page of the object that is not in it unreadable -> digest; then one byte more."""
    handle, arena = Handle.parse(handle), Arena.attach(address)
    view = arena.get(handle, field="routing")
    start = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start, view.nbytes, PROT_NONE) == 0
    ranges = zigzag([TRAP_TOKENS], CONTEXT, 1)
    layers, readable = range(L // STAGES, 2 * L // STAGES), 0
    for _, first, stop in ranges:
        for token in range(first, stop):
            at, nbytes = (token * L + layers[0]) * LAYER_NBYTES, len(layers) * LAYER_NBYTES
            assert protect(start + at, nbytes, PROT_READ) == 0
            readable += nbytes
    assert readable * STAGES * CONTEXT == view.nbytes
    out = np.empty((TRAP_TOKENS // CONTEXT, len(layers), LAYER_NBYTES // 2), np.uint16)
    gather(arena, "routing", [(handle, first, stop) for _, first, stop in ranges], out, layers)
    print(hashlib.sha256(out).hexdigest(), flush=True)
    if then == "more":
        print(view.__array_interface__["data"][0])


@pytest.mark.parametrize(("then", "code"), [("end", 0), ("more", -signal.SIGSEGV)])
def test_a_rank_of_four_stages_and_two_context_ranks_reads_an_eighth_of_the_pages(arena, then, code):
    rows = np.random.default_rng(2).integers(0, 65536, (TRAP_TOKENS, L, LAYER_NBYTES // 2)).astype(np.uint16)
    handle = stored(arena, rows, gap=0)
    call = "import sys; from tests.payload.test_gather import gather_trapped as run; run(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", call, arena.address, str(handle), then],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0"},  # a signal under ASan too, not its report
    )
    assert done.returncode == code, done.stderr
    share = np.ascontiguousarray(rows[4:12, 12:24])
    assert done.stdout == hashlib.sha256(share).hexdigest() + "\n"
    arena.free(handle)
