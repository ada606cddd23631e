"""Scoring, pruning, staleness, batches, evaluations; blocks are freed exactly where they should be."""

from contextlib import nullcontext

import pytest

from shmrl.errors import RunError
from shmrl.orchestrator.sinks import EvalSink, Group, pass_at
from shmrl.types import EpisodeResult, ErrorInfo, Sample, Task
from tests.orchestrator.conftest import collect, finish
from tests.orchestrator.fakes import Client, sample, source, tree


async def group_of(parts, worker, rewards, *, version=0, number=0, T=10, S=6):
    """A finished group whose blocks the ledger holds."""
    results = []
    for i, reward in enumerate(rewards):
        made = (sample(worker, f"t/a/a-{number}/{i}", T=T, S=S, version=version),)
        await parts.ledger.adopt(made, f"t/a/a-{number}/{i}")
        results.append(EpisodeResult(True, f"task{number}", reward=reward, samples=made, version_start=version))
    return Group(parts.sources[0], f"a-{number}", number, Task(f"task{number}", {}), len(rewards), results)


async def test_advantages_reach_every_branch_and_zero_ones_are_released(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, batch_size=5, group_size=5), [Client(worker)])
    group = await group_of(p, worker, [1.0, 0.0, 0.5, 0.5, 0.5])
    two = sample(worker, "t/a/a-0/0")
    await p.ledger.adopt([two], "t/a/a-0/0")
    group.results[0] = EpisodeResult(True, "task0", reward=1.0, samples=(*group.results[0].samples, two))
    p.sink.add(group)
    assert arena.stats()["blocks"] == 3
    batch = p.sink.cut(1)
    assert [(s.advantage, s.weight) for s in batch.samples] == [(0.5, 1.0), (0.5, 1.0), (-0.5, 1.0)]
    assert (len(batch.episodes), len(batch.kept)) == (5, 2)
    p.sink.shipped(batch)
    assert {k: v for k, v in p.episodes.take_counts().items() if v} == {"shipped": 2, "filtered": 3}
    p.ledger.release(batch.samples)
    assert arena.stats()["blocks"] == 0


async def test_a_group_of_equal_rewards_leaves_nothing_and_a_batch_of_them_is_skipped(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, batch_size=2, group_size=2), [Client(worker)])
    p.sink.add(await group_of(p, worker, [0.3, 0.3]))
    assert arena.stats()["blocks"] == 0
    assert p.sink.pending == 2
    assert p.sink.cut(1) is None
    assert p.sink.pending == 0
    for number in range(1, 9):
        p.sink.add(await group_of(p, worker, [0.3, 0.3], number=number))
    with pytest.raises(RunError, match=r"20 episodes in a row had nothing to train.*the last reward: 0\.3"):
        p.sink.add(await group_of(p, worker, [0.3, 0.3], number=9))


async def test_a_run_whose_episodes_sample_nothing_says_so(tmp_path, worker, parts):
    p = parts(tree(tmp_path, batch_size=2, group_size=2, filters={"zero_advantage": False}), [Client(worker)])
    empty = [EpisodeResult(True, "task0", reward=reward) for reward in (0.0, 1.0)]
    groups = [Group(p.sources[0], f"a-{number}", number, Task("task0", {}), 2, list(empty)) for number in range(10)]
    for group in groups[:9]:
        p.sink.add(group)
    with pytest.raises(RunError, match=r"20 episodes in a row had nothing to train: nothing was sampled in them"):
        p.sink.add(groups[9])


async def test_without_the_filter_zero_advantages_ship(tmp_path, worker, parts):
    p = parts(tree(tmp_path, batch_size=2, group_size=2, filters={"zero_advantage": False}), [Client(worker)])
    p.sink.add(await group_of(p, worker, [0.3, 0.3]))
    batch = p.sink.cut(1)
    assert [s.advantage for s in batch.samples] == [0.0, 0.0]
    p.ledger.release(batch.samples)


async def test_advantages_inside_the_range_are_released(tmp_path, arena, worker, parts):
    filters = {"advantage_range": [-0.5, 0.25]}
    p = parts(tree(tmp_path, batch_size=4, group_size=4, filters=filters), [Client(worker)])
    p.sink.add(await group_of(p, worker, [1.0, 0.75, 0.25, 0.0]))  # advantages 0.5, 0.25, -0.25, -0.5
    assert arena.stats()["blocks"] == 1
    batch = p.sink.cut(1)
    assert [s.advantage for s in batch.samples] == [0.5]
    assert p.episodes.take_counts()["filtered"] == 3
    p.ledger.release(batch.samples)


