"""What each rank of a context-parallel group reads, feeds and scores."""

import numpy as np
import pytest

from shmrl.trainer.fold import chunks, part, whole

SEQ_LENS = (5, 11, 1, 7, 2)


def test_one_chunk_from_the_front_and_one_from_the_back():
    assert [(c.start, c.stop, c.end) for c in chunks([8], 2, 0)] == [(0, 2, 3), (6, 8, 8)]
    assert [(c.start, c.stop, c.end) for c in chunks([8], 2, 1)] == [(2, 6, 7)]
    assert chunks([1], 2, 1) == []


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_is_fed_once_and_every_predicted_one_scored_once(size):
    fed, scored = [], []
    starts = np.cumsum([0, *SEQ_LENS])
    for rank in range(size):
        fold = part(SEQ_LENS, size, rank)
        read = np.concatenate([np.arange(0), *(starts[s] + np.arange(a, b) for s, a, b in fold.ranges)])
        fed += read[fold.index[fold.index >= 0]].tolist()
        mine = np.setdiff1d(np.arange(len(read)), np.concatenate([fold.starts, fold.foreign]))
        scored += read[mine].tolist()
        assert (read[fold.index[0][fold.predictors(mine)]] == read[mine] - 1).all()
    assert sorted(fed) == list(range(sum(SEQ_LENS)))
    assert sorted(scored) == sorted(set(range(sum(SEQ_LENS))) - set(starts[:-1]))


@pytest.mark.parametrize("size", [2, 3])
def test_a_column_sees_what_comes_before_it_in_its_sequence(size):
    starts = np.cumsum([0, *SEQ_LENS])
    folds = [part(SEQ_LENS, size, rank) for rank in range(size)]
    keys = []  # the position in the packed row at each place of the group, -1 on padding
    for fold in folds:
        read = np.concatenate([np.arange(0), *(starts[s] + np.arange(a, b) for s, a, b in fold.ranges)])
        keys += [*np.where(fold.index[0] >= 0, np.append(read, 0)[fold.index[0]], -1)]
    keys = np.array(keys)
    owner = np.searchsorted(starts, keys, side="right")
    columns = len(keys) // size
    for rank, fold in enumerate(folds):
        for column in range(columns):
            at = rank * columns + column
            seen = (owner == owner[at]) & (keys <= keys[at]) & (keys >= 0) if keys[at] >= 0 else keys < 0
            assert (fold.visible[column] == seen).all()


def test_a_route_is_missed_where_a_sequence_goes_on():
    assert whole((3, 1, 2)).routed.tolist() == [True, True, False, False, True, False]
    assert part((3, 1, 2), 1, 0).routed.tolist() == [True, True, False, False, True, False]
    assert sum(part(SEQ_LENS, 3, rank).routed.sum() for rank in range(3)) == sum(SEQ_LENS) - len(SEQ_LENS)
