"""The columns table: fields and rows by name, checksums by row block, and what they notice."""

import mmap
import os

import numpy as np
import pytest

from shmrl.arena._ctl import crc32c, crc_blocks
from shmrl.arena.columns import Arrival
from shmrl.errors import ChecksumError

BLOCKS_OFF = 96  # in srl_header
ROWS = np.arange(10_000 * 6, dtype=np.uint16).reshape(10_000, 6)


@pytest.fixture
def data(arena):
    """The arena's data file, writable behind its back."""
    fd = os.open("/dev/shm/shmrl-{}-{}.data".format(os.geteuid(), arena.address.split(":")[1]), os.O_RDWR)
    with mmap.mmap(fd, 64 << 20) as mapped:
        yield mapped
    os.close(fd)


def test_check_value():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    assert crc_blocks(b"123456789" * 5, 9) == (0xE3069283).to_bytes(4, "little") * 5
    assert crc_blocks(b"", 9) == b""


def sealed(arena, gap=100):
    with arena.reserve(gap + ROWS.nbytes + 50) as block:
        flat = np.frombuffer(block.buffer, np.uint8)
        flat[:gap] = 1
        flat[gap : gap + ROWS.nbytes] = ROWS.view(np.uint8).reshape(-1)
        flat[-50:] = 2
        del flat
        return block.seal(columns=[("text", gap + ROWS.nbytes, 1, 50), ("routing", gap, 12, 10_000)])


def test_fields_and_rows(arena):
    handle = sealed(arena)
    assert [(c.name, c.rows, c.row_nbytes) for c in arena.columns(handle)] == [
        ("routing", 10_000, 12),
        ("text", 50, 1),
    ]
    with arena.get(handle, field="routing", rows=(4000, 4010), verify=True) as view:
        assert (view.rows, view.row_nbytes, view.nbytes) == (10, 12, 120)
        assert (np.frombuffer(view, np.uint16).reshape(view.rows, -1) == ROWS[4000:4010]).all()
    with arena.get(handle, field="text") as view:
        assert bytes(view) == b"\2" * 50
    with arena.get(handle, field="text", rows=(50, 50), verify=True) as view:
        assert (len(view), view.rows, view.row_nbytes) == (0, 0, 1)
    with arena.get(handle, verify=True) as view:
        assert view.nbytes == view.rows == handle.nbytes == 100 + 120_000 + 50
    with pytest.raises(KeyError, match=r"no column 'head'; it has \['routing', 'text'\]"):
        arena.get(handle, field="head")
    with pytest.raises(ValueError, match=r"rows=\(0, 10001\) of 10000 rows"):
        arena.get(handle, field="routing", rows=(0, 10_001))
    with pytest.raises(ValueError, match="needs field="):
        arena.get(handle, rows=(0, 1))
    by = arena.stats(by="field")["by"]
    assert (by["routing"]["bytes"], by["text"]["bytes"]) == (120_000, 50)
    arena.free(handle)


def test_a_block_without_columns_has_no_rows(arena):
    handle = arena.put(b"x" * 100)
    assert arena.columns(handle) == ()
    with pytest.raises(ValueError, match="without columns"):
        arena.get(handle, field="routing")
    arena.free(handle)


def test_a_flipped_bit_is_found_where_it_is(arena, data):
    """Row 5,000 of 10,000; a reference of 4,000 rows does not touch it, one of 6,000 does."""
    handle = sealed(arena)
    data[arena_offset(arena) + 100 + 5000 * 12] ^= 1
    arena.get(handle, field="routing", rows=(0, 4000), verify=True).release()
    arena.get(handle, field="text", verify=True).release()
    with pytest.raises(ChecksumError, match=f"field 'routing': row block {5000 // 512} does"):
        arena.get(handle, field="routing", rows=(0, 6000), verify=True)
    with pytest.raises(ChecksumError):
        arena.get(handle, verify=True)
    arena.get(handle, field="routing", rows=(0, 6000)).release()  # verifying is asked for
    arena.free(handle)


