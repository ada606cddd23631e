"""Losses by value, score centering by its two exact properties, custom losses by path."""

import math

import pytest
import torch

from shmrl.config import Loss
from shmrl.errors import ConfigError, RunError
from shmrl.trainer.logprobs import token_logprobs
from shmrl.trainer.losses import LossInputs, LossOutput, _repeated, make_loss, mismatch_kl, supervised
from tests.trainer.test_logprobs import exact


def inputs(ratios, advantages, **more):
    """LossInputs whose trainer/sampler ratios are `ratios`, at sampler log-probability -1."""
    d = torch.tensor([math.log(r) for r in ratios])
    logprobs = (d - 1.0).requires_grad_()
    advantage = torch.tensor(advantages)
    zeros = torch.zeros(len(ratios))
    return LossInputs(logprobs, zeros - 1.0, advantage, zeros, torch.arange(len(ratios)), **more)


def gradient(loss, x):
    out = loss(x)
    x.logprobs.grad = None
    out.loss.backward()
    return out, x.logprobs.grad.tolist()


def test_icepop_drops_ratios_outside_its_band():
    x = inputs([1.0, 0.19, 0.21, 4.9, 5.1], [1.0, 1.0, 2.0, -1.0, 1.0])
    out, grad = gradient(make_loss(Loss(kind="icepop", alpha=0.2, beta=5.0)), x)
    assert out.masked.tolist() == [False, True, False, False, True]
    assert out.loss.item() == pytest.approx(-(1.0 + 2 * 0.21 - 4.9), abs=1e-5)
    assert grad == pytest.approx([-1.0, 0.0, -0.42, 4.9, 0.0], abs=1e-5)


@pytest.mark.parametrize("kind", ["icepop", "ipo"])
def test_bands_survive_extreme_ratios(kind):
    x = inputs([1e-30, 1e30], [1.0, 1.0])
    out, grad = gradient(make_loss(Loss(kind=kind)), x)
    assert (out.loss.item(), grad) == (0.0, [0.0, 0.0])


def test_ipo_drops_tokens_whose_probability_moved_further_than_eps():
    """The sampler's probability is 1/e: 0.1 of it is the ratio 1.27 and 0.73."""
    x = inputs([1.0, 1.26, 1.28, 0.74, 0.72], [1.0, 1.0, 2.0, -1.0, 1.0])
    out, grad = gradient(make_loss(Loss(kind="ipo", eps=0.1)), x)
    assert out.masked.tolist() == [False, False, True, False, True]
    assert out.loss.item() == pytest.approx(-(1.0 + 1.26 - 0.74), abs=1e-5)
    assert grad == pytest.approx([-1.0, -1.26, 0.0, 0.74, 0.0], abs=1e-5)


def test_cispo_clips_a_detached_weight():
    x = inputs([0.5, 1.0, 2.0], [1.0, -1.0, 1.0])
    out, grad = gradient(make_loss(Loss(kind="cispo", clip_low=0.2, clip_high=0.28)), x)
    assert grad == pytest.approx([-0.8, 1.0, -1.28], abs=1e-6)
    logp = [math.log(0.5) - 1, -1.0, math.log(2.0) - 1]
    assert out.loss.item() == pytest.approx(-0.8 * logp[0] + logp[1] - 1.28 * logp[2], abs=1e-5)


def test_ppo_clips_the_surrogate():
    x = inputs([0.5, 1.5, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0])
    out, grad = gradient(make_loss(Loss(kind="ppo", clip_low=0.2, clip_high=0.28)), x)
    assert out.masked.tolist() == [False, True, True, False]
    assert out.loss.item() == pytest.approx(-0.5 - 1.28 + 0.8 + 1.5, abs=1e-5)
    assert grad == pytest.approx([-0.5, 0.0, 0.0, 1.5], abs=1e-5)


def test_mismatch_kl_is_exact_near_one():
    kl = mismatch_kl(torch.tensor([-1.0, -1.0 + 1e-4]), torch.tensor([-1.0 - math.log(2), -1.0]))
    assert kl[0].item() == pytest.approx(2 - math.log(2) - 1, abs=1e-6)
    assert kl[1].item() == pytest.approx(0.5e-8, rel=0.01)


def test_supervised_is_cross_entropy():
    out, grad = gradient(supervised, inputs([1.0, 1.0], [1.0, 1.0]))
    assert out.loss.item() == pytest.approx(2.0)
    assert grad == [-1.0, -1.0]


# ------------------------------------------------------------------------------------------------------ score centering