async def test_tasks_that_are_too_easy_or_too_hard_by_all_their_rewards_are_released(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, batch_size=2, group_size=2, filters={"difficulty": [0.25, 0.75]}), [Client(worker)])

    async def trained(rewards, number):
        p.sink.add(await group_of(p, worker, rewards, number=number))
        batch = p.sink.cut(1)
        p.ledger.release(batch.samples if batch else [])
        assert arena.stats()["blocks"] == 0
        return batch is not None

    assert await trained([1.0, 0.0], 0)
    assert await trained([1.0, 0.9], 0)  # on the edge: (1 + 0 + 1 + 0.9) / 4 = 0.725
    assert not await trained([1.0, 0.9], 0)  # 4.8 / 6
    assert not await trained([0.4, 0.0], 1)
    assert await trained([1.0, 0.0], 1)  # 1.4 / 4


@pytest.mark.parametrize(("step", "shipped"), [(8, 2), (9, 0)])
async def test_lag_is_counted_from_the_first_token_when_it_ships(tmp_path, arena, worker, parts, step, shipped):
    """Generated at version 5: step 8 trains version 7 (lag 2, allowed), step 9 version 8 (lag 3, voided)."""
    p = parts(tree(tmp_path, batch_size=2, group_size=2, max_off_policy_steps=2), [Client(worker)])
    p.sink.add(await group_of(p, worker, [1.0, 0.0], version=5))
    batch = p.sink.cut(step)
    assert len(batch.samples if batch else []) == shipped
    assert p.episodes.take_counts()["stale"] == 2 - shipped
    assert arena.stats()["blocks"] == shipped
    p.ledger.release(batch.samples if batch else [])


async def test_a_batch_by_tokens_is_cut_when_they_are_together(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, token_batch_size=50, group_size=2, max_inflight=8), [Client(worker)])
    assert p.sink.weight(2) == 128.0  # nothing seen yet: seq_len each
    for number in range(2):
        p.sink.add(await group_of(p, worker, [1.0, 0.0], number=number))
    assert (p.sink.pending, p.sink.cut(1)) == (40, None)
    assert p.sink.weight(3) == 30.0
    p.sink.add(await group_of(p, worker, [1.0, 0.0, 0.5], number=2))
    p.sink.add(await group_of(p, worker, [1.0, 0.0], number=3))
    batch = p.sink.cut(1)
    assert sum(s.T for s in batch.samples) == 60
    assert p.sink.pending == 20
    p.sink.close()
    p.ledger.release(batch.samples)
    assert arena.stats()["blocks"] == 0


async def test_what_is_too_long_is_cut_by_count(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, batch_size=2, group_size=2, seq_len=16), [Client(worker)])
    p.sink.add(await group_of(p, worker, [1.0, 0.0], T=20, S=12))
    batch = p.sink.cut(1)
    assert [(s.T, s.S) for s in batch.samples] == [(16, 8), (16, 8)]
    p.ledger.release(batch.samples)


async def test_what_is_cut_away_and_what_has_nothing_left_to_train_is_given_back(tmp_path, arena, worker, parts):
    """Prompts of 20 tokens where 16 fit; and a block of rows that all lie behind the cut."""
    p = parts(tree(tmp_path, batch_size=2, group_size=2, seq_len=16), [Client(worker)])
    p.sink.add(await group_of(p, worker, [1.0, 0.0], T=30, S=10))
    assert arena.stats()["blocks"] == 0
    assert p.episodes.take_counts()["filtered"] == 2
    assert p.sink.cut(1) is None
    group = await group_of(p, worker, [1.0, 0.0], T=18, S=8, number=1)
    longer = sample(worker, "t/a/a-1/0", T=24, S=14, prefix=(group.results[0].samples[0], 16))
    await p.ledger.adopt([longer], "t/a/a-1/0")
    group.results[0] = EpisodeResult(True, "task1", reward=1.0, samples=(*group.results[0].samples, longer))
    p.sink.add(group)
    batch = p.sink.cut(1)
    assert [(s.T, s.S, len(s.handles)) for s in batch.samples] == [(16, 6, 1), (16, 6, 1), (16, 6, 1)]
    assert arena.stats()["blocks"] == 2
    p.ledger.release(batch.samples)
    assert arena.stats()["blocks"] == 0


async def test_a_sample_without_sampled_tokens_is_released(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, batch_size=2, group_size=2), [Client(worker)])
    p.sink.add(await group_of(p, worker, [1.0, 0.0], S=0))
    assert arena.stats()["blocks"] == 0
    assert p.episodes.take_counts()["filtered"] == 2


