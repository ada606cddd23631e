"""A step on one rank: real rollouts, a real arena, exact log-probabilities, and what is refused or dropped."""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from benches.rollouts import rollouts
from shmrl.errors import RunError
from shmrl.payload import Branch
from shmrl.trainer import step
from shmrl.trainer.losses import LossOutput
from shmrl.trainer.models import load_policy
from shmrl.trainer.step import Stepper
from tests.trainer.samples import bare, put, retire, ship


def stepper(tree, ranks, arena, lr=0.0):
    policy = load_policy(tree, tree.initial_weights, ranks.device)
    return Stepper(tree, ranks, arena, policy, policy, torch.optim.SGD(policy.parameters(), lr=lr))


def test_exact_on_policy(make_tree, ranks, arena, branches):
    samples = put(arena, branches)
    (micro_batches,) = ship(arena, samples, ranks=1)
    metrics = stepper(make_tree(), ranks, arena).run(1, micro_batches, lr=0.0)
    assert metrics["train/mismatch_kl"] <= 1e-6
    assert metrics["train/masked_fraction"] == 0.0
    assert metrics["payload/routing_missing_fraction"] == 0.0
    assert metrics["payload/dropped_micro_batches"] == 0.0
    assert metrics["payload/bytes"] == sum(s.handles[0].nbytes for s in samples)
    mean = sum(s.advantage * s.S for s in samples) / sum(s.S for s in samples)
    assert metrics["train/loss"] == pytest.approx(-mean, abs=1e-4)
    assert arena.stats()["blocks"] == len(samples)  # the ledger's share
    retire(arena, samples, 1)
    assert arena.stats()["blocks"] == 0


def test_a_rank_that_does_not_get_on_reading_says_so_and_ends(
    make_tree, ranks, arena, branches, monkeypatch, caplog, capfd
):
    samples = put(arena, branches)
    (micro_batches,) = ship(arena, samples, ranks=1)
    ended = threading.Event()
    monkeypatch.setattr("shmrl.monitor.watchdog._end", lambda code: ended.set())
    reads = iter([lambda: ended.wait(60)])
    real = step.assemble
    monkeypatch.setattr(step, "assemble", lambda *args, **rest: (next(reads, bool)(), real(*args, **rest))[1])
    one = stepper(make_tree(stall_timeout_s=0.2), ranks, arena)
    one.run(1, micro_batches, lr=0.0)  # goes on here, because nothing ended it
    assert "rank 0 stalled: reading step 1 has taken longer than 0.2 s" in caplog.text
    assert "in _read" in capfd.readouterr().err
    retire(arena, samples, 1)


def test_exact_at_another_temperature(make_tree, ranks, arena, model_dir):
    samples = put(arena, rollouts(model_dir, 4, temperature=0.6))
    assert {sample.meta["temperature"] for sample in samples} == {0.6}
    (micro_batches,) = ship(arena, samples, ranks=1)
    sampling = {"temperature": 0.6, "max_tokens": 24}
    metrics = stepper(make_tree(head=0, sampling=sampling), ranks, arena).run(1, micro_batches, lr=0.0)
    assert metrics["train/mismatch_kl"] <= 1e-6
    retire(arena, samples, 1)


def test_raw_logprobs_are_compared_at_temperature_one(make_tree, ranks, arena, model_dir):
    meta = {"logprobs_mode": "raw", "temperature": 0.6}
    raw = [dataclasses.replace(s, meta=s.meta | meta) for s in put(arena, rollouts(model_dir, 4))]
    (micro_batches,) = ship(arena, raw, ranks=1)
    metrics = stepper(make_tree(head=0, sampling={"max_tokens": 24}), ranks, arena).run(1, micro_batches, lr=0.0)
    assert metrics["train/mismatch_kl"] <= 1e-6
    retire(arena, raw, 1)


def test_without_sampling_replay_the_ratio_is_biased(make_tree, ranks, arena, branches):
    """Every ratio carries the kept mass, at most 1."""
    samples = put(arena, branches, advantage=lambda index: 1.0)
    (micro_batches,) = ship(arena, samples, ranks=1)
    metrics = stepper(make_tree(sampling_replay=False), ranks, arena).run(1, micro_batches, lr=0.0)
    assert metrics["train/mismatch_kl"] > 1e-4
    assert -0.9 < metrics["train/loss"] < -0.1
    retire(arena, samples, 1)


