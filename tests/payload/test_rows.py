"""Ids of an answer become rows of a block in one pass: in C, as this machine does it and as lesser ones would."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shmrl.payload import Branch, Routing, encode
from tests.payload.branches import routes
from tests.support.drivers import MACHINES, PARTS, check

CSRC = ["avx512.c", "crc32c.c", "parts.c", "payload_ids.c", "payload_rows.c", "payload_vector.c"]


@pytest.mark.parametrize("flags", [*MACHINES, *PARTS])
def test_every_type_and_place_and_what_is_wrong(tmp_path, flags):
    check(Path(__file__).with_name("rows_driver.c"), CSRC, flags, tmp_path)


def test_a_fault_while_cores_share_the_work_is_reported(tmp_path):
    """Of a file that somebody cut under its mapping: the second half is another thread's, where there are two cores."""
    code = """
import faulthandler, mmap, os, sys
import numpy as np
from shmrl.payload import _payload
faulthandler.enable()
with open(sys.argv[1], "w+b") as file:
    os.ftruncate(file.fileno(), 16 << 20)
    source = mmap.mmap(file.fileno(), 16 << 20)
    os.ftruncate(file.fileno(), 12 << 20)
    _payload.copy_rows(source, np.empty(16 << 20, np.uint8), 65536, np.zeros(256, np.uint32))
"""
    command = [sys.executable, "-c", code, tmp_path / "cut"]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0"}  # as it is without a sanitizer
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, "Fatal Python error: Bus error" in done.stderr) == (-signal.SIGBUS, True)


@pytest.mark.parametrize("cuts", [(), (1,), (170,), (171, 400), (5, 6, 7)])
def test_checksums_taken_on_the_way_are_those_of_the_column(arena, cuts):
    """Turns end anywhere in a row block; what is read back verifies, whole and in part."""
    T = 601
    rows = routes(600, 48, 8).astype(np.uint8)
    routing = Routing(8, range(48))
    for first, last in zip((0, *cuts), (*cuts, 600), strict=True):
        routing.add(rows[first:last], start=first)
    branch = Branch([0] * T, [0] * T, [0] * T, routing=routing.stitch(T), num_experts=routing.num_experts)
    (handle,) = encode(arena, branch, tag="run/source/group/0").handles
    assert bytes(arena.get(handle, verify=True, field="routing")) == rows.tobytes()
    assert bytes(arena.get(handle, verify=True, field="routing", rows=(300, 555))) == rows[300:555].tobytes()
    assert arena.fsck() == []
    arena.free([handle])
