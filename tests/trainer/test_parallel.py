"""Ranks together compute what one rank computes: the same samples, the same gradients, whatever wraps the model."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from shmrl import Arena, wire
from shmrl.config import dump_toml
from shmrl.payload import micro_batches_to_wire, pack
from shmrl.trainer import checkpoint, lora
from shmrl.trainer.models import load_policy
from shmrl.trainer.parallel import Ranks, full_state
from shmrl.trainer.weights import write_model
from shmrl.types import MicroBatch
from tests.trainer import rank_gradients
from tests.trainer.conftest import run_tree
from tests.trainer.rank_gradients import LR, changed
from tests.trainer.samples import put, ship

SCRIPT = Path(rank_gradients.__file__)
TRAINER = {"optimizer": {"max_grad_norm": 1e9}, "loss": {"score_centering": True}}
LORA = {"lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj"]}}
FSDP, CHECKPOINTED, CONTEXT = {"fsdp": True}, {"activation_checkpointing": True}, {"context_parallel": 2}
BFLOAT16 = {"precision": "bfloat16"}


def by_place(seen=None):
    args = {} if seen is None else {"seen": str(seen)}
    return {"loss": {"kind": "custom", "path": "tests.trainer.rank_gradients:by_place", "args": args}}


class Scene:
    """An arena and a run on it; samples that are trained on ranks of their own processes, and on one in this process.

    Attributes: whole: samples of all branches; trained, untrained: of some each, the latter without a loss token.
    """

    def __init__(self, arena, tree, branches, directory):
        self.arena, self.tree, self.branches, self.directory = arena, tree, branches, directory
        self.whole, samples = put(arena, branches), put(arena, branches)
        self.trained, self.untrained = samples[:6], [sample.truncated(4) for sample in samples[6:]]
        assert not any(branch.loss_mask[:4].any() for branch in branches[6:])

    def on_ranks(self, jobs):
        """{name: what it found}; jobs: {name: (changes of [trainer], micro batches of every rank)}."""
        packed = [
            (name, trainer, [micro_batches_to_wire(rank) for rank in batches])
            for name, (trainer, batches) in jobs.items()
        ]
        toml, wired = self.directory / "tree.toml", self.directory / "jobs"
        toml.write_text(dump_toml(self.tree))
        wired.write_bytes(wire.pack(packed))
        process = subprocess.run(
            [sys.executable, SCRIPT, toml, wired, self.directory],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return {name: SimpleNamespace(**torch.load(self.directory / f"{name}.pt")) for name in jobs}

    def alone(self, samples, **trainer):
        """The same of one rank in this process."""
        ranks = Ranks("cpu")
        try:
            (micro_batches,) = ship(self.arena, samples, ranks=1, readers=9)
            found = rank_gradients.train(changed(self.tree, self.directory, trainer), ranks, self.arena, micro_batches)
        finally:
            ranks.close()
        assert LR * max(grad.abs().max() for grad in found.gradients.values()) > 1e-3  # far above the tolerance
        return found


@pytest.fixture(scope="module")
def scene(model_dir, branches, tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    with Arena.create(capacity="64MiB") as arena:
        yield Scene(arena, run_tree(model_dir, directory / "run", arena.address, **TRAINER), branches, directory)
        arena.unlink()


def odd(scene):
    """Sequences of 1 and 2 tokens, and one with its only loss token, the last."""
    first = scene.trained[0]
    return [first.truncated(1), first.truncated(2), first.truncated(first.T - first.S + 1)]


def last_tokens(scene):
    """Sequences whose only loss token is the last: of two ranks that share them the first scores them all."""
    return [sample.truncated(sample.T - sample.S + 1) for sample in scene.whole[:6]]


def shared(*groups):
    """Micro batches of samples that are packed group by group, the same for both ranks."""
    return [[batch for samples in groups for batch in pack(samples, seq_len=96, num_ranks=1)[0]]] * 2


def longest_five(scene):
    return sorted(scene.whole, key=lambda sample: sample.T)[-5:]


@pytest.fixture(scope="module")
def found(scene):
    """{name: what it found} of everything that ranks do, in one launch: starting it takes longer than their steps."""
    five = longest_five(scene)
    everything = ship(scene.arena, scene.whole, ranks=2, readers=9)
    (first,), (second,) = (ship(scene.arena, s, ranks=1, readers=9) for s in (scene.trained, scene.untrained))
    one_idle = [first, second + [MicroBatch((), padding=1)] * (len(first) - len(second))]
    in_parts = shared(scene.trained, scene.untrained, *([sample] for sample in odd(scene)))
    one_idle_in_parts = shared(last_tokens(scene))
    (scene.directory / "seen").mkdir()
    jobs = {
        "ddp": ({}, everything),
        "fsdp": (FSDP, everything),
        "fsdp_checkpointed": (FSDP | CHECKPOINTED, everything),
        "fsdp_offloaded": (FSDP | {"cpu_offload": True}, everything),
        "ddp_bfloat16": (BFLOAT16, everything),
        "fsdp_bfloat16": (FSDP | BFLOAT16, everything),
        "idle_ddp": ({}, one_idle),
        "idle_fsdp": (FSDP, one_idle),
        "context_ddp": (CONTEXT, in_parts),
        "context_fsdp": (CONTEXT | FSDP, in_parts),
        "context_fsdp_checkpointed": (CONTEXT | FSDP | CHECKPOINTED, in_parts),
        "context_idle_ddp": (CONTEXT, one_idle_in_parts),
        "context_idle_fsdp": (CONTEXT | FSDP, one_idle_in_parts),
        "context_custom": (CONTEXT | by_place(scene.directory / "seen"), in_parts),
        "lora_ddp": (LORA, everything),
        "lora_fsdp": (LORA | FSDP, everything),
        "lora_context_fsdp": (LORA | CONTEXT | FSDP, shared(scene.whole)),
        "lora_ddp_resumed": (LORA, everything),
        "lora_fsdp_resumed": (LORA | FSDP, everything),
        "four": ({}, ship(scene.arena, five, ranks=4, readers=9, seq_len=max(sample.T for sample in five))),
    }
    (four,) = [batches for _, batches in jobs.values() if len(batches) == 4]
    assert {len(rank) for rank in four} == {2}
    assert sum(not batch.samples for rank in four for batch in rank) == 3  # dummies
    return scene.on_ranks(jobs)


@pytest.fixture(scope="module")
def whole_alone(scene):
    return scene.alone(scene.whole)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=2e-6), (name, (a[name] - b[name]).abs().max())


def after_five_steps(many, one):
    """The weights of one rank, to 1e-6 (SGD: AdamW turns the rounding of small gradients into whole steps)."""
    assert many.weights.keys() == one.weights.keys()
    worst = {name: float((many.weights[name] - one.weights[name]).abs().max()) for name in one.weights}
    assert max(worst.values()) <= 1e-6, worst


def test_five_samples_on_four_ranks(found, scene):
    """Two micro batches each, three of them dummies."""
    four, one = found["four"], scene.alone(longest_five(scene))
    same(four.gradients, one.gradients)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "payload/bytes"):
        assert four.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4), name
    assert four.metrics["train/mismatch_kl"] <= 1e-6


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "fsdp_checkpointed", "fsdp_offloaded"])
def test_sharded_equals_replicated_equals_alone(found, whole_alone, mode):
    same(found[mode].gradients, whole_alone.gradients)
    assert found[mode].metrics["train/grad_norm"] == pytest.approx(whole_alone.metrics["train/grad_norm"], rel=1e-4)
    after_five_steps(found[mode], whole_alone)


@pytest.mark.parametrize("mode", ["ddp_bfloat16", "fsdp_bfloat16"])
def test_bfloat16_has_about_the_same_gradients_in_float32(found, whole_alone, mode):
    theirs, ours = (
        torch.cat([one.gradients[name].flatten() for name in whole_alone.gradients])
        for one in (found[mode], whole_alone)
    )
    assert theirs.dtype == torch.float32
    assert torch.cosine_similarity(theirs, ours, dim=0) > 0.98
    assert found[mode].metrics["train/mismatch_kl"] < 1e-2


def test_a_rank_without_trainable_tokens(found, scene):
    one = scene.alone(scene.trained)
    for mode in ("idle_ddp", "idle_fsdp"):
        after_five_steps(found[mode], one)


def test_context_parallel_ranks_equal_one(found, scene):
    one = scene.alone([*scene.trained, *scene.untrained, *odd(scene)])
    for mode in ("context_ddp", "context_fsdp", "context_fsdp_checkpointed"):
        same(found[mode].gradients, one.gradients)
        for name in ("train/loss", "train/entropy", "train/grad_norm"):
            assert found[mode].metrics[name] == pytest.approx(one.metrics[name], rel=1e-4), (mode, name)
        assert found[mode].metrics["payload/routing_missing_fraction"] == 0
        after_five_steps(found[mode], one)


def test_a_context_parallel_rank_without_trainable_tokens(found, scene):
    one = scene.alone(last_tokens(scene))
    for mode in ("context_idle_ddp", "context_idle_fsdp"):
        after_five_steps(found[mode], one)


def test_a_custom_loss_sees_each_loss_token_on_one_rank_of_its_group(found, scene):
    """With its place in the sequence, so that a loss that depends on it is that of one rank."""
    samples = [*scene.trained, *scene.untrained, *odd(scene)]
    after_five_steps(found["context_custom"], scene.alone(samples, **by_place()))
    seen, ranks_of = [], {}
    for path in (scene.directory / "seen").iterdir():
        batch, positions, meta = torch.load(path, weights_only=False)
        owner = torch.repeat_interleave(torch.arange(len(meta)), batch.seq_lens)
        rows = torch.stack([owner[positions], batch.positions[positions], batch.tokens[positions]], 1).tolist()
        seen += [(meta[row]["episode"], place, token) for row, place, token in rows]
        index, rank = path.stem.split("-")
        ranks_of.setdefault(index, set()).add(rank)
    tokens = {branch.meta["episode"]: branch for branch in scene.branches}
    wanted = [
        (sample.meta["episode"], place, int(tokens[sample.meta["episode"]].tokens[place]))
        for sample in samples
        for place in tokens[sample.meta["episode"]].loss_mask[: sample.T].nonzero()[0].tolist()
    ]
    assert sorted(seen) == sorted(wanted)
    assert {"0", "1"} in ranks_of.values()


@pytest.mark.long
def test_compiled_layers_under_ddp_and_fsdp(scene, whole_alone):
    everything, compiled = ship(scene.arena, scene.whole, ranks=2, readers=9), {"compile": True}
    jobs = {"compiled_ddp": (compiled, everything), "compiled_fsdp": (compiled | FSDP, everything)}
    for many in scene.on_ranks(jobs).values():
        same(many.gradients, whole_alone.gradients)
        after_five_steps(many, whole_alone)


# ---------------------------------------------------------------------------------------------------------- adapters


def test_adapters_on_ranks_equal_those_of_one(found, scene):
    one = scene.alone(scene.whole, **LORA)
    assert {name.rpartition(".")[2] for name in one.gradients} == {"lora_a", "lora_b"}
    for mode in ("lora_ddp", "lora_fsdp", "lora_context_fsdp"):
        same(found[mode].gradients, one.gradients)
        after_five_steps(found[mode], one)


@pytest.mark.parametrize("mode", ["lora_ddp_resumed", "lora_fsdp_resumed"])
def test_adapters_come_back_from_a_checkpoint_of_two_ranks(found, scene, model_dir, tmp_path, mode):
    """On the ranks that saved them the next step is the same bit for bit; on one rank they are the same."""
    ran = found[mode]
    assert all(torch.equal(ran.resumed[name], ran.straight[name]) for name in ran.straight)
    assert max(float((ran.straight[name] - ran.saved[name]).abs().max()) for name in ran.saved) > LR / 2
    tree = changed(scene.tree, scene.directory / mode, LORA)
    ranks = Ranks("cpu")
    try:
        policy = load_policy(tree, model_dir, ranks.device)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        checkpoint.restore(tree, ranks, 2, policy, optimizer)
    finally:
        ranks.close()
    assert all(torch.equal(value, ran.saved[name]) for name, value in full_state(policy.lm).items())
    assert all(optimizer.state[parameter]["step"] == 2 for parameter in trained)
    merged, adapters = lora.split(ran.saved, tree.trainer.lora)
    assert adapters.keys() == torch.load(checkpoint.checkpoint_dir(tree, 2) / checkpoint.ADAPTERS).keys()
    write_model(policy.lm, merged, model_dir, tmp_path)
    stored, wanted = (load_file(path / "model.safetensors") for path in (checkpoint.checkpoint_dir(tree, 2), tmp_path))
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)
