"""Handles and references: sizes, identity, truncation."""

import pickle

import pytest

from shmrl.types import ErrorInfo, Handle, MicroBatch, Sample


def handle(slot=3):
    return Handle.pack(node=1, arena=2, slot=slot, generation=4, nbytes=2**40 + 5, nonce=b"abcdefgh")


def test_a_handle_says_what_it_was_made_of():
    h = handle()
    assert (h.version, h.flags, h.node, h.arena, h.slot, h.generation, h.nbytes, h.nonce) == (
        1, 0, 1, 2, 3, 4, 2**40 + 5, b"abcdefgh",
    )  # fmt: skip
    assert len(bytes(h)) == 32
    assert Handle.from_bytes(bytes(h)) == h
    assert Handle.parse(str(h)) == h
    assert pickle.loads(pickle.dumps(h)) == h  # noqa: S301
    assert len({h, handle(), handle(5)}) == 2


@pytest.mark.parametrize("text", ["", "h12", "x" + "0" * 64, "h" + "g" * 64])
def test_what_is_not_a_handle_is_refused(text):
    with pytest.raises(ValueError, match=r"handle|hex"):
        Handle.parse(text)
    with pytest.raises(ValueError, match="32 bytes"):
        Handle(b"short")


def test_truncation_changes_counts_only():
    sample = Sample(((handle(1), 0, 30), (handle(2), 5, 12)), T=37, S=12, R=36)
    cut = sample.truncated(33)
    assert cut.segments == ((handle(1), 0, 30), (handle(2), 5, 8))
    assert (cut.T, cut.S, cut.R) == (33, 12, 33)
    assert sample.truncated(30).segments == ((handle(1), 0, 30),)
    assert sample.truncated(0).segments == ()
    assert sample.truncated(37) == sample
    with pytest.raises(ValueError, match="37 tokens to 38"):
        sample.truncated(38)


def test_a_micro_batch_lists_each_block_once_and_each_range_in_order():
    a = Sample(((handle(1), 0, 4),), T=4, S=2, R=3, fields=("routing",))
    b = Sample(((handle(1), 0, 2), (handle(2), 0, 3)), T=5, S=2, R=4)
    batch = MicroBatch((a, b), padding=3)
    assert batch.num_tokens == 12
    assert batch.seq_lens == (4, 5)
    assert batch.handles == (handle(1), handle(2))
    ranges = [(s.handle.slot, s.start, s.stop, s.sequence) for s in batch.slices]
    assert ranges == [
        (1, 0, 4, 0),
        (1, 0, 2, 1),
        (2, 0, 3, 1),
    ]


def test_an_error_carries_its_causes():
    try:
        try:
            raise KeyError("k")
        except KeyError as cause:
            raise ValueError("v") from cause
    except ValueError as error:
        info = ErrorInfo.of(error)
    assert info == ErrorInfo("ValueError", "v", ("KeyError: 'k'",))
