"""A step whose blocks are in the arenas of two nodes trains what the same step in one arena trains, to the last bit."""

import dataclasses
import threading

import pytest
import torch

from shmrl import Arena
from shmrl.config import NodeConfig
from shmrl.errors import RunError
from shmrl.node.server import NodeServer
from shmrl.payload import micro_batches_from_wire, micro_batches_to_wire, pack
from shmrl.trainer.models import load_policy
from shmrl.trainer.parallel import Ranks
from shmrl.trainer.step import Stepper
from tests.trainer.samples import put, retire, ship

TOKEN = "ab" * 16


@pytest.fixture
def ranks():
    ranks = Ranks("cpu")
    yield ranks
    ranks.close()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The arena of another node, and its server."""
    monkeypatch.setenv("SHMRL_TOKEN", TOKEN)
    with Arena.create("64MiB", backing="file", base=str(tmp_path)) as arena, NodeServer(arena, TOKEN) as server:
        yield arena, server
        arena.unlink()


def step(tree, ranks, arena, micro_batches, nodes=None):
    """(metrics, weights after the step) of a fresh policy."""
    policy = load_policy(tree, tree.initial_weights, ranks.device)
    stepper = Stepper(tree, ranks, arena, policy, policy, torch.optim.SGD(policy.parameters(), lr=0.5))
    try:
        metrics = stepper.run(1, micro_batches, lr=0.5, nodes=nodes)
    finally:
        stepper.close()
    return metrics, [parameter.detach().clone() for parameter in policy.parameters()]


@pytest.mark.parametrize("served", [True, False])
def test_two_arenas_train_the_same_bytes_as_one(make_tree, ranks, arena, elsewhere, branches, served):
    tree, (there, server) = make_tree(), elsewhere
    samples = put(arena, branches)
    (local,) = ship(arena, samples, ranks=1)
    expected, weights = step(tree, ranks, arena, local)
    retire(arena, samples, 1)
    assert arena.stats()["blocks"] == 0
    index = {sample.handles[0]: number for number, sample in enumerate(samples)}

    samples = [*put(arena, branches[::2]), *put(there, branches[1::2])]
    samples = [sample for pair in zip(samples[:6], samples[6:], strict=True) for sample in pair]
    samples = [dataclasses.replace(s, advantage=sign(i)) for i, s in enumerate(samples)]
    for place in (arena, there):
        place.ship([h for s in samples for h in s.handles if h.origin == place.origin], readers=2, step=1)
    mixed = [
        dataclasses.replace(micro, samples=tuple(samples[index[one.handles[0]]] for one in micro.samples))
        for micro in local  # else packed by node, and summed in another order
    ]
    mixed = micro_batches_from_wire(micro_batches_to_wire(mixed))
    with NodeServer(arena, TOKEN) as own:
        if served:
            tree = tree.model_copy(update={"node": NodeConfig(address=own.url.removeprefix("http://"))})
        metrics, moved = step(tree, ranks, arena, mixed, {there.origin: server.url})
        assert own.counters["fetched"] == (6 if served else 0)
    assert metrics["payload/bytes"] == expected["payload/bytes"]
    assert metrics["train/loss"] == expected["train/loss"]
    assert all(torch.equal(a, b) for a, b in zip(moved, weights, strict=True))
    assert server.counters["sent_bytes"] == sum(s.handles[0].nbytes for s in samples[1::2])
    assert (arena.stats()["blocks"], there.stats()["blocks"]) == (6, 6)  # the ledger's
    retire(arena, samples[::2], 1)
    retire(there, samples[1::2], 1)
    assert (arena.stats()["blocks"], there.stats()["blocks"]) == (0, 0)
    for place in (arena, there):  # copies, too
        stats = place.stats(exact=True)
        assert stats["created"] == stats["freed"] > 0


def sign(index):
    return (-1.0) ** index * (1 + index / 8)


def test_a_block_lost_on_another_node_drops_its_micro_batch(make_tree, ranks, arena, elsewhere, branches):
    there, server = elsewhere
    samples = put(there, branches)
    (micro_batches,) = ship(there, samples, ranks=1)
    there.free(samples[0].handles)
    lost = next(mb for mb in micro_batches if samples[0].handles[0] in mb.handles)
    metrics, _ = step(make_tree(), ranks, arena, micro_batches, {there.origin: server.url})
    assert metrics["payload/dropped_micro_batches"] == 1.0
    kept = sum(s.T for mb in micro_batches if mb is not lost for s in mb.samples)
    assert metrics["train/tokens_per_s"] * metrics["time/train"] == pytest.approx(kept)
    assert arena.stats()["blocks"] == 0
    retire(there, samples[1:], 1)
    assert there.stats()["blocks"] == 0


def test_a_lost_node_costs_its_own_samples_alone(make_tree, ranks, arena, elsewhere, branches):
    """Also in a step that one micro batch could hold, of which nothing would be left then."""
    there, _ = elsewhere
    here, theirs = put(arena, branches[:3]), put(there, branches[3:6])
    for place, samples in ((arena, here), (there, theirs)):
        place.ship([handle for sample in samples for handle in sample.handles], readers=2, step=1)
    (micro_batches,) = pack([*here, *theirs], seq_len=4096, num_ranks=1)
    metrics, _ = step(make_tree(), ranks, arena, micro_batches, {there.origin: ""})
    assert metrics["payload/dropped_micro_batches"] == 1.0
    assert metrics["train/tokens_per_s"] * metrics["time/train"] == pytest.approx(sum(sample.T for sample in here))
    retire(arena, here, 1)
    assert arena.stats()["blocks"] == 0


def test_required_shared_memory_refuses_a_remote_reader(make_tree, ranks, arena, elsewhere, branches):
    tree, (there, server) = make_tree(), elsewhere
    (micro_batches,) = ship(there, put(there, branches[:2]), ranks=1)
    required = tree.model_copy(update={"arena": tree.arena.model_copy(update={"transport": "required"})})
    with pytest.raises(RunError, match=r"arena\.transport = 'required' allows shared memory alone"):
        step(required, ranks, arena, micro_batches, {there.origin: server.url})
    with pytest.raises(RunError, match="no node server is known for it"):
        step(tree, ranks, arena, micro_batches)
    assert server.counters["requests"] == 0


def test_a_step_of_one_node_starts_no_thread_and_needs_no_token(make_tree, ranks, arena, branches, monkeypatch):
    monkeypatch.delenv("SHMRL_TOKEN", raising=False)
    samples = put(arena, branches[:2])
    (micro_batches,) = ship(arena, samples, ranks=1)
    before = {thread.name for thread in threading.enumerate()}
    step(make_tree(), ranks, arena, micro_batches)
    assert {thread.name for thread in threading.enumerate()} - before == set()
    retire(arena, samples, 1)
