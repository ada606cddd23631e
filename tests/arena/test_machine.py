"""Random histories of verbs by three processes, any of which may be killed at any time, against a dict.

The arena is small, so that blocks spill into files at any time, and two sizes always do. Two sources have shares of it.
"""

import builtins
import os
import signal
from multiprocessing.connection import Listener

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shmrl import errors
from shmrl.arena import Arena, Handle, span_bytes
from tests.arena.machine import CAPACITY, PAGE, SHARES, Block, Model, Unsealed, span_of_put
from tests.arena.players import nursery
from tests.arena.storm import what_was_lent_comes_back

PLAYERS = st.sampled_from("abc")
TAGS = st.sampled_from(("run/x/1", "run/x/10", "run/y", "run/z"))
SIZES = st.sampled_from((0, 1, 255, 300, 4096, 33_000, PAGE, PAGE + 1, 200_000, CAPACITY + 1))
ROWS = st.sampled_from((0, 1, 600, 20_000, CAPACITY // 10 + 1))
READERS = st.integers(1, 2)
PICK = st.integers(0, 1 << 20)


class Remote:
    """A player in a process of its own: a call returns its answer or raises its error."""

    def __init__(self, nursery, listener, address):
        nursery.say(f"{listener.address} {address}")
        self.pipe = listener.accept()
        self.pid = self.pipe.recv()

    def __call__(self, verb, *args, **kwargs):
        self.pipe.send((verb, args, kwargs))
        assert self.pipe.poll(60), f"{verb} hangs"
        kind, value = self.pipe.recv()
        if kind == "error":
            raise getattr(errors, value, None) or getattr(builtins, value)
        return value

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        with pytest.raises((EOFError, ConnectionResetError)):
            self.pipe.recv()
        self.pipe.close()


class Machine(RuleBasedStateMachine):
    """`arena` only looks and sweeps; everything else is done by the players."""

    nursery = listener = spill_dir = None  # of the test that runs it

    def __init__(self):
        super().__init__()
        self.arena = Arena.create(CAPACITY, run_id="machine", spill_dir=self.spill_dir, shares=SHARES)
        self.model, self.players = Model(), {}

    def player(self, name):
        if name not in self.players:
            self.players[name] = Remote(self.nursery, self.listener, self.arena.address)
        return self.players[name]

    def handle(self, pick):
        return list(self.model.blocks)[pick % len(self.model.blocks)]

    def expect(self, error, name, verb, *args, **kwargs):
        """Calls; the error must be this one, if any -> the answer."""
        if error is None:
            return self.player(name)(verb, *args, **kwargs)
        with pytest.raises(error):
            self.player(name)(verb, *args, **kwargs)
        return None

    # -------------------------------------------------------------------------------------------------- writing

    def placed(self, name, verb, span, *args, tag):
        """Calls a verb that takes `span` bytes, or none for a file -> (its answer, what it took).

        A file it is where the shares do not admit the block, and only for want of room where they do.
        """
        admitted, fits, before = self.model.admits(tag, span), self.model.fits(span), self.arena.stats()["used_bytes"]
        answer = self.player(name)(verb, *args, tag=tag)
        took = self.arena.stats()["used_bytes"] - before
        assert took in (0, span)
        if span:
            assert admitted if took else not (admitted and fits)
        return answer, took

    @rule(name=PLAYERS, nbytes=SIZES, tag=TAGS, checked=st.booleans())
    def put(self, name, nbytes, tag, checked):
        data = bytes([self.model.created % 256]) * nbytes
        handle, span = self.placed(name, "put", span_of_put(nbytes), data, checked, tag=tag)
        self.model.add(handle, Block(data, tag, name, checked, span))

    @rule(name=PLAYERS, rows=ROWS, tag=TAGS)
    def reserve(self, name, rows, tag):
        key, nbytes = self.model.created, 10 * rows + 7
        _, span = self.placed(name, "reserve", span_bytes(nbytes), key, nbytes, tag=tag)
        self.model.unsealed[key] = Unsealed(name, rows, tag, span)
        self.model.created += 1

    @precondition(lambda self: self.model.unsealed)
    @rule(seal=st.booleans(), checked=st.booleans())
    def seal_or_abort(self, seal, checked):
        key, block = self.model.unsealed.popitem()
        if not seal:
            return self.player(block.owner)("abort", key)
        data = (key % 200).to_bytes(1, "little") * (10 * block.rows) + b"restful"
        columns = [("text", 10 * block.rows, 1, 7), ("rows", 0, 10, block.rows)]
        error = errors.AlreadyFreed if block.discarded else None
        handle = self.expect(error, block.owner, "seal", key, data, columns, checked)
        if handle:
            self.model.blocks[handle] = Block(data, block.tag, block.owner, checked, block.span, block.rows)
        return None

    # -------------------------------------------------------------------------------------------------- reading

    @precondition(lambda self: self.model.blocks)
    @rule(name=PLAYERS, pick=PICK, keep=st.booleans(), verify=st.booleans())
    def get(self, name, pick, keep, verify):
        handle = self.handle(pick)
        block = self.model.blocks[handle]
        error = self.model.readable(handle) or (errors.ChecksumError if verify and not block.checked else None)
        data = self.expect(error, name, "get", handle, keep, verify=verify)
        if error is None:
            assert data == block.data
            block.holders.update({name: block.holders.get(name, 0) + 1} if keep else {})

    @precondition(lambda self: self.model.blocks)
    @rule(name=PLAYERS, pick=PICK, start=st.integers(0, 700), count=st.integers(0, 700))
    def get_rows(self, name, pick, start, count):
        handle = self.handle(pick)
        block = self.model.blocks[handle]
        wrong = ValueError if block.rows is None or start + count > block.rows else None
        error = self.model.readable(handle) or wrong
        data = self.expect(error, name, "get", handle, False, field="rows", rows=(start, start + count))
        if error is None:
            assert data == block.data[10 * start : 10 * (start + count)]

    @rule(name=PLAYERS)
    def get_many(self, name):
        blocks = {handle: block for handle, block in self.model.blocks.items() if not block.retired}
        assert self.player(name)("get_many", list(blocks)) == [block.data for block in blocks.values()]

    @precondition(lambda self: any(block.holders for block in self.model.blocks.values()))
    @rule(pick=PICK)
    def release(self, pick):
        held = [(handle, name) for handle, block in self.model.blocks.items() for name in block.holders]
        handle, name = held[pick % len(held)]
        self.player(name)("release", handle)
        self.model.blocks[handle].release(name)

    # ------------------------------------------------------------------------------------------------ ownership

    @precondition(lambda self: self.model.blocks)
    @rule(name=PLAYERS, pick=PICK)
    def adopt(self, name, pick):
        handle = self.handle(pick)
        error = self.model.readable(handle)
        self.expect(error, name, "adopt", handle)
        if error is None:
            self.model.blocks[handle].owner = name

    @precondition(lambda self: self.model.blocks)
    @rule(name=PLAYERS, pick=PICK, readers=READERS)
    def ship(self, name, pick, readers):
        handle = self.handle(pick)
        error = self.model.shippable(handle, name)
        self.expect(error, name, "ship", handle, readers)
        if error is None:
            self.model.ship(handle, readers)

    @precondition(lambda self: self.model.blocks)
    @rule(name=PLAYERS, pick=PICK, reader=READERS)
    def done(self, name, pick, reader):
        handle = self.handle(pick)
        self.expect(self.model.done(handle, reader), name, "done", handle, reader)

    @precondition(lambda self: self.model.blocks)
    @rule(name=PLAYERS, pick=PICK)
    def free(self, name, pick):
        handle = self.handle(pick)
        error = self.model.freeable(handle, name)
        answer = self.expect(error, name, "free", handle)
        if error is None:
            assert answer == 1
            self.model.blocks[handle].retired = True

    @rule(name=PLAYERS, prefix=st.sampled_from(("run", "run/x", "run/x/1", "run/y")))
    def discard(self, name, prefix):
        assert self.player(name)("discard", prefix) == self.model.discard(prefix)

    # ------------------------------------------------------------------------------------------- coming and going

    @precondition(lambda self: self.players)
    @rule(pick=PICK, killed=st.booleans())
    def leave(self, pick, killed):
        name = sorted(self.players)[pick % len(self.players)]
        one = self.players.pop(name)
        if killed:
            one.kill()
            while not self.arena.sweep():  # the kernel lets go of its byte a moment after it closed our pipe
                pass
        else:
            one("close")
            one.pipe.close()
        self.model.leave(name)

    @invariant()
    def the_arena_is_what_the_model_says(self):
        stats = self.arena.stats(by="source", exact=True)
        living = self.model.living()
        assert self.arena.fsck() == []
        assert stats["blocks"] == len(living) + len(self.model.unsealed)
        assert stats["created"] == stats["freed"] + stats["blocks"] == self.model.created
        assert stats["used_bytes"] == sum(row["bytes"] for row in stats["by"].values())
        self.shares_are_what_their_blocks_take(stats)
        self.files_are_those_of_spilled_blocks(stats, living)
        assert stats["orphaned"] == sum(block.owner is None and not block.retired for block in living.values())

    def shares_are_what_their_blocks_take(self, stats):
        counted = {source: used for source, _, used in self.arena._look().shares()}
        assert counted == self.model.used()
        assert sum(counted.values()) == stats["used_bytes"] <= CAPACITY

    def files_are_those_of_spilled_blocks(self, stats, living):
        """A file for each, and for nothing else; what is in a file takes no space of the arena."""
        spilled = {row["handle"] for row in self.arena.ls() if "spilled" in row["flags"]}
        files = {f"{handle.slot}-{handle.generation}" for handle in map(Handle.parse, spilled)}
        assert {path.name for path in self.spill_dir.glob("*/*")} == files
        assert stats["spilled"] == len(files)
        assert all(handle in spilled for handle, block in living.items() if len(block.data) > CAPACITY)
        inside = sum(len(block.data) for handle, block in living.items() if handle not in spilled)
        assert CAPACITY >= stats["used_bytes"] >= inside

    def teardown(self):
        for one in self.players.values():
            one.kill()
        left = len(self.players)
        while left:
            left -= self.arena.sweep()
        self.arena.discard("run")
        try:
            what_was_lent_comes_back(self.arena)
        finally:
            self.arena.close()
            self.arena.unlink()
        assert list(self.spill_dir.iterdir()) == []


def run(helper, tmp_path, examples, steps):
    with Listener(str(tmp_path / "players"), backlog=8) as listener:
        Machine.nursery, Machine.listener, Machine.spill_dir = helper(nursery), listener, tmp_path / "spill"
        Machine.spill_dir.mkdir()
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=examples < 100,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )


def test_the_arena_does_what_a_dict_would(helper, tmp_path):
    run(helper, tmp_path, 25, 40)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_arena_does_what_a_dict_would_for_long(helper, tmp_path):
    run(helper, tmp_path, 1000, 80)