@pytest.mark.parametrize(
    ("sampling", "fields", "missing"),
    [
        ({"top_p": 0.95, "top_k": 64}, ("routing",), "mask"),
        ({"top_p": 1.0, "top_k": -1}, ("routing",), None),
        ({"top_p": 1.0, "top_k": -1}, (), "routing"),
    ],
)
def test_a_field_the_trainer_replays_must_be_there_in_the_first_group(
    tmp_path, worker, parts, sampling, fields, missing
):
    sources = [
        {"name": "a", "sampling": sampling | {"max_tokens": 8}},
        {"name": "b", "sampling": {"top_k": 8, "max_tokens": 8}},
    ]
    run = tree(tmp_path, sources=sources, batch_size=2)
    trainer = run.trainer.model_copy(update={"router_replay": True, "sampling_replay": True})
    p = parts(run.model_copy(update={"trainer": trainer}), [Client(worker), Client(worker)])
    result = EpisodeResult(True, "t", samples=(Sample((), T=10, S=6, R=9, fields=fields),))
    said = pytest.raises(RunError, match=f"source 'a': a sample of task t .T = 10, S = 6. came without {missing}")
    with said if missing else nullcontext():
        p.sink._require_fields(p.sources[0], result)


def test_pass_at_k_is_the_unbiased_estimate():
    assert pass_at(1, [1.0, 0.0, 0.0, 0.0]) == 0.25
    assert pass_at(2, [1.0, 1.0, 0.0, 0.0]) == pytest.approx(1 - 1 / 6)
    assert pass_at(4, [0.0, 0.0, 0.0, 1.0]) == 1.0
    assert pass_at(2, [0.99, 0.0]) == 0.0


async def test_an_evaluation_keeps_scores_and_releases_every_block(tmp_path, arena, worker, parts):
    evals = [{"name": "e", "num_examples": 3, "rollouts_per_example": 2}]
    run = tree(tmp_path, evals=evals, max_inflight=2)
    p = parts(run, [Client(worker)])
    client = Client(
        worker, lambda call: ErrorInfo("EngineError", "503") if call == 5 else [1.0, 0.0, 1.0, 1.0, 0.5][call]
    )
    sink = EvalSink(source(run, 1, client), p.ledger, p.episodes, "a")
    metrics = await sink.evaluate(7)
    assert metrics == {
        "eval/e/reward": 3.5 / 5, "eval/e/failed": 1.0, "eval/e/pass@1": 0.75, "eval/e/pass@2": 1.0,
    }  # fmt: skip
    assert {(asked[4], asked[1]["version"]) for asked in client.asked} == {("eval", 7)}
    assert [asked[0] for asked in client.asked] == ["eval0", "eval0", "eval1", "eval1", "eval2", "eval2"]
    stats = arena.stats()
    assert (stats["created"], stats["freed"], stats["blocks"]) == (5, 5, 0)
    assert sum(p.episodes.take_counts().values()) == 0


async def test_an_evaluation_asks_for_whole_groups_where_they_are_scored_together(tmp_path, arena, worker, parts):
    run = tree(tmp_path, evals=[{"name": "e", "num_examples": 2, "rollouts_per_example": 2}], max_inflight=2)
    p = parts(run, [Client(worker)])
    client = Client(worker, lambda call: float(call == 3))
    held = source(run, 1, client)
    held.scores_groups = True
    metrics = await EvalSink(held, p.ledger, p.episodes, "a").evaluate(0)
    assert metrics == {"eval/e/reward": 0.25, "eval/e/failed": 0.0, "eval/e/pass@1": 0.25, "eval/e/pass@2": 0.5}
    assert [asked[5] for asked in client.asked[:2]] in (
        ["t/e/a-e0.0/0", "t/e/a-e0.1/0"],
        ["t/e/a-e0.0/0", "t/e/a-e0.0/1"],
    )
    assert arena.stats()["blocks"] == 0


async def test_reply_bytes_do_not_depend_on_the_length(tmp_path, worker, parts):
    from shmrl.payload import sample_to_wire
    from shmrl.wire import pack

    sizes = []
    for T in (100, 20_000):
        p = parts(tree(tmp_path, batch_size=2, group_size=2, seq_len=32_768), [Client(worker, T=T)])
        batch = await collect(p, 1)
        sizes.append(max(len(pack(sample_to_wire(s))) for s in batch.samples))
        p.ledger.release(batch.samples)
        await finish(p)
    assert sizes[1] - sizes[0] <= 32
    assert sizes[1] <= 512