def logit_gradient(logits, q, label, head, advantage, loss):
    """d loss / d logits of one token whose sampler had probabilities `q` [V]; `head`: captured ids."""
    hidden, weight = exact([logits])
    weight.requires_grad_()
    head_ids = torch.tensor([head])
    out = token_logprobs(hidden, weight, torch.tensor([label]), head_ids=head_ids)
    log_q = torch.tensor(q, dtype=torch.float32).log()
    x = LossInputs(
        out.label,
        log_q[None, label],
        torch.tensor([advantage]),
        out.entropy,
        torch.tensor([1]),
        head_ids=head_ids,
        head_logprobs=out.head,
        sampler_head_logprobs=log_q[head_ids],
    )
    result = loss(x)
    result.loss.backward()
    return result.loss.item(), weight.grad[:, 0]


P = torch.tensor([0.4, 0.3, 0.2, 0.1])
Q = [0.1, 0.2, 0.3, 0.4]


def test_centering_vanishes_where_sampler_and_trainer_agree():
    plain, centered = make_loss(Loss()), make_loss(Loss(score_centering=True))
    a = logit_gradient(P.log().tolist(), P.tolist(), 1, [0, 2], 0.7, plain)
    b = logit_gradient(P.log().tolist(), P.tolist(), 1, [0, 2], 0.7, centered)
    assert b[0] == pytest.approx(a[0])
    assert torch.allclose(a[1], b[1], atol=1e-6)


def test_centering_over_the_whole_vocabulary_is_the_exact_expectation():
    """Averaged over the sampler, a centered gradient is zero for every loss."""
    for kind in ("icepop", "cispo", "ppo"):
        loss = make_loss(Loss(kind=kind, alpha=0.5, beta=2.0, score_centering=True))
        mean = sum(Q[a] * logit_gradient(P.log().tolist(), Q, a, [0, 1, 2, 3], 1.0, loss)[1] for a in range(4))
        assert mean.abs().max() < 1e-6, kind


def test_centering_with_a_head_takes_the_formulas_value():
    """Weight 1 (cispo without room): sum over the head of c_v grad log p_v, c_v = q_v - (q_T / p_T) p_v."""
    loss = make_loss(Loss(kind="cispo", clip_low=0.0, clip_high=0.0, score_centering=True))
    _, got = logit_gradient(P.log().tolist(), Q, 3, [0, 1], 1.0, loss)
    c = torch.tensor([0.1 - 0.7 / 0.3 * 0.4, 0.2 - 0.7 / 0.3 * 0.3, 0.0, 0.0])
    one_hot = torch.eye(4)
    wanted = -(one_hot[3] - P) + (c[:, None] * (one_hot - P)).sum(0)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_a_repeated_head_id_counts_once():
    loss = make_loss(Loss(score_centering=True))
    once = logit_gradient(P.log().tolist(), Q, 3, [0, 1], 1.0, loss)[1]
    twice = logit_gradient(P.log().tolist(), Q, 3, [0, 1, 0], 1.0, loss)[1]
    assert torch.allclose(once, twice, atol=1e-7)


def test_each_row_of_a_head_knows_its_own_repeats():
    ids = torch.randint(0, 6, (50, 8), generator=torch.Generator().manual_seed(0))
    wanted = [[id_ in row[:at] for at, id_ in enumerate(row)] for row in ids.tolist()]
    assert _repeated(ids).tolist() == wanted


def test_centering_without_a_head_is_an_error():
    with pytest.raises(RunError, match="a micro batch with 1 loss tokens has no head"):
        make_loss(Loss(score_centering=True))(inputs([1.0], [1.0]))


# --------------------------------------------------------------------------------------------------------------- custom


def double(x, factor):
    return LossOutput(-factor * (x.logprobs * x.advantages).sum(), torch.zeros(len(x.logprobs), dtype=torch.bool))


def wrong_shape(x):
    return LossOutput(-x.logprobs, torch.zeros(1, dtype=torch.bool))


def test_a_custom_loss_by_import_path():
    loss = make_loss(Loss(kind="custom", path="tests.trainer.test_losses:double", args={"factor": 2.0}))
    assert gradient(loss, inputs([1.0], [3.0]))[1] == [-6.0]


def test_a_custom_loss_that_is_not_there_or_answers_nonsense():
    with pytest.raises(ConfigError, match=r"trainer\.loss\.path = 'tests\.trainer\.test_losses:missing'"):
        make_loss(Loss(kind="custom", path="tests.trainer.test_losses:missing"))
    with pytest.raises(RunError, match=r"must return LossOutput\(scalar loss, masked bool \[2\]\)"):
        make_loss(Loss(kind="custom", path="tests.trainer.test_losses:wrong_shape"))(inputs([1.0, 1.0], [1.0, 1.0]))
