"""Chunked log-probabilities against the full log_softmax: values, gradients, and the memory they take."""

import json
import os
import subprocess
import sys

import pytest
import torch

from shmrl.config.training import Trainer
from shmrl.trainer.logprobs import KeptSets, token_logprobs


def exact(values):
    """(hidden, weight) whose product is `values` [S, V]: the identity as hidden states."""
    values = torch.tensor(values, dtype=torch.float32)
    return torch.eye(len(values)), values.t().contiguous()


def test_reference_values():
    hidden, weight = exact([[2.0, 1.0, 0.0, -1.0]] * 2)
    kept = KeptSets(torch.tensor([0, 1]), torch.tensor([2, 0]))
    out = token_logprobs(hidden, weight, torch.tensor([0, 0]), kept=kept)
    assert out.label.tolist() == pytest.approx([-0.313262, -0.440190], abs=1e-6)
    assert (out.label[1] - out.label[0]).exp().item() == pytest.approx(0.880797, abs=1e-6)
    assert out.head.shape == (2, 0)


def test_temperature_scales_logits_and_entropy():
    hidden, weight = exact([[0.6, 0.0], [0.6, 0.0]])
    out = token_logprobs(hidden, weight, torch.tensor([0, 0]), temperature=torch.tensor([1.0, 0.6]))
    assert out.label.tolist() == pytest.approx([-0.437488, -0.313262], abs=1e-6)
    p = torch.tensor([0.731059, 0.268941])
    assert out.entropy[1].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)


def full(hidden, weight, picks, kept_rows, temperature):
    logits = hidden @ weight.t() / temperature[:, None]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    for row, kept in enumerate(kept_rows):
        if kept:
            outside = torch.ones(weight.shape[0], dtype=torch.bool)
            outside[kept] = False
            logits = logits.masked_fill(outside & (torch.arange(len(logits)) == row)[:, None], -torch.inf)
    return logits.log_softmax(-1).gather(1, picks), entropy


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_values_and_gradients_equal_the_full_version(chunk):
    generator = torch.Generator().manual_seed(0)
    S, D, V, K = 9, 8, 31, 5
    hidden = torch.randn(S, D, generator=generator, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, requires_grad=True)
    labels = torch.randint(V, (S,), generator=generator)
    head_ids = torch.randint(V, (S, K), generator=generator)
    head_ids[:, 0] = labels  # the sampled token stands in the head too
    temperature = torch.linspace(0.5, 1.5, S)
    kept_rows = [sorted({int(labels[i]), int(head_ids[i, 1]), 3, 7}) if i % 3 else [] for i in range(S)]
    kept_rows[1] += kept_rows[1][:1]  # one id listed twice
    kept = KeptSets(
        torch.tensor([id for row in kept_rows for id in row]), torch.tensor([len(row) for row in kept_rows])
    )
    upstream = torch.randn(S, 1 + K, generator=generator)

    picks = torch.cat([labels[:, None], head_ids], 1)
    wanted, entropy = full(hidden, weight, picks, kept_rows, temperature)
    finite = wanted.isfinite()
    (torch.where(finite, wanted, 0.0) * upstream).sum().backward()
    grads = hidden.grad.clone(), weight.grad.clone()

    hidden.grad = weight.grad = None
    out = token_logprobs(hidden, weight, labels, head_ids=head_ids, kept=kept, temperature=temperature, chunk=chunk)
    got = torch.cat([out.label[:, None], out.head], 1)
    assert torch.equal(got.isfinite(), finite)
    assert (got - wanted)[finite].abs().max() < 1e-5
    assert (out.entropy - entropy).abs().max() < 1e-5
    assert not out.entropy.requires_grad
    (torch.where(finite, got, 0.0) * upstream).sum().backward()
    assert (hidden.grad - grads[0]).abs().max() < 1e-5
    assert (weight.grad - grads[1]).abs().max() < 1e-5


def test_no_loss_token_gives_zero_gradients():
    hidden = torch.randn(0, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    out = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    out.label.sum().backward()
    assert out.label.shape == (0,)
    assert weight.grad.tolist() == torch.zeros(6, 4).tolist()


def test_bfloat16_hidden_states_with_float32_weights():
    hidden = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    out = token_logprobs(hidden, weight, torch.arange(5), chunk=2)
    out.label.sum().backward()
    assert out.label.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    plain = (hidden.float() @ weight.t()).log_softmax(-1)[torch.arange(5), torch.arange(5)]
    assert (out.label - plain).abs().max() < 0.1


def extra_peaks(*cases):
    """MiB that forward and backward add to their inputs for every (tokens, vocab, chunk), in a process of its own."""
    command = [sys.executable, "-m", "tests.trainer.loss_memory", json.dumps(cases)]
    # every tensor in a mapping of its own: what is freed leaves the resident set at once, so the peak is what is alive
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)
    return json.loads(done.stdout)


def test_memory_grows_with_the_chunk_and_not_with_tokens_x_vocabulary():
    bar, short, long, wide = extra_peaks(
        (4096, 32768, Trainer().logprob_chunk), (512, 8192, 128), (2048, 8192, 128), (512, 8192, 512)
    )
    assert 4096 * 32768 * 4 / 2**20 == 512  # a single [tokens, vocab] would not fit
    assert bar <= 200
    assert long < 1.1 * short
    assert wide > 2 * short
