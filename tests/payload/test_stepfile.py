"""A step's file assembles to the very arrays that its arena gave, and says so when it cannot."""

import msgpack
import numpy as np
import pytest

from shmrl.arena import crc32c
from shmrl.errors import ChecksumError, LostPayload, PayloadError, RunError, ShmrlError
from shmrl.payload import assemble, encode
from shmrl.payload.header import align
from shmrl.payload.reassemble import assembled, show
from shmrl.payload.stepfile import _PREFIX, StepFile, write
from shmrl.types import MicroBatch
from tests.payload.branches import make


@pytest.fixture
def step(arena):
    """Two ranks' micro batches of a step: a shared prefix, a cut sample, padding, a dummy."""
    tag = "run/a/g/0"
    first, alone = encode(arena, make(37, 20), tag), encode(arena, make(24, 10, salt=1), tag)
    longer = make(40, 20)
    second = encode(arena, longer, tag, prefix=(first, 15))
    shapes = first.meta["shapes"]
    dummy = MicroBatch((), padding=8, fields=("routing",), shapes=shapes)
    return {
        (0, 0): MicroBatch((first, second), padding=3),
        (0, 1): MicroBatch((alone.truncated(20),)),
        (1, 0): MicroBatch((alone,), padding=1),
        (1, 1): dummy,
    }


@pytest.fixture
def file(arena, step, tmp_path):
    path = tmp_path / "step.shmrl"
    assert write(path, arena, "run", 7, step) == path.stat().st_size
    return path


def test_it_assembles_without_the_arena_to_the_same_bytes(arena, step, file):
    expected = {place: assemble(arena, micro).arrays() for place, micro in step.items()}
    arena.discard("run")
    assert arena.stats()["blocks"] == 0
    with StepFile(file) as opened:
        assert (opened.run, opened.step, len(opened.blocks)) == ("run", 7, 3)
        assert list(opened.micro_batches) == list(step)
        for place, micro in opened.micro_batches.items():
            arrays = assemble(opened, micro, verify=True).arrays()
            assert list(arrays) == list(expected[place])
            for name, array in arrays.items():
                assert (array.dtype, array.shape) == (expected[place][name].dtype, expected[place][name].shape), name
                assert array.tobytes() == expected[place][name].tobytes(), name
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_one_step_is_one_file_to_the_last_bit(arena, step, file):
    again = file.with_name("again")
    write(again, arena, "run", 7, step)
    assert again.read_bytes() == file.read_bytes()


def test_a_block_that_is_gone_is_named_and_no_file_is_left(arena, step, tmp_path):
    arena.free(step[1, 0].handles)
    with pytest.raises(LostPayload, match="of s1/g/0 is gone"):
        write(tmp_path / "step.shmrl", arena, "run", 7, step)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(arena, step, tmp_path):
    with pytest.raises(RunError, match=r"/none/step.shmrl cannot be written \([\d,]+ B\): No such file"):
        write(tmp_path / "none" / "step.shmrl", arena, "run", 7, step)


def test_every_damaged_byte_of_the_index_and_of_a_block_is_noticed(file):
    whole = file.read_bytes()
    with StepFile(file) as opened:
        blocks = sorted(opened.blocks.values())
    inside = [offset + nbytes // 2 for offset, nbytes, _ in blocks]
    for at in [*np.random.default_rng(3).integers(32, blocks[0][0] - 64, 40).tolist(), *inside]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ChecksumError, match="does not match its crc32c"):
            read_all(file)


def read_all(file):
    with StepFile(file) as opened:
        for micro in opened.micro_batches.values():
            assemble(opened, micro)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: b"", "has 0 B: it is no step's file"),
        (lambda whole: b"PK\3\4" + whole[4:], "it is no step's file"),
        (lambda whole: whole[:8] + b"\2" + whole[9:], "has format 2, this is 1"),
        (lambda whole: whole[:-1], r"has [\d,]+ of [\d,]+ B"),
    ],
)
def test_what_is_no_file_of_this_format_is_refused(file, content, said):
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(PayloadError, match=said):
        StepFile(file)


def test_a_missing_file_and_a_foreign_block_are_named(file, arena):
    with pytest.raises(RunError, match="nowhere cannot be read: No such file"):
        StepFile(file.with_name("nowhere"))
    other = encode(arena, make(9, 3), "run/a/g/1")
    with StepFile(file) as opened, pytest.raises(LostPayload, match=r"Handle\(.*\) is not in .*step.shmrl"):
        opened.get(other.handles[0])


def with_index(path, change):
    """The file again, with another index that matches its checksum."""
    whole = path.read_bytes()
    *head, _, size, _ = _PREFIX.unpack(whole[: _PREFIX.size])
    index, blocks = msgpack.unpackb(whole[_PREFIX.size :][:size]), whole[align(_PREFIX.size + size) :]
    raw = msgpack.packb(change(index))
    base = align(_PREFIX.size + len(raw))
    changed = _PREFIX.pack(*head, crc32c(raw), len(raw), base + len(blocks)) + raw
    other = path.with_name("changed.shmrl")
    other.write_bytes(changed.ljust(base, b"\0") + blocks)
    return other


def places(value, at=()):
    """The paths of everything in an index."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def replaced(index, at, value):
    if not at:
        return value
    index[at[0]] = replaced(index[at[0]], at[1:], value)
    return index


VALUES = [None, -1, 0, 1, 2**31, 2**63 - 1, 2**64 - 1, 1.5, float("nan"), float("inf"), "x", "0" * 100, b"", b"x" * 32]
VALUES += [[], {}, [[]], [1], [None], True]


def test_whatever_an_index_says_is_read_or_refused(file):
    found, random = [], np.random.default_rng(5)
    with_index(file, lambda index: found.extend(places(index)) or index)
    refused = 0
    for _ in range(400):
        at, value = found[random.integers(len(found))], VALUES[random.integers(len(VALUES))]
        changed = with_index(file, lambda index: replaced(index, at, value))  # noqa: B023
        try:
            show(changed)
            assembled(changed)
        except ShmrlError:
            refused += 1
    assert 0 < refused < 400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda batch: batch[0].__setitem__(1, 2**31), r"padding is 2147483648, not a number from 0 to [\d,]+"),
        (lambda batch: batch[1][1][0].__setitem__(1, 2**31), "a dimension of routing is 2147483648, not a number"),
        (lambda batch: batch[1][1][0].__setitem__(slice(1, 3), [60_000] * 2), "the elements of a row of routing is"),
        (lambda batch: batch[0].__setitem__(1, 1 << 27), "elements of routing in 134,217,728 positions of padding is"),
    ],
)
def test_sizes_that_no_run_has_are_refused_before_anything_is_allocated(file, change, said):
    def dummy(index):
        (references,) = (wire for rank, number, wire in index["micro_batches"] if (rank, number) == (1, 1))
        change([references[0][0], references[1]])
        return index

    with pytest.raises(PayloadError, match=said):
        StepFile(with_index(file, dummy))


def test_a_block_that_is_not_in_the_file_is_refused(file):
    for column, value in ((1, 1 << 40), (1, -64), (2, 1 << 40)):
        changed = with_index(file, lambda index: replaced(index, ("blocks", 0, column), value))  # noqa: B023
        with pytest.raises(PayloadError, match=r"not a number from 0 to -?[\d,]+"):
            StepFile(changed)
