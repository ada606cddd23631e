"""Arrays through two page-locked buffers: none is overwritten before it was copied, none used before it arrived.

There is no GPU here. The device is one that copies as late as it may, so that a wait that is missing shows in the data;
everything but the calls of CUDA itself is what runs there.
"""

import numpy as np
import pytest
import torch

from shmrl.trainer.losses import LossOutput
from shmrl.trainer.models import load_policy
from shmrl.trainer.parallel import Ranks
from shmrl.trainer.step import Stepper
from shmrl.trainer.transfer import ALIGNMENT, Transfer
from tests.trainer.samples import put, retire, ship


class Copy:
    """One copy, and its end; it happens when somebody waits for it."""

    def __init__(self, device, number, host):
        self.device, self.number, self.host = device, number, host
        self.there = torch.full_like(host, 0xDD)

    def happen(self):
        self.there.copy_(self.host)

    def synchronize(self):
        self.device.events.append(f"host waits for {self.number}")
        self.happen()


class LateDevice:
    """Copies when the host waits for it; with `compute`, also when what computes waits."""

    def __init__(self, compute):
        self.compute, self.events, self.copies = compute, [], []

    def buffer(self, nbytes):
        self.events.append(f"buffer of {nbytes}")
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def copy(self, host):
        self.copies.append(Copy(self, len(self.copies), host))
        self.events.append(f"copy {self.copies[-1].number}")
        return self.copies[-1].there, self.copies[-1]

    def join(self, there, arrived):
        assert there is arrived.there
        self.events.append(f"compute waits for {arrived.number}")
        if self.compute:
            arrived.happen()


def arrays(seed, rows):
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 1 << 40, (2, rows)),
        "loss_mask": rng.random(rows) < 0.5,
        "logprobs": rng.random((rows, 3), np.float32)[:, :2],  # not contiguous
        "routes": rng.integers(-1, 120, (rows, 4, 2)).astype(np.int8),
        "none": np.zeros((0, 5), np.int64),
    }


def test_late_copies_carry_what_was_sent():
    device = LateDevice(compute=False)
    transfer, sent, received = Transfer(device), [], []
    for seed, rows in enumerate((9, 400, 30, 31, 401, 8)):
        batch = arrays(seed, rows)
        sent.append({name: array.copy() for name, array in batch.items()})
        received.append(transfer.send(batch))
        for array in batch.values():
            array[...] = 1
    for copy in device.copies[-2:]:  # nobody needed these buffers again
        copy.happen()
    for wanted, tensors in zip(sent, received, strict=True):
        assert {name: tensor.numpy().dtype for name, tensor in tensors.items()} == {
            name: array.dtype for name, array in wanted.items()
        }
        assert all(np.array_equal(tensors[name].numpy(), array) for name, array in wanted.items())
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in tensors.values())


def test_the_host_waits_only_for_the_copy_out_of_the_buffer_it_fills():
    device = LateDevice(compute=False)
    transfer = Transfer(device)
    for size in (ALIGNMENT, 3 * ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT):
        transfer.send({"a": np.zeros(size - 1, np.uint8)})
    assert device.events == [
        *("buffer of 256", "copy 0", "compute waits for 0"),
        *("buffer of 768", "copy 1", "compute waits for 1"),
        *("host waits for 0", "buffer of 512", "copy 2", "compute waits for 2"),
        *("host waits for 1", "copy 3", "compute waits for 3"),
    ]


def noted(x, name):
    EVENTS[name].append(f"loss of {x.micro_batch}")
    return LossOutput(-(x.advantages * x.logprobs).sum(), torch.zeros_like(x.logprobs, dtype=torch.bool))


EVENTS = {}


@pytest.fixture
def one_step(make_tree, arena, branches, monkeypatch):
    """one_step(name, sender): (metrics, weights) after a step whose events go to EVENTS[name]."""
    ranks, samples = Ranks("cpu"), put(arena, branches)
    (micro_batches,) = ship(arena, samples, ranks=1, readers=3)

    def run(name, sender=None):
        if sender is not None:
            monkeypatch.setattr("shmrl.trainer.inputs.sender", sender)
        tree = make_tree(loss={"kind": "custom", "path": f"{__name__}:noted", "args": {"name": name}})
        policy = load_policy(tree, tree.initial_weights, ranks.device)
        one = Stepper(tree, ranks, arena, policy, policy, torch.optim.SGD(policy.parameters(), lr=0.0))
        metrics = one.run(1, micro_batches, lr=0.5)
        return metrics, policy.state_dict()

    yield run
    ranks.close()
    retire(arena, samples, 1)
    arena.done([h for s in samples for h in s.handles], reader=2)


def test_a_step_sends_a_micro_batch_when_the_one_before_it_is_launched(one_step):
    device = LateDevice(compute=True)
    EVENTS.update(late=device.events, plain=[])
    metrics, weights = one_step("plain")
    late_metrics, late_weights = one_step("late", lambda _: Transfer(device).send)
    assert all(torch.equal(late_weights[name], weights[name]) for name in weights)
    for name in ("train/loss", "train/mismatch_kl", "train/entropy", "train/grad_norm"):
        assert late_metrics[name] == metrics[name], name
    events = [event for event in device.events if not event.startswith("buffer")]
    count = len(EVENTS["plain"])
    assert count >= 3
    for index in range(count):
        waits = [f"host waits for {index - 2}"] if index >= 2 else []
        step = [*waits, f"copy {index}", f"compute waits for {index}", f"loss of {index}"]
        assert [events.pop(0) for _ in step] == step
    assert events == []