def test_a_step_moves_the_policy_towards_the_advantage(make_tree, ranks, arena, branches):
    samples = put(arena, branches, advantage=lambda index: 1.0)
    one = stepper(make_tree(), ranks, arena)
    (micro_batches,) = ship(arena, samples, ranks=1, readers=3)
    before = one.run(1, micro_batches, lr=0.5)
    after = one.run(2, micro_batches, lr=0.0)
    assert after["train/loss"] < before["train/loss"] - 1e-3
    assert after["train/mismatch_kl"] > 1e-6
    retire(arena, samples, 1)
    arena.done([h for s in samples for h in s.handles], reader=2)


def observed(x, seen):
    torch.save((x.batch, x.positions, x.meta, (x.step, x.rank, x.micro_batch)), f"{seen}/{x.micro_batch}.pt")
    return LossOutput(x.logprobs.sum(), torch.zeros_like(x.logprobs, dtype=torch.bool))


def test_a_custom_loss_sees_every_assembled_row(make_tree, ranks, arena, branches, tmp_path):
    samples = put(arena, branches)
    (micro_batches,) = ship(arena, samples, ranks=1)
    assert max(len(batch.samples) for batch in micro_batches) >= 3
    loss = {"kind": "custom", "path": "tests.trainer.test_step:observed", "args": {"seen": str(tmp_path)}}
    stepper(make_tree(loss=loss), ranks, arena).run(7, micro_batches, lr=0.0)
    by_episode = {branch.meta["episode"]: branch for branch in branches}
    seen = 0
    for index in range(len(micro_batches)):
        batch, positions, meta, where = torch.load(tmp_path / f"{index}.pt", weights_only=False)
        assert where == (7, 0, index)
        assert torch.equal(positions, batch.loss_mask.nonzero()[:, 0])
        first = 0
        for length, about in zip(batch.seq_lens.tolist(), meta, strict=True):
            branch = by_episode[about["episode"]]
            row = slice(first, first + length)
            assert batch.tokens[row].tolist() == branch.tokens.tolist()
            assert batch.logprobs[row].tolist() == branch.logprobs.tolist()
            assert np.array_equal(batch.routing[row][:-1].numpy(), branch.rows["routing"].values)
            first, seen = first + length, seen + 1
    assert seen == len(samples)
    retire(arena, samples, 1)


def test_a_lost_block_leaves_the_loss(make_tree, ranks, arena, branches):
    """The step with a lost micro batch equals the step without it; its tokens leave the count."""
    samples = put(arena, branches)
    (micro_batches,) = ship(arena, samples, ranks=1, readers=2)
    whole = stepper(make_tree(), ranks, arena).run(1, micro_batches[1:], lr=0.0)
    lost = [h for s in micro_batches[0].samples for h in s.handles]
    kept = [s for batch in micro_batches[1:] for s in batch.samples]
    arena.free(lost[:1])
    metrics = stepper(make_tree(), ranks, arena).run(1, micro_batches, lr=0.0)
    assert metrics["payload/dropped_micro_batches"] == 1.0
    assert metrics["train/loss"] == pytest.approx(whole["train/loss"], abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)
    retire(arena, kept, 1)
    arena.done(lost, reader=1)
    assert arena.stats()["blocks"] == 0


def test_a_step_without_anything_to_read_stops_the_run(make_tree, ranks, arena, branches):
    samples = put(arena, branches[:3])
    (micro_batches,) = ship(arena, samples, ranks=1)
    arena.free([h for s in samples for h in s.handles])
    with pytest.raises(RunError, match="step 4: no loss token can be read"):
        stepper(make_tree(), ranks, arena).run(4, micro_batches, lr=0.0)


