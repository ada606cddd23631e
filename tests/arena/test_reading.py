"""What reading costs: no system call, no second copy in memory, and nothing held by what was copied out."""

import ctypes
import gc
import os
import re
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from shmrl.arena import Arena, Handle

MIB = 1 << 20
READERS = 16
PAGE = os.sysconf("SC_PAGESIZE")
CALLS = {"x86_64": (0, 1, 231), "aarch64": (63, 64, 94)}  # read, write, exit_group


def allow_only(calls):
    """From now on the kernel ends this process with SIGSYS at any other system call."""
    pr_set_seccomp, pr_set_no_new_privs, mode_filter = 22, 38, 2
    load, equal, result = 0x20, 0x15, 0x06  # of the call's number; classic BPF
    allow, kill_process = 0x7FFF0000, 0x80000000
    program = [(load, 0, 0, 0), *((equal, len(calls) - i, 0, call) for i, call in enumerate(calls))]
    program += [(result, 0, 0, kill_process), (result, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value, pointer in ((pr_set_no_new_privs, 1, None), (pr_set_seccomp, mode_filter, header)):
        if prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)):
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def read_without_calls(address, then, *handles):
    """Reads blocks twice, the second time without any system call; `then` makes one."""
    arena = Arena.attach(address)
    handles = [Handle.parse(text) for text in handles]
    gc.disable()
    for calls in (None, CALLS[os.uname().machine]):  # the first time maps the pages and fills the free lists
        if calls:
            allow_only(calls)
        for _ in range(1000):
            for handle in handles:
                last = np.frombuffer(arena.get(handle), np.uint8)[-1]
            for view in arena.get_many(handles):
                view.release()
    os.write(1, f"{last}\n".encode())
    if then == "escape":
        os.getppid()
    os._exit(0)


@pytest.mark.parametrize(("then", "code"), [("exit", 0), ("escape", -signal.SIGSYS)])
def test_get_makes_no_system_call(arena, helper, then, code):
    """4 KiB and 32 MiB alike; `escape` shows that one call is the end."""
    handles = [arena.put(b"\7" * nbytes) for nbytes in (4096, 32 * MIB)]
    reader = helper(read_without_calls, arena.address, then, *handles)
    assert reader.line() == "7"
    assert reader.wait() == code


def resident(pid):
    """(PSS of the process, PSS of its mapping of the arena's data, page tables), bytes."""

    def field(name, text):
        return 1024 * sum(map(int, re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)))

    proc = Path(f"/proc/{pid}")
    ours = re.findall(r"^\S+-\S+ .*\.data$\n(?:[A-Z].*\n)+", (proc / "smaps").read_text(), re.MULTILINE)
    status = (proc / "status").read_text()
    return field("Pss", (proc / "smaps_rollup").read_text()), field("Pss", "".join(ours)), field("VmPTE", status)


def read_in_children(address, handle):
    """READERS forks that say their pid, read the block at the first line of stdin and end at the second."""
    first, second = os.pipe(), os.pipe()
    for _ in range(READERS):
        if os.fork() == 0:
            try:
                os.close(first[1])
                os.close(second[1])
                read_once(address, handle, first[0], second[0])
            finally:
                os._exit(0)
    for _, write in (first, second):
        sys.stdin.readline()
        os.close(write)
    for _ in range(READERS):
        os.wait()


def read_once(address, handle, first, second):
    """Touches every page of a block when `first` ends, and keeps the view until `second` does."""
    arena = Arena.attach(address)
    os.write(1, f"{os.getpid()}\n".encode())
    os.read(first, 1)
    view = arena.get(Handle.parse(handle))
    os.write(1, f"{int(np.frombuffer(view, np.uint8)[::PAGE].sum())}\n".encode())
    os.read(second, 1)
    view.release()


def test_sixteen_readers_share_one_copy(helper):
    """By proportional set size, which shares each page among those who map it, rounded down to a KiB per mapping."""
    nbytes = 128 * MIB
    with Arena.create("160MiB") as arena:
        handle = arena.put(b"\1" * nbytes, checksum=False)
        readers = helper(read_in_children, arena.address, handle)
        pids = [os.getpid(), *(int(readers.line()) for _ in range(READERS))]
        before = [resident(pid) for pid in pids]
        readers.say()
        assert [readers.line() for _ in range(READERS)] == [str(nbytes // PAGE)] * READERS
        after = [resident(pid) for pid in pids]
        readers.say()
        assert readers.wait() == 0
        arena.free(handle)
        arena.unlink()
    whole, data, tables = (sum(column) for column in zip(*after, strict=True))
    whole -= sum(pss for pss, _, _ in before)
    tables -= sum(table for _, _, table in before)
    assert 0.999 <= data / nbytes <= 1.02
    assert whole / nbytes < 0.5  # nobody made another copy; what forks touch for the first time is in it
    per_page = 8 * READERS * nbytes / PAGE  # page tables; upper levels and what forks touch come on top
    assert per_page <= tables <= 1.25 * per_page


def test_sh_17_a_row_that_was_copied_out_holds_nothing():
    """Of 1 GiB: the view holds the block, the copy of one of its rows does not."""
    rows, row_nbytes = 1024, MIB
    with Arena.create("1040MiB") as arena:
        with arena.reserve(rows * row_nbytes) as block:
            block.buffer[7 * row_nbytes : 8 * row_nbytes] = b"\7" * row_nbytes
            handle = block.seal(checksum=False, columns=[("routing", 0, row_nbytes, rows)])
        view = arena.get(handle, field="routing", rows=(7, 8))
        kept = np.frombuffer(view, np.uint8).copy()
        assert arena.free(handle) == 1
        assert arena.stats()["used_bytes"] >= rows * row_nbytes
        view.release()
        assert arena.stats()["used_bytes"] == 0
        assert kept.tobytes() == b"\7" * row_nbytes
        arena.unlink()