@pytest.mark.parametrize("at", [0, 99])
def test_bytes_in_no_column_are_covered_too(arena, data, at):
    handle = sealed(arena)
    data[arena_offset(arena) + at] ^= 1
    with pytest.raises(ChecksumError, match="outside its columns"):
        arena.get(handle, verify=True)
    arena.free(handle)


@pytest.mark.parametrize("nbytes", [1, 65_536, 65_537, 300_000, 1_000_003])
def test_plain_payloads_are_covered(arena, data, nbytes):
    handle = arena.put(os.urandom(nbytes))
    arena.get(handle, verify=True).release()
    data[arena_offset(arena) + nbytes - 1] ^= 1
    with pytest.raises(ChecksumError):
        arena.get(handle, verify=True)
    arena.free(handle)


@pytest.mark.parametrize("plain", [True, False])
def test_what_arrives_spoilt_is_found_with_the_row_block_it_is_in(arena, plain):
    handle = arena.put(ROWS) if plain else sealed(arena)
    with arena.get(handle) as view:
        whole, (tail, crc, _) = bytes(memoryview(view)), view._tail()
    for step in (1000, 64 << 10, len(whole)):
        arriving = bytearray(len(whole))
        arrival = Arrival(handle, memoryview(arriving), tail, crc)
        for at in range(0, len(whole), step):
            arriving[at : at + step] = whole[at : at + step]
            arrival.upto(min(at + step, len(whole)))
        arrival.finish()
        spoilt = bytearray(whole)
        spoilt[70_000] ^= 4
        arrival = Arrival(handle, memoryview(spoilt), tail, crc)
        arrival.upto(65_000)
        with pytest.raises(ChecksumError, match=r"row block \d+ does not match"):
            arrival.upto(140_000)


def test_a_changed_table_is_noticed(arena, data):
    handle = sealed(arena)
    data[arena_offset(arena) + -(-handle.nbytes // 8) * 8 + 20] ^= 1
    with pytest.raises(ChecksumError, match="columns table"):
        arena.get(handle, field="routing")
    arena.free(handle)


def test_unchecked_blocks_say_so(arena):
    for nbytes in (1000, 100_000):
        handle = arena.reserve(nbytes).seal(checksum=False, columns=[("a", 0, 10, 100)])
        with arena.get(handle, field="a", rows=(3, 4)) as view:
            assert len(view) == 10
        with pytest.raises(ChecksumError, match="sealed without checksums"):
            arena.get(handle, verify=True)
        assert arena.ls()[0]["flags"] == ("unchecked",)
        arena.free(handle)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([("a", 0, 10, 11)], "11 rows of 10 bytes at offset 0, in a payload of 100 bytes"),
        ([("a", 0, 10, 5), ("b", 49, 1, 1)], "'b' at offset 49 overlaps the column that ends at 50"),
        ([("a", 0, 1, 1), ("a", 1, 1, 1)], "'a'"),
        ([("x" * 32, 0, 1, 1)], "1 to 31 bytes"),
        ([("a", 0, 0, 1)], "rows of 0 bytes"),
        ([("a", 0, 1)], r"\('a', 0, 1\): \(field, offset, row_nbytes, rows\)"),
        ([("a", 0, 1.5, 1)], r"\('a', 0, 1\.5, 1\): .* three integers"),
        ([("a", 0, 1, None)], "three integers"),
        ([None], "column None"),
        ([(7, 0, 1, 1)], "a name and three integers"),
        ([("a", 0, 1 << 64, 0)], "0 rows of 18446744073709551616 bytes"),
    ],
)
def test_columns_that_cannot_be_are_refused(arena, columns, message):
    with arena.reserve(100) as block:
        with pytest.raises(ValueError, match=message):
            block.seal(columns=columns)
        arena.free(block.seal(columns=[("a", 0, 10, 10)]))  # the block is still there to be sealed right


def arena_offset(arena):
    """Where the only block begins in the data file: the first span of an empty arena."""
    ctl = memoryview(arena._window(False))
    blocks = int.from_bytes(ctl[BLOCKS_OFF:][:8], "little")
    return int.from_bytes(ctl[blocks + 256 * arena.ls()[0]["slot"] + 8 :][:8], "little")
