"""Adapters: nothing at first, trained alone, merged where they are published, and back from a checkpoint."""

import pytest
import torch

from shmrl.errors import RunError
from shmrl.trainer import checkpoint, lora, weights
from shmrl.trainer.models import load_model, load_policy
from shmrl.trainer.parallel import Ranks, full_state
from shmrl.trainer.step import Stepper
from tests.trainer.samples import put, retire, ship

LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "o_proj"]}
TOKENS = torch.arange(3, 27).reshape(2, 12)


@pytest.fixture
def trained(make_tree, arena, branches):
    """(tree, ranks, policy, optimizer) after one step that trained adapters only."""
    ranks = Ranks("cpu")
    tree = make_tree(lora=LORA)
    policy = load_policy(tree, tree.initial_weights, ranks.device)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.0)
    samples = put(arena, branches)
    (micro_batches,) = ship(arena, samples, ranks=1)
    metrics = Stepper(tree, ranks, arena, policy, policy, optimizer).run(1, micro_batches, lr=0.05)
    assert metrics["train/mismatch_kl"] <= 1e-6  # B is 0: the model as it was
    retire(arena, samples, 1)
    yield tree, ranks, policy, optimizer
    ranks.close()


def logits(lm):
    with torch.no_grad():
        return lm(input_ids=TOKENS, use_cache=False).logits


def test_only_adapters_move(trained, model_dir):
    _, _, policy, _ = trained
    before, now = load_model(model_dir).state_dict(), policy.lm.state_dict()
    assert all(torch.equal(now[name], before[name]) for name in before)
    moved = {name.rpartition(".")[2] for name in now.keys() - before.keys() if now[name].abs().max() > 0}
    assert moved == {"lora_a", "lora_b"}
    assert len(now) == len(before) + 2 * 2 * 2  # two layers, two targets, A and B


def test_what_is_published_is_merged(trained, model_dir):
    tree, _, policy, _ = trained
    merged, _ = lora.split(full_state(policy.lm), tree.trainer.lora)
    path = weights.publish(tree, 1, policy.lm, merged, model_dir)
    published = logits(load_model(path))
    assert (published - logits(policy.lm)).abs().max() < 1e-4
    assert (published - logits(load_model(model_dir))).abs().max() > 1e-2


def test_a_checkpoint_brings_adapters_and_optimizer_back(trained, model_dir):
    tree, ranks, policy, optimizer = trained
    checkpoint.save(tree, ranks, 1, policy, full_state(policy.lm), optimizer, {}, model_dir, {})
    again = load_policy(tree, model_dir, ranks.device)
    fresh = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.1)
    checkpoint.restore(tree, ranks, 1, again, fresh)
    assert torch.equal(logits(again.lm), logits(policy.lm))
    theirs = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(torch.equal(state["exp_avg"], mine) for state, mine in zip(fresh.state.values(), theirs, strict=True))
    assert (logits(load_model(checkpoint.checkpoint_dir(tree, 1))) - logits(policy.lm)).abs().max() < 1e-4


def test_a_target_that_is_not_there_is_named(make_tree, model_dir):
    tree = make_tree(lora={**LORA, "targets": ["q_proj", "gate_proj"]})
    with pytest.raises(RunError, match=r"no linear layer called gate_proj; it has .*q_proj"):
        load_policy(tree, model_dir, torch.device("cpu"))
