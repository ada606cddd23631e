"""What a request's branches begin with: found byte for byte, stored once, freed when nothing refers to it."""

import numpy as np
import pytest

from shmrl.errors import PayloadError
from shmrl.payload import Branch, Routing, SharedRows, assemble, encode, read_header
from shmrl.payload.sharing import MIN_SHARED_NBYTES, Opening
from shmrl.types import MicroBatch
from tests.payload.branches import routes

GROUP = "run1/src/g"
ROWS = MIN_SHARED_NBYTES // 16  # of 8 bytes beside 2 layers x top-4 uint8: what is just worth a block


class Play:
    """One branch: a prompt, then two sampled tokens. `routed` gives the prompt's routing another salt from there on."""

    def __init__(self, prompt, routed=None, experts=8, bad=None):
        T = len(prompt) + 2
        self.tokens = np.array([*prompt, 7, 8], np.int32)
        self.rows = routes(T - 1, K=4, E=experts).astype(np.uint8)
        if routed is not None:
            self.rows[routed:] = routes(T - 1, K=4, E=experts, salt=1)[routed:]
        if bad is not None:
            self.rows[bad] = 0  # ids that repeat in their row
        self.loss = np.arange(T) >= len(prompt)
        self.routing = Routing(experts, [0, 1])
        self.routing.add(self.rows, start=0)

    def opening(self):
        n = int(np.argmax(self.loss))
        return Opening(self.tokens[:n], self.routing.stitch(len(self.tokens)).first(n), (0, 1))

    def branch(self):
        stitched = self.routing.stitch(len(self.tokens))
        sampled = self.tokens[self.loss][:, None]
        return Branch(
            self.tokens, self.loss, np.where(self.loss, -0.5, 0), routing=stitched, layers=(0, 1),
            num_experts=self.routing.num_experts, head=(sampled, np.full(sampled.shape, -0.5, np.float32)),
        )  # fmt: skip


def prompt(n, *forks):
    """n token ids; from each fork (position, salt) on they are others."""
    tokens = np.arange(n) % 1000
    for at, salt in forks:
        tokens[at:] += 1000 * salt
    return tokens.tolist()


def store(arena, *plays):
    """The samples of a request, and the rows that all of their blocks have."""
    shared = SharedRows(arena, GROUP, {index: play.opening() for index, play in enumerate(plays)})
    samples = [
        encode(arena, play.branch(), f"{GROUP}/{index}", shared.prefix(index)) for index, play in enumerate(plays)
    ]
    shared.close(samples)
    handles = {handle for sample in samples for handle in sample.handles}
    assert arena.stats()["blocks"] == len(handles)
    return samples, sum(read_header(arena, handle).tokens_here for handle in handles)


def check(arena, samples, plays):
    """Every sample assembles to the bytes of its branch, stored whole."""
    for sample, play in zip(samples, plays, strict=True):
        whole = encode(arena, play.branch(), "run1/src/whole/0")
        got, want = assemble(arena, MicroBatch((sample,))), assemble(arena, MicroBatch((whole,)))
        assert (sample.T, sample.S, sample.R) == (whole.T, whole.S, whole.R)
        for name in ("tokens", "positions", "loss_mask", "logprobs", "routing", "routing_covered", "head_ids"):
            assert getattr(got, name).tobytes() == getattr(want, name).tobytes(), name
        arena.free(whole.handles)


def test_equal_prompts_are_stored_once(arena):
    plays = [Play(prompt(ROWS)) for _ in range(3)]
    samples, rows = store(arena, *plays)
    assert rows == ROWS + 3 * 2
    check(arena, samples, plays)


def test_one_row_less_is_not_worth_a_block(arena):
    samples, rows = store(arena, *(Play(prompt(ROWS - 1)) for _ in range(3)))
    assert rows == 3 * (ROWS + 1)
    assert [len(sample.segments) for sample in samples] == [1, 1, 1]


def test_prompts_that_part_one_after_the_other_share_what_they_still_have(arena):
    """0 and 2 go on together behind what 1 shares with them, 3 and 4 are of another conversation, 5 is alone."""
    n = 3 * ROWS
    plays = [
        Play(prompt(n)), Play(prompt(n, (ROWS + 5, 1))), Play(prompt(n, (2 * ROWS + 9, 2))), Play(prompt(n, (0, 3))),
        Play(prompt(n, (0, 3))), Play(prompt(n, (0, 4))),
    ]  # fmt: skip
    samples, rows = store(arena, *plays)
    assert [len(sample.segments) for sample in samples] == [3, 2, 3, 2, 2, 1]
    first, second, rest = ROWS + 5, ROWS + 4, ROWS - 9
    assert rows == (first + second + 2 * rest) + (n - first) + 2 * n + 6 * 2
    check(arena, samples, plays)


def test_rows_that_an_engine_routed_otherwise_are_not_shared(arena):
    plays = [Play(prompt(3 * ROWS)), Play(prompt(3 * ROWS), routed=ROWS + 1), Play(prompt(3 * ROWS))]
    samples, rows = store(arena, *plays)
    assert rows == (ROWS + 1) + (2 * ROWS - 1) + (2 * ROWS - 1) + 3 * 2
    check(arena, samples, plays)


def test_nothing_is_shared_across_layouts(arena):
    plays = [Play(prompt(ROWS)), Play(prompt(ROWS), experts=16)]
    with_none = Opening(np.array(prompt(4 * ROWS), np.int32))
    assert [len(sample.segments) for sample in store(arena, *plays)[0]] == [1, 1]
    assert with_none.common(plays[0].opening(), 0) == 0


def test_without_routing_ids_alone_are_compared(arena):
    n = MIN_SHARED_NBYTES // 8
    assert SharedRows(arena, GROUP, dict.fromkeys("ab", Opening(np.zeros(n, np.int32)))).prefix("a") is not None
    assert SharedRows(arena, GROUP, dict.fromkeys("ab", Opening(np.zeros(n - 1, np.int32)))).prefix("a") is None
    arena.discard(GROUP)


def test_a_branch_that_does_not_encode_takes_nothing_from_its_siblings(arena):
    plays = [Play(prompt(2 * ROWS), bad=5), Play(prompt(2 * ROWS)), Play(prompt(2 * ROWS), bad=ROWS + 5)]
    shared = SharedRows(arena, GROUP, {index: play.opening() for index, play in enumerate(plays)})
    samples = []
    for index, play in enumerate(plays):
        if index == 1:
            samples.append(encode(arena, play.branch(), GROUP, shared.prefix(index)))
        else:
            with pytest.raises(PayloadError, match="routing"):
                encode(arena, play.branch(), GROUP, shared.prefix(index))
    shared.close(samples)
    assert arena.stats()["blocks"] == 2  # what 1 and 2 begin with, and the rest of 1
    check(arena, samples, plays[1:2])


def test_what_nobody_refers_to_is_freed_and_the_rest_is_not(arena):
    plays = [Play(prompt(3 * ROWS)), Play(prompt(3 * ROWS)), Play(prompt(3 * ROWS, (ROWS, 1)))]
    shared = SharedRows(arena, GROUP, {index: play.opening() for index, play in enumerate(plays)})
    assert arena.stats()["blocks"] == 0  # nothing is stored before it is needed
    shared.prefix(0)
    assert arena.stats()["blocks"] == 2
    kept = encode(arena, plays[2].branch(), GROUP, shared.prefix(2))
    shared.close([kept])
    shared.close([kept])
    assert (arena.stats()["blocks"], arena.stats()["freed"]) == (2, 1)
    check(arena, [kept], plays[2:])
