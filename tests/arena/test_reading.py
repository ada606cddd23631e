"""What reading costs: no system call, no second copy in memory."""

import ctypes
import gc
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from shmrl.arena import Arena, Handle

MIB = 1 << 20
READERS = 16
PR_SET_SECCOMP, SECCOMP_MODE_STRICT, SYS_EXIT = 22, 1, 60


def read_strictly(address, *handles):
    """Reads blocks where the kernel kills whoever makes a system call other than read, write and exit."""
    arena = Arena.attach(address)
    handles = [Handle.parse(text) for text in handles]
    libc, frombuffer, uint8 = ctypes.CDLL(None), np.frombuffer, np.uint8
    gc.disable()
    for strict in (False, True):  # the first round maps the pages and fills the interpreter's free lists
        if strict:
            libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)
        for _ in range(1000):
            for handle in handles:
                last = frombuffer(arena.get(handle), uint8)[-1]
            del last
            arena.get_many(handles)
    os.write(1, b"read\n")
    if sys.stdin.readline() == "escape\n":
        os.getppid()
    libc.syscall(SYS_EXIT, 0)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of exit(2) differs; what is tested does not")
@pytest.mark.parametrize(("then", "code"), [("exit", 0), ("escape", -signal.SIGKILL)])
def test_get_makes_no_system_call(arena, helper, then, code):
    """4 KiB and 32 MiB alike; `escape` shows that one call would have been the end."""
    handles = [arena.put(bytes(4096)), arena.put(bytes(32 * MIB))]
    reader = helper(read_strictly, arena.address, *handles)
    assert reader.line() == "read"
    reader.say(then)
    assert reader.process.wait(60) == code


def resident(pid):
    """(Pss of the process, Pss of its mapping of the arena's data, page tables), bytes."""

    def field(name, text):
        return 1024 * sum(map(int, re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)))

    proc = Path(f"/proc/{pid}")
    ours = re.findall(r"^\S+-\S+ .*\.data$\n(?:[A-Z].*\n)+", (proc / "smaps").read_text(), re.MULTILINE)
    status = (proc / "status").read_text()
    return field("Pss", (proc / "smaps_rollup").read_text()), field("Pss", "".join(ours)), field("VmPTE", status)


def read_once(address, handle):
    """Touches every page of a block, says when, and keeps the view until told."""
    arena = Arena.attach(address)
    print("attached", flush=True)
    sys.stdin.readline()
    view = arena.get(Handle.parse(handle))
    total = sum(memoryview(view)[:: os.sysconf("SC_PAGESIZE")])
    print(total, flush=True)
    sys.stdin.readline()


def test_sixteen_readers_share_one_copy(helper):
    """By proportional set size: of the mappings exactly, of the whole processes within 2 percent."""
    nbytes = 128 * MIB
    with Arena.create("160MiB") as arena:
        handle = arena.put(b"\1" * nbytes, checksum=False)
        readers = [helper(read_once, arena.address, handle) for _ in range(READERS)]
        pids = [os.getpid(), *(reader.process.pid for reader in readers)]
        assert [reader.line() for reader in readers] == ["attached"] * READERS
        before = [resident(pid) for pid in pids]
        for reader in readers:
            reader.say()
        assert {reader.line() for reader in readers} == {str(nbytes // os.sysconf("SC_PAGESIZE"))}
        after = [resident(pid) for pid in pids]
        for reader in readers:
            reader.say()
            assert reader.wait() == 0
        arena.free(handle)
        arena.unlink()
    whole = sum(pss for pss, _, _ in after) - sum(pss for pss, _, _ in before)
    data = sum(pss for _, pss, _ in after)
    tables = sum(table for _, _, table in after) - sum(table for _, _, table in before)
    assert 1.00 <= data / nbytes <= 1.02
    assert -0.02 <= whole / nbytes <= 0.02  # the copy was there before they read
    assert tables <= 1.05 * READERS * nbytes / 512  # eight bytes per page and reader, beside the copy
