"""Stitching: turns, aborts, resumes, and engines that do not say where their rows start."""

import numpy as np
import pytest

from shmrl.errors import PayloadError
from shmrl.payload import Routing

E = 64


def rows(*values):
    """One row [1 layer, K=2] per value v: experts v and (v + 1) % E."""
    v = np.array(values)
    return np.stack([v, (v + 1) % E], axis=-1)[:, None, :]


def values(result):
    return result[:, 0, 0].tolist()


def routing():
    return Routing(num_experts=E, layers=[0])


def test_the_boundary_row_of_a_turn_comes_from_the_next():
    r = routing()
    r.add(rows(0, 1, 2, 3, 4, 5), start=0)
    r.add(rows(*range(20, 30)), start=0)
    result = r.finish(11)
    assert values(result) == [0, 1, 2, 3, 4, 5, 26, 27, 28, 29]
    assert result.dtype == np.uint8


@pytest.mark.parametrize(
    ("second", "start"), [(range(30, 45), 0), (range(40, 45), 10), (range(30, 45), None), (range(40, 45), None)]
)
def test_abort_and_resume_takes_only_what_is_not_covered(second, start):
    r = routing()
    r.add(rows(*range(10)), start=0)
    r.add(rows(*second), start=start)
    assert values(r.finish(16)) == [*range(10), 40, 41, 42, 43, 44]


def test_prefill_and_decode_in_either_order():
    prefill, decode = rows(0, 1, 2, 3, 4), rows(50, 51, 52, 53, 54, 15, 16, 17, 18)
    for first_prefill in (True, False):
        r = routing()
        if first_prefill:
            r.add(prefill, start=0)
        r.add(decode, start=0, valid=(5, 9))
        if not first_prefill:
            r.add(prefill, start=0)
        assert values(r.finish(10)) == [0, 1, 2, 3, 4, 15, 16, 17, 18]


def test_a_decode_server_that_finished_with_one_token():
    r = routing()
    r.add(rows(0, 1, 2, 3, 4), start=0)
    assert values(r.finish(6)) == [0, 1, 2, 3, 4]


def test_junk_outside_the_valid_range_is_not_looked_at():
    r = routing()
    r.add(rows(0, 1), start=0)
    junk = np.zeros((4, 1, 2), np.int64)
    junk[2:] = rows(2, 3)
    r.add(junk, start=0, valid=(2, 4))
    assert values(r.finish(5)) == [0, 1, 2, 3]


def test_gaps_and_surpluses_are_errors():
    r = routing()
    r.add(rows(0, 1, 2), start=0)
    r.add(rows(5, 6), start=5)
    with pytest.raises(PayloadError, match="first missing one is token 3"):
        r.finish(8)
    r = routing()
    r.add(rows(*range(5)), start=0)
    with pytest.raises(PayloadError, match="5 rows for 7 tokens"):
        r.finish(7)
    with pytest.raises(PayloadError, match="rows up to token 5 for 4 tokens"):
        r.finish(4)


def test_the_last_token_may_have_a_row():
    r = routing()
    r.add(rows(0, 1, 2), start=0)
    assert len(r.finish(3)) == 3


def test_one_token_and_nothing_captured():
    assert routing().finish(1).shape == (0, 1, 0)
    with pytest.raises(PayloadError, match="0 rows for 5 tokens"):
        routing().finish(5)


def test_an_ambiguous_segment_is_refused():
    r = routing()
    r.add(rows(0, 1), start=0)
    r.add(rows(2, 3, 4), start=None)  # 3 rows from 0 make 3 = T - 1 of 4; appended they make 5
    assert values(r.finish(4)) == [0, 1, 4]
    with pytest.raises(PayloadError, match="0 readings"):
        r.finish(9)
    r = routing()
    r.add(rows(0, 1, 2), start=0)
    r.add(rows(3), start=None)  # a snapshot of one row (T - 1 = 3) or an append (T = 4)
    with pytest.raises(PayloadError, match="2 readings"):
        r.finish(4)


def test_wrong_shapes_and_ids():
    r = routing()
    with pytest.raises(PayloadError, match=r"expected \[n, 1, K\]"):
        r.add(np.zeros((3, 2, 2), int), start=0)
    r.add(rows(0, 1), start=0)
    with pytest.raises(PayloadError, match="top-3 rows after top-2"):
        r.add(np.zeros((3, 1, 3), int), start=0)
    r.add(rows(2, E), start=2)
    with pytest.raises(PayloadError, match="outside"):
        r.finish(5)


def test_a_partly_missing_row_is_corrupt():
    r = routing()
    r.add([[[5, -1]]], start=0)
    with pytest.raises(PayloadError, match="id -1 at token 0, layer slot 0, column 1"):
        r.finish(2)
