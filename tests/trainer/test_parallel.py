"""Ranks together compute what one rank computes: the same samples, the same gradients, whatever wraps the model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shmrl import wire
from shmrl.config import dump_toml
from shmrl.payload import micro_batches_to_wire
from shmrl.trainer.parallel import Ranks
from tests.trainer.rank_gradients import gradients
from tests.trainer.samples import put, ship

SCRIPT = Path(__file__).with_name("rank_gradients.py")
TRAINER = {"optimizer": {"max_grad_norm": 1e9}, "loss": {"score_centering": True}}


def on_ranks(tree, packed, tmp_path, *modes):
    """{mode: (gradients, metrics)} of one launch with len(packed) ranks."""
    (tmp_path / "tree.toml").write_text(dump_toml(tree))
    (tmp_path / "batches").write_bytes(wire.pack([micro_batches_to_wire(rank) for rank in packed]))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(packed))]
    launch += ["--log-dir", str(tmp_path)]  # else torch leaves one in /tmp
    arguments = [str(tmp_path / name) for name in ("tree.toml", "batches", "")]
    process = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), *arguments, *modes],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return {mode: torch.load(tmp_path / f"{mode}.pt") for mode in modes}


@pytest.fixture
def alone(make_tree, arena):
    """alone(samples) -> (gradients, metrics) of one rank in this process."""

    def run(samples):
        ranks = Ranks("cpu")
        try:
            (micro_batches,) = ship(arena, samples, ranks=1, readers=9)
            return gradients(make_tree(**TRAINER), ranks, arena, micro_batches)
        finally:
            ranks.close()

    return run


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=2e-6), (name, (a[name] - b[name]).abs().max())


def test_five_samples_on_four_ranks(make_tree, arena, branches, tmp_path, alone):
    samples = put(arena, sorted(branches, key=lambda branch: branch.T)[-5:])
    one, metrics = alone(samples)
    packed = ship(arena, samples, ranks=4, readers=9, seq_len=max(sample.T for sample in samples))
    assert {len(rank) for rank in packed} == {2}
    assert sum(not batch.samples for rank in packed for batch in rank) == 3  # dummies
    found = on_ranks(make_tree(ranks=4, **TRAINER), packed, tmp_path, "ddp")
    same(found["ddp"][0], one)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "payload/bytes"):
        assert found["ddp"][1][name] == pytest.approx(metrics[name], rel=1e-4), name
    assert found["ddp"][1]["train/mismatch_kl"] <= 1e-6
    arena.free([h for s in samples for h in s.handles])


def test_sharded_equals_replicated_equals_alone(make_tree, arena, branches, tmp_path, alone):
    samples = put(arena, branches)
    one, metrics = alone(samples)
    packed = ship(arena, samples, ranks=2, readers=9)
    exact, close = ("ddp", "fsdp", "fsdp_checkpointed"), ("ddp_bfloat16", "fsdp_bfloat16")
    found = on_ranks(make_tree(ranks=2, **TRAINER), packed, tmp_path, *exact, *close)
    for mode in exact:
        same(found[mode][0], one)
        assert found[mode][1]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-4), mode
    whole = torch.cat([one[name].flatten() for name in one])
    for mode in close:
        theirs = torch.cat([found[mode][0][name].flatten() for name in one])
        assert theirs.dtype == torch.float32
        assert torch.cosine_similarity(theirs, whole, dim=0) > 0.98, mode
        assert found[mode][1]["train/mismatch_kl"] < 1e-2, mode
    arena.free([h for s in samples for h in s.handles])