@pytest.mark.parametrize(
    ("trainer", "sampling", "message"),
    [
        ({"head": 0}, None, "source 'bench': a sample with .* loss tokens has no mask"),
        ({}, {"max_tokens": 24}, "source 'bench': a sample with .* loss tokens has no head"),
    ],
)
def test_a_missing_declared_field_stops_the_run(make_tree, ranks, arena, branches, trainer, sampling, message):
    samples = put(arena, [bare(branches[0])])
    (micro_batches,) = ship(arena, samples, ranks=1)
    with pytest.raises(RunError, match=message):
        stepper(make_tree(sampling=sampling, **trainer), ranks, arena).run(1, micro_batches, lr=0.0)
    retire(arena, samples, 1)


def infinite(x):
    return LossOutput(x.logprobs.sum() * torch.inf, torch.zeros_like(x.logprobs, dtype=torch.bool))


def test_a_gradient_that_is_not_finite_stops_the_run(make_tree, ranks, arena, branches):
    samples = put(arena, branches[:2])
    (micro_batches,) = ship(arena, samples, ranks=1)
    one = stepper(make_tree(loss={"kind": "custom", "path": "tests.trainer.test_step:infinite"}), ranks, arena, lr=1.0)
    before = [parameter.clone() for parameter in one.optimizer.param_groups[0]["params"]]
    with pytest.raises(RunError, match="step 9: the gradient's norm is nan"):
        one.run(9, micro_batches, lr=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, one.optimizer.param_groups[0]["params"], strict=True))
    retire(arena, samples, 1)


def test_untruncated_sampling_needs_no_mask(make_tree, ranks, arena, branches):
    samples = put(arena, [bare(branches[0])])
    assert "mask" not in samples[0].fields
    (micro_batches,) = ship(arena, samples, ranks=1)
    stepper(make_tree(sampling={"max_tokens": 24}, head=0), ranks, arena).run(1, micro_batches, lr=0.0)
    retire(arena, samples, 1)


def test_missing_routing_stops_the_run(make_tree, ranks, arena, branches):
    samples = put(arena, [bare(branches[0], routing=False)])
    (micro_batches,) = ship(arena, samples, ranks=1)
    with pytest.raises(RunError, match="has no routing, which this run trains with"):
        stepper(make_tree(sampling={"max_tokens": 24}, head=0), ranks, arena).run(1, micro_batches, lr=0.0)
    retire(arena, samples, 1)


def test_tokens_without_a_route_are_fed_and_counted(make_tree, ranks, arena, branches):
    """An episode that nothing is trained on may come without routing; its tokens, but for the last, are counted."""
    routed = put(arena, branches[:2])
    plain = Branch(branches[2].tokens, branches[2].loss_mask & False, branches[2].logprobs * 0, meta=branches[2].meta)
    samples = [*routed, *put(arena, [plain])]
    ((batch,),) = ship(arena, samples, ranks=1)
    metrics = stepper(make_tree(), ranks, arena).run(1, [batch], lr=0.0)
    fed = sum(sample.T for sample in samples)
    assert metrics["payload/routing_missing_fraction"] == pytest.approx((plain.T - 1) / fed)
    assert metrics["payload/dropped_micro_batches"] == 0.0
    retire(arena, samples, 1)


def test_demonstrations_need_no_captured_field(make_tree, ranks, arena, branches):
    demos = [dataclasses.replace(s, advantage=0.0) for s in put(arena, [bare(b, routing=False) for b in branches[:3]])]
    (micro_batches,) = ship(arena, demos, ranks=1, readers=3)
    one = stepper(make_tree(), ranks, arena)
    before = one.run(1, micro_batches, lr=0.5, warmup=True)
    after = one.run(2, micro_batches, lr=0.0, warmup=True)
    assert 0 < after["train/loss"] < before["train/loss"]
    retire(arena, demos, 1)
    arena.done([h for s in demos for h in s.handles], reader=2)


def test_a_truncated_sample_trains_its_first_tokens(make_tree, ranks, arena, branches):
    samples = [sample.truncated(sample.T - 3) for sample in put(arena, branches)]
    (micro_batches,) = ship(arena, samples, ranks=1)
    metrics = stepper(make_tree(), ranks, arena).run(1, micro_batches, lr=0.0)
    assert metrics["train/mismatch_kl"] <= 1e-6
    assert metrics["payload/routing_missing_fraction"] == 0.0
    retire(arena, samples, 1)
