"""Ranks together compute what one rank computes: the same samples, the same gradients, whatever wraps the model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shmrl import wire
from shmrl.config import dump_toml
from shmrl.payload import micro_batches_to_wire, pack
from shmrl.trainer.parallel import Ranks
from shmrl.types import MicroBatch
from tests.trainer.rank_gradients import LR, train
from tests.trainer.samples import put, ship

SCRIPT = Path(__file__).with_name("rank_gradients.py")
TRAINER = {"optimizer": {"max_grad_norm": 1e9}, "loss": {"score_centering": True}}


def launch(tree, batches, tmp_path, *modes, script=SCRIPT):
    """What every rank of one launch wrote, by the parts of the file's name: (mode, case, rank), or mode alone.

    batches: micro batches of every rank, or such lists by case.
    """
    cases = batches if isinstance(batches, dict) else {"": batches}
    wired = {case: [micro_batches_to_wire(rank) for rank in packed] for case, packed in cases.items()}
    (tmp_path / "tree.toml").write_text(dump_toml(tree))
    (tmp_path / "batches").write_bytes(wire.pack(wired if isinstance(batches, dict) else wired[""]))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tree.trainer.ranks)]
    command += ["--log-dir", str(tmp_path)]  # else torch leaves one in /tmp
    arguments = [str(tmp_path / name) for name in ("tree.toml", "batches", "")]
    process = subprocess.run(
        [sys.executable, *command, str(script), *arguments, *modes],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return {_key(path.stem): torch.load(path) for path in tmp_path.glob("*.pt")}


def _key(name):
    mode, *rest = name.split("-")
    return (mode, rest[0], int(rest[1])) if rest else mode


@pytest.fixture
def alone(make_tree, arena):
    """alone(samples) -> the same of one rank in this process."""

    def run(samples):
        ranks = Ranks("cpu")
        try:
            (micro_batches,) = ship(arena, samples, ranks=1, readers=9)
            found = train(make_tree(**TRAINER), ranks, arena, micro_batches)
            assert LR * max(grad.abs().max() for grad in found[0].values()) > 1e-3  # a step is far above the tolerance
            return found
        finally:
            ranks.close()

    return run


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=2e-6), (name, (a[name] - b[name]).abs().max())


def test_five_samples_on_four_ranks(make_tree, arena, branches, tmp_path, alone):
    samples = put(arena, sorted(branches, key=lambda branch: branch.T)[-5:])
    one, metrics, _ = alone(samples)
    packed = ship(arena, samples, ranks=4, readers=9, seq_len=max(sample.T for sample in samples))
    assert {len(rank) for rank in packed} == {2}
    assert sum(not batch.samples for rank in packed for batch in rank) == 3  # dummies
    found = launch(make_tree(ranks=4, **TRAINER), packed, tmp_path, "ddp")
    same(found["ddp"][0], one)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "payload/bytes"):
        assert found["ddp"][1][name] == pytest.approx(metrics[name], rel=1e-4), name
    assert found["ddp"][1]["train/mismatch_kl"] <= 1e-6
    arena.free([h for s in samples for h in s.handles])


def after_five_steps(found, parameters):
    """Every mode has the parameters of one rank (SGD: AdamW turns the rounding of small gradients into whole steps)."""
    for mode, (_, _, theirs) in found.items():
        worst = {name: float((theirs[name] - parameters[name]).abs().max()) for name in parameters}
        assert max(worst.values()) <= 1e-6, (mode, worst)


def test_sharded_equals_replicated_equals_alone(make_tree, arena, branches, tmp_path, alone):
    samples = put(arena, branches)
    one, metrics, moved = alone(samples)
    packed = ship(arena, samples, ranks=2, readers=9)
    exact, close = ("ddp", "fsdp", "fsdp_checkpointed", "fsdp_offloaded"), ("ddp_bfloat16", "fsdp_bfloat16")
    found = launch(make_tree(ranks=2, **TRAINER), packed, tmp_path, *exact, *close)
    for mode in exact:
        same(found[mode][0], one)
        assert found[mode][1]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-4), mode
    after_five_steps({mode: found[mode] for mode in exact}, moved)
    whole = torch.cat([one[name].flatten() for name in one])
    for mode in close:
        theirs = torch.cat([found[mode][0][name].flatten() for name in one])
        assert theirs.dtype == torch.float32
        assert torch.cosine_similarity(theirs, whole, dim=0) > 0.98, mode
        assert found[mode][1]["train/mismatch_kl"] < 1e-2, mode
    arena.free([h for s in samples for h in s.handles])


@pytest.fixture
def with_prompts(arena, branches):
    """(trained, untrained) samples; the latter end with their prompts, so that they have no loss token."""
    samples = put(arena, branches)
    trained, untrained = samples[:6], [sample.truncated(4) for sample in samples[6:]]
    assert not any(branch.loss_mask[:4].any() for branch in branches[6:])
    yield trained, untrained
    arena.free([h for s in samples for h in s.handles])


def test_a_rank_without_trainable_tokens(make_tree, arena, with_prompts, tmp_path, alone):
    trained, untrained = with_prompts
    _, _, moved = alone(trained)
    (first,), (second,) = (ship(arena, samples, ranks=1, readers=9) for samples in (trained, untrained))
    second += [MicroBatch((), padding=1)] * (len(first) - len(second))
    after_five_steps(launch(make_tree(ranks=2, **TRAINER), [first, second], tmp_path, "ddp", "fsdp"), moved)


def test_context_parallel_ranks_equal_one(make_tree, arena, with_prompts, tmp_path, alone):
    """Sequences of 1 and 2 tokens too, and one with its only loss token on the other rank."""
    trained, untrained = with_prompts
    prompt = trained[0].T - trained[0].S
    odd = [trained[0].truncated(1), trained[0].truncated(2), trained[0].truncated(prompt + 1)]
    one, metrics, moved = alone([*trained, *untrained, *odd])
    mine = [
        batch
        for samples in (trained, untrained, *([s] for s in odd))
        for batch in pack(samples, seq_len=96, num_ranks=1)[0]
    ]
    modes = ("ddp_context", "fsdp_context", "fsdp_context_checkpointed")
    found = launch(make_tree(ranks=2, **TRAINER), [mine, mine], tmp_path, *modes)
    for mode in modes:
        same(found[mode][0], one)
        for name in ("train/loss", "train/entropy", "train/grad_norm"):
            assert found[mode][1][name] == pytest.approx(metrics[name], rel=1e-4), (mode, name)
        assert found[mode][1]["payload/routing_missing_fraction"] == 0
    after_five_steps(found, moved)
