"""What a dead orchestrator left is adopted or freed, each block once, over a real arena."""

import pytest

from shmrl.arena import Arena
from shmrl.orchestrator.adoption import adopt
from shmrl.orchestrator.shipped import ShippedStep, ShippedSteps
from shmrl.payload import Branch, encode, micro_batches_to_wire, read_tokens
from shmrl.types import MicroBatch
from shmrl.wire import pack
from tests.orchestrator.fakes import Client, tree


@pytest.fixture
def before(arena):
    """The attachment of the orchestrator that died."""
    return Arena.attach(arena.address)


def episode(arena, tag, branches=1, **meta):
    """The samples of one episode, as an env worker leaves them."""
    known = {"task": "train7", "reward": 0.5, "rewards": {"exact": 1.0}, "stop_reason": "stop", "version_start": 3}
    known |= {"version_end": 4, "logprobs_mode": "processed"} | meta
    known = {key: value for key, value in known.items() if value is not None}
    return [
        encode(arena, Branch([1, 2, 3], [0, 1, 1], [0.0, -0.5, -0.5], meta={**known, "branch": index}), tag)
        for index in range(branches)
    ]


def shipped(arena, path, samples):
    """Step 4, shipped with these samples to one rank."""
    steps = ShippedSteps(path / "steps")
    micros = micro_batches_to_wire([MicroBatch(tuple(samples))])
    message = pack({"kind": "step", "step": 4, "state": {}, "micro_batches": micros})
    steps.add(ShippedStep(4, "t", str(path), arena.address, {}, (message,)))
    arena.ship([handle for sample in samples for handle in sample.handles], readers=2, step=4)
    return steps


async def test_whole_groups_are_scored_shipped_steps_held_and_all_else_freed(arena, before, parts, tmp_path, worker):
    sent = episode(before, "t/a/0f-11/0") + episode(before, "t/a/0f-11/1")
    steps = shipped(before, tmp_path, sent)
    whole = [*episode(before, "t/a/0f-12/0", 2), *episode(before, "t/a/0f-12/1", reward=1.0)]
    with_worker = episode(worker, "t/b/0f-14.1/0") + episode(worker, "t/b/0f-14.1/1", reward=0.0)  # the reply was lost
    half = episode(before, "t/a/0f-15/1")
    others = [
        *episode(before, "t/a/0f-w3/0"),  # of a warm-up
        *episode(before, "t/held/0f-e4.0/0"),  # of an evaluation
        *[sample for i in range(2) for sample in episode(before, f"t/a/0f-13/{i}", reward=i, task=None)],
    ]
    foreign = episode(before, "other/a/0f-16/0")
    before.close()  # as its death would: its blocks are orphans

    p = parts(tree(tmp_path, sources=("a", "b"), max_off_policy_steps=1), [Client(worker), Client(worker)])
    assert await adopt(p.arenas, "t", p.sources, p.ledger, p.sink, steps) == 16
    held = p.ledger.open()
    kept = [*sent, *whole, *with_worker]
    assert set(held) == {sample.handles[0] for sample in kept}
    assert [held[sample.handles[0]].steps for sample in kept] == [{4}] * 2 + [set()] * 5
    assert {row["handle"] for row in arena.ls()} == {str(sample.handles[0]) for sample in [*kept, *foreign]}
    assert (arena.stats()["freed"], arena.stats()["orphaned"]) == (len(half) + len(others), len(foreign))

    scored = p.sink.cut(5).episodes
    assert [(one.source, one.group_id, one.result.reward, one.advantage, len(one.samples)) for one in scored] == [
        ("a", "0f-12", 0.5, -0.25, 2),
        ("a", "0f-12", 1.0, 0.25, 1),
        ("b", "0f-14.1", 0.5, 0.25, 1),
        ("b", "0f-14.1", 0.0, -0.25, 1),
    ]
    result = scored[0].result
    assert (result.task_id, result.rewards, result.stop_reason) == ("train7", {"exact": 1.0}, "stop")
    assert (result.version_start, result.version_end) == (3, 4)
    p.ledger.let_go(4)
    with Arena.attach(arena.address, reader=0) as rank:
        rank.done([sample.handles[0] for sample in sent])
    p.ledger.close()
    arena.discard("other")
    assert arena.stats()["blocks"] == 0


async def test_what_branches_share_is_adopted_with_them_and_freed_with_the_last(arena, before, parts, tmp_path, worker):
    prompts = [encode(before, Branch([7, 8], [0, 0], [0.0, 0.0]), f"t/a/{tag}") for tag in ("0f-1", "0f-1/0", "0f-2")]
    meta = {"task": "train7", "version_start": 3, "version_end": 4}
    samples = [
        encode(
            before, Branch([7, 8, 1], [0, 0, 1], [0, 0, -0.5], meta={**meta, "reward": float(i), "branch": branch}),
            f"t/a/0f-1/{i}", prefix=(prompts[branch], 2),
        )
        for i, branch in ((0, 0), (0, 1), (1, 0))
    ]  # fmt: skip
    before.close()
    p = parts(tree(tmp_path, batch_size=2, max_off_policy_steps=1), [Client(worker)])
    assert await adopt(p.arenas, "t", p.sources, p.ledger, p.sink, ShippedSteps(tmp_path / "steps")) == 2
    assert set(p.ledger.open()) == {handle for sample in samples for handle in sample.handles}
    assert (arena.stats()["blocks"], arena.stats()["freed"]) == (5, 1)  # the prompt of nobody is gone
    first, second = p.sink.cut(5).episodes
    assert (len(first.samples), len(second.samples)) == (2, 1)
    p.ledger.release(first.samples)
    assert len(read_tokens(arena, second.samples[0])) == 3
    p.ledger.release(second.samples)
    assert (arena.stats()["blocks"], arena.stats()["freed"]) == (0, 6)


async def test_a_group_that_loses_a_block_is_freed_whole(arena, before, parts, tmp_path, worker, monkeypatch):
    samples = episode(before, "t/a/0f-2/0") + episode(before, "t/a/0f-2/1")
    before.close()
    p = parts(tree(tmp_path), [Client(worker)])
    adopted = Arena.adopt

    def losing(self, handles):
        if samples[1].handles[0] in handles:
            arena.discard("t/a/0f-2/1")
        adopted(self, handles)

    monkeypatch.setattr(Arena, "adopt", losing)
    assert await adopt(p.arenas, "t", p.sources, p.ledger, p.sink, ShippedSteps(tmp_path / "steps")) == 3
    assert (p.sink.pending, p.ledger.open(), arena.stats()["blocks"]) == (0, {}, 0)
