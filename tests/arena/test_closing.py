"""close() while something is under way, in another thread or in a signal handler: ArenaClosed, and never a crash.

Each case runs in a process of its own that says how it ended; a crash is the end of that process.
"""

import mmap
import signal
import threading

import pytest

from shmrl.arena import Arena, files
from shmrl.errors import AlreadyFreed, ArenaClosed, StaleHandle
from tests.arena import layout
from tests.support.clock import wait_until

BIG = 40 << 20  # of 64 MiB: there is room for one


def refused(call):
    """Whether the call ends with ArenaClosed."""
    try:
        call()
    except ArenaClosed:
        return True
    return False


def while_a_thread_waits_for_space(arena):
    arena.put(bytes(BIG), tag="run/big")
    said = []
    thread = threading.Thread(target=lambda: said.append(refused(lambda: arena.put(bytes(BIG), timeout_s=60))))
    thread.start()
    wait_until(lambda: arena._in_queue)
    arena.close()
    thread.join()
    return said == [True]


def in_a_signal_handler_that_makes_room(arena):
    """The wait for space runs it, and the next attempt finds room in an arena that is closed."""
    big = arena.put(bytes(BIG), tag="run/big")

    def handler(*_):
        arena.free(big)
        arena.close()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    return refused(lambda: arena.reserve(BIG, timeout_s=60))


def at_the_first_write(arena):
    first = arena._open_for_writing

    def then_close():
        first()
        arena.close()

    arena._open_for_writing = then_close
    return refused(lambda: arena.put(b"x"))


def under_the_allocators_lock(arena):
    arena._locked_call(arena.close)
    return arena.closed


def between_two_looks_at_the_header(arena):
    arena._reachable = lambda: arena.close() or 0
    return refused(arena.pressure)


def with_a_buffer_of_a_discarded_block(arena):
    block = arena.reserve(100_000, tag="run/x")
    buffer = block.buffer
    arena.discard("run/x")
    with pytest.raises(AlreadyFreed):
        block.seal()
    return outlives_close(arena, buffer)


def with_a_buffer_of_a_block_whose_generation_was_changed(arena):
    block = arena.reserve(100_000, tag="run/x")
    buffer = block.buffer
    flip(arena, 4)
    with pytest.raises(StaleHandle):
        block.seal()
    return outlives_close(arena, buffer)


def with_a_buffer_of_a_block_whose_nonce_was_changed(arena):
    block = arena.reserve(100_000, tag="run/x")
    buffer = block.buffer
    flip(arena, 24)
    block.seal()
    return outlives_close(arena, buffer)


def flip(arena, at):
    """Changes a bit of the only block's descriptor."""
    with mmap.mmap(files.parse(arena.address).open("ctl", write=True), 0) as ctl:
        ctl[layout.block(ctl, arena.ls()[0]["slot"]) + at] ^= 1


def outlives_close(arena, buffer):
    arena.close()
    buffer[:5] = b"still"
    return bytes(buffer[:5]) == b"still"


CASES = {
    case.__name__: case
    for case in (
        while_a_thread_waits_for_space,
        in_a_signal_handler_that_makes_room,
        at_the_first_write,
        under_the_allocators_lock,
        between_two_looks_at_the_header,
        with_a_buffer_of_a_discarded_block,
        with_a_buffer_of_a_block_whose_generation_was_changed,
        with_a_buffer_of_a_block_whose_nonce_was_changed,
    )
}


def play(address, name):
    print(CASES[name](Arena.attach(address)), flush=True)


@pytest.mark.parametrize("name", CASES)
def test_a_close_crashes_nothing(arena, helper, name):
    other = helper(play, arena.address, name)
    assert other.line() == "True"
    assert other.wait() == 0
    arena.sweep()
    arena.discard("run")
    if "changed" not in name:  # a block that was corrupted may be lost
        assert (arena.stats()["blocks"], arena.fsck()) == (0, [])
