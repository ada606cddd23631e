"""Blocks that cannot be read: all ranks agree, drop the same micro batches, and train as if these had never been."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shmrl import wire
from shmrl.config import dump_toml
from shmrl.config.shape import model_shape
from shmrl.errors import RunError
from shmrl.payload import micro_batches_to_wire, pack, read_tokens
from shmrl.trainer.fake import _branch
from shmrl.types import MicroBatch
from tests.payload.test_assemble import flip_one_bit
from tests.trainer import lost_blocks
from tests.trainer.samples import put
from tests.trainer.test_step import stepper


@pytest.fixture
def hundreds(make_tree, arena):
    """Four samples of 100 loss tokens each, with every field."""
    tree = make_tree()
    (source,) = tree.orchestrator.train.source
    rng = np.random.default_rng(5)
    samples = put(arena, [_branch(tree, source, model_shape(tree), 133, rng) for _ in range(4)])
    assert [sample.S for sample in samples] == [100] * 4
    arena.ship([handle for sample in samples for handle in sample.handles], readers=9, step=1)
    yield samples
    arena.discard("run")


def micro_batch(*samples):
    (made,) = pack(samples, seq_len=133 * len(samples), num_ranks=1)[0]
    return made


def dummy_of(batch):
    """What stands in a rank's list where another has more micro batches."""
    return MicroBatch((), padding=1, fields=batch.fields, shapes=batch.shapes)


def on_ranks(tree, jobs, directory):
    """{(name, rank): gradients, metrics and loss tokens that it trained with}; jobs as in `Scene.on_ranks`."""
    packed = [(name, keys, [micro_batches_to_wire(rank) for rank in batches]) for name, (keys, batches) in jobs.items()]
    toml, wired = directory / "tree.toml", directory / "jobs"
    toml.write_text(dump_toml(tree))
    wired.write_bytes(wire.pack(packed))
    done = subprocess.run(
        [sys.executable, lost_blocks.__file__, toml, wired, directory],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = range(tree.trainer.ranks)
    return {(n, r): SimpleNamespace(**torch.load(directory / f"{n}-{r}.pt")) for n in jobs for r in ranks}


def test_ranks_drop_together_what_one_of_them_cannot_read(make_tree, arena, hundreds, tmp_path):
    """2 ranks x 2 micro batches of 100 loss tokens, one of rank 1 destroyed: 300 on both, counted once, and gradients
    are those of a run that never had it, to the last bit. And a context-parallel group, one rank of which is blind."""
    a, b, c, d = map(micro_batch, hundreds)
    arena.free(list(d.handles))
    cases = {
        "never": ({}, [[a, b], [c, dummy_of(d)]], 300), "lost": ({}, [[a, b], [c, d]], 300),
        "first": ({}, [[a, b], [d, c]], 300),
        "alone": ({"context_parallel": 2}, [[a, dummy_of(b)]] * 2, 100),
        "unseen": ({"context_parallel": 2}, [[a, b]] * 2, 100),
    }  # fmt: skip
    jobs = {
        f"{how}-{case}": ({"fsdp": how == "fsdp", **keys}, batches)
        for how in ("ddp", "fsdp")
        for case, (keys, batches, _) in cases.items()
    }
    found = on_ranks(make_tree(ranks=2), jobs, tmp_path)
    for (job, rank), one in found.items():
        how, case = job.split("-")
        without = found[f"{how}-{'alone' if case in ('alone', 'unseen') else 'never'}", rank]
        assert one.tokens == cases[case][2], (job, rank)
        assert one.metrics["payload/dropped_micro_batches"] == (one is not without), (job, rank)
        assert max(gradient.abs().max() for gradient in one.gradients.values()) > 1e-4
        assert one.gradients.keys() == without.gradients.keys()
        assert all(torch.equal(g, without.gradients[name]) for name, g in one.gradients.items()), (job, rank)


def test_no_rank_is_done_with_a_block_before_all_agree(make_tree, ranks, arena, hundreds, monkeypatch):
    one, seen = stepper(make_tree(), ranks, arena), []
    agree = ranks.sum

    def watched(values):
        seen.append([row["done"] for row in arena.ls()])
        return agree(values)

    monkeypatch.setattr(ranks, "sum", watched)
    one.run(1, [micro_batch(sample) for sample in hundreds], lr=0.0)
    assert seen == [[()] * 4]  # one call: readable bits and loss tokens together
    assert [row["done"] for row in arena.ls()] == [(0,)] * 4


def test_a_stand_in_has_a_real_route_and_no_loss(make_tree, ranks, arena, hundreds):
    micro_batches = [micro_batch(sample) for sample in hundreds]
    arena.free(list(micro_batches[1].handles))
    share = stepper(make_tree(), ranks, arena)._assemble(1, micro_batches, {})
    (_, first), (dummy, batch), *_ = share.work
    assert (dummy.samples, dummy.num_tokens, int(batch.loss_mask.sum())) == ((), 1, 0)
    assert np.array_equal(batch.routing, first.routing[:1])
    assert batch.routing.dtype == first.routing.dtype
    assert batch.routing_covered.tolist() == [True]
    assert (share.lost, share.global_tokens) == (1, 300)


def test_damaged_rows_are_dropped_where_they_are_verified(make_tree, ranks, arena, hundreds):
    tree = make_tree()
    tree = tree.model_copy(update={"arena": tree.arena.model_copy(update={"verify": True})})
    flip_one_bit(arena, read_tokens(arena, hundreds[2]).tobytes())
    metrics = stepper(tree, ranks, arena).run(1, [micro_batch(sample) for sample in hundreds], lr=0.0)
    assert metrics["payload/dropped_micro_batches"] == 1.0


def test_a_step_of_which_nothing_is_readable_stops_the_run_and_keeps_its_blocks(make_tree, ranks, arena, hundreds):
    micro_batches = [micro_batch(sample) for sample in hundreds]
    untrained = hundreds[3].truncated(20)
    arena.free([handle for batch in micro_batches[:3] for handle in batch.handles])
    with pytest.raises(RunError, match=r"step 7: no loss token can be read \(3 micro batches are lost\)"):
        stepper(make_tree(), ranks, arena).run(7, [*micro_batches[:3], micro_batch(untrained)], lr=0.0)
    assert [row["done"] for row in arena.ls()] == [()]  # nobody said done: they are the orchestrator's to free
