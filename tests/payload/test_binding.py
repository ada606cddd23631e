"""The C functions at their edges; what they do inside is tested through the functions that call them."""

import base64
import binascii
import errno
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmrl.payload import _payload


def copies(*rows):
    return np.array(rows, np.int64).reshape(-1, 7)


@pytest.mark.parametrize(
    "copy",
    [
        (1, 0, 0, 0, 0, 1, 4),  # no such block
        (-1, 0, 0, 0, 0, 1, 4),
        (0, 13, 0, 0, 0, 1, 4),  # behind the source
        (0, -1, 0, 0, 0, 1, 4),
        (0, 0, 0, 5, 0, 1, 4),  # behind the destination
        (0, 0, 0, -1, 0, 1, 4),
        (0, 0, 4, 0, 4, 5, 4),  # one row too many
        (0, 0, 2**62, 0, 4, 3, 4),  # strides and counts that would wrap
        (0, 0, 4, 0, 4, 2**62, 4),
        (0, 2**63 - 4, 0, 0, 0, 1, 8),
        (0, 0, 0, 0, 0, 1, 2**63 - 1),
        (0, 0, 0, 0, 0, 1, -1),
        (0, 0, -4, 0, 4, 2, 4),
        (0, 0, 0, 0, 4, 2, 4),  # a stride of 0 is for one row
        (0, 0, 4, 0, 4, -1, 4),
    ],
)
def test_a_copy_outside_its_block_moves_nothing(copy):
    out = np.zeros(8, np.uint8)
    sources = _payload.Sources([bytes(range(16))])
    with pytest.raises(ValueError, match="copy 1 of 2 leaves its block or the destination"):
        sources.gather(copies((0, 0, 0, 0, 0, 1, 4), copy), out)
    assert not out.any()


def test_strided_and_empty_copies():
    out = np.zeros(8, np.uint8)
    sources = _payload.Sources([bytes(range(16)), b""])
    sources.gather(copies((0, 1, 4, 2, 3, 2, 2), (1, 0, 0, 0, 0, 0, 9), (1, 0, 0, 0, 0, 1, 0)), out)
    assert out.tolist() == [0, 0, 1, 2, 0, 5, 6, 0]


def test_released_sources_hold_nothing():
    block = bytearray(16)
    sources = _payload.Sources([block])
    with pytest.raises(BufferError):
        block.append(0)
    sources.release()
    sources.release()
    block.append(0)
    with pytest.raises(ValueError, match="copy 0"):
        sources.gather(copies((0, 0, 0, 0, 0, 1, 4)), np.zeros(8, np.uint8))


def test_bits_outside_their_block():
    sources = _payload.Sources([b"\xff\x01"])
    assert sources.count_bits(0, 0, 3, 9) == 6
    for block, offset, start, stop in ((0, 0, 0, 17), (1, 0, 0, 1), (0, 1, 0, 9), (0, 0, 5, 4), (0, -1, 0, 1)):
        with pytest.raises(ValueError, match="leave block"):
            sources.count_bits(block, offset, start, stop)
    with pytest.raises(ValueError, match="do not fit"):
        sources.unpack_bits(0, 0, 0, 9, bytearray(8))


@given(st.binary(max_size=300), st.integers(0, 2400), st.integers(0, 2400))
def test_bit_counts(data, a, b):
    start, stop = sorted((min(a, 8 * len(data)), min(b, 8 * len(data))))
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[start:stop]
    sources = _payload.Sources([data])
    assert sources.count_bits(0, 0, start, stop) == bits.sum()
    out = np.empty(stop - start, np.uint8)
    sources.unpack_bits(0, 0, start, stop, out)
    assert np.array_equal(out, bits)


@given(st.binary(max_size=200))
def test_base64_is_base64(data):
    text = base64.b64encode(data)
    for form in (text, text.decode()):
        out = bytearray(len(text) // 4 * 3)
        assert _payload.decode_base64(form, out) == len(data)
        assert bytes(out[: len(data)]) == data


@given(st.text(alphabet="AZaz09+/=-_ \n\x00é", max_size=24))
@example("0000=")
@example("0000====")
def test_what_is_not_base64_is_refused_as_python_refuses_it(text):
    try:
        wanted = len(binascii.a2b_base64(text, strict_mode=True))
    except ValueError:
        wanted = None
    if wanted is not None and len(text) != (wanted + 2) // 3 * 4:  # Python lets "=" behind whole groups pass
        wanted = None
    written = _payload.decode_base64(text, bytearray(64))
    assert written == wanted if wanted is not None else written < 0


def test_too_small_buffers_are_refused():
    rows = np.zeros(4, np.int64)
    with pytest.raises(ValueError, match="do not fit"):
        _payload.narrow(rows, -8, bytearray(3), 1)
    with pytest.raises(ValueError, match="do not fit"):
        _payload.check_ids(rows, -8, 3, 2, 8)
    with pytest.raises(ValueError, match="cannot narrow"):
        _payload.narrow(rows, -3, bytearray(99), 1)
    assert _payload.decode_base64("AAAA", bytearray(2)) < 0
    with pytest.raises(BufferError):
        _payload.narrow(rows, -8, b"1234", 1)


def test_ids_far_apart_are_still_distinct():
    limit = 1 << 20
    ids = np.array([[limit - 1, 0], [0, limit - 1]], np.uint32)
    assert _payload.check_ids(ids, 4, 2, 2, limit) == (0, -1)


@pytest.mark.parametrize("wrong", b"@[`{.:*,-=\x00\x80\xff")
def test_a_wrong_character_is_found_wherever_it_is(wrong):
    """Neighbours of what is allowed, in the part that is decoded 32 at a time and behind it."""
    text = base64.b64encode(bytes(range(90)))
    for position in range(len(text) - 2):
        broken = text[:position] + bytes([wrong]) + text[position + 1 :]
        assert _payload.decode_base64(broken, bytearray(90)) == -1 - position


def test_every_repeated_id_of_a_row_of_eight_is_found():
    """Any pair in any of seven rows: the first is named by its second occurrence, as for other widths."""
    for row, first, second in itertools.product(range(7), range(8), range(8)):
        ids = np.tile(np.arange(248, 256, dtype=np.uint8), (7, 1))
        ids[row, second] = ids[row, first]
        wanted = (0, -1) if first == second else (-errno.EEXIST, 8 * row + max(first, second))
        assert _payload.check_ids(ids, 1, 7, 8, 256) == wanted


@pytest.mark.parametrize("limit", [9, 128, 129, 255])
def test_every_id_beyond_the_limit_is_found(limit):
    for row, column in itertools.product(range(7), range(8)):
        ids = np.tile(np.arange(8, dtype=np.uint8), (7, 1))
        ids[row, column] = limit
        assert _payload.check_ids(ids, 1, 7, 8, limit) == (-errno.EDOM, 8 * row + column)
