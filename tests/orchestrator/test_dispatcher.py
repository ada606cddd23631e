"""What starts when, and that every dispatched episode ends in exactly one outcome with its block freed."""

import asyncio
from collections import Counter

import pytest

from shmrl.errors import RunError, ServerDied, TasksetError
from shmrl.orchestrator.episodes import OUTCOMES
from shmrl.orchestrator.replicas import Place, Replica
from shmrl.types import ErrorInfo
from tests.orchestrator.conftest import collect, finish, until
from tests.orchestrator.fakes import Client, tree


def ended(parts, batch=None):
    if batch is not None:
        parts.sink.shipped(batch)
    return {outcome: n for outcome, n in parts.episodes.take_counts().items() if n}


async def forever():
    await asyncio.Event().wait()


class Only128(Client):
    """A task set whose 129th task never comes, so that nothing takes a failed group's place."""

    async def tasks(self, split, start, n):
        return await (super().tasks(split, start, n) if start < 128 else forever())


async def test_128_groups_of_which_3_raise_and_1_hangs(tmp_path, arena, worker, parts):
    def play(call):
        return RuntimeError("boom") if call in (5, 50, 99) else forever() if call == 70 else call % 2

    source = {"name": "a", "serve": {"request_timeout_s": 3.0}}
    settings = {"batch_size": 128, "group_size": 1, "filters": {"zero_advantage": False}}
    p = parts(tree(tmp_path, sources=[source], max_inflight=128, **settings), [Only128(worker, play)])
    running = asyncio.create_task(p.dispatcher.run())
    await until(lambda: p.dispatcher.groups == 128)
    running.cancel()
    await until(lambda: len(p.episodes.open()) == 1)
    assert [tag for tag, _ in p.episodes.open()] == ["t/a/a-70/0"]  # what the watchdog lists
    await until(lambda: not p.episodes.open())
    p.sink.batch = 124
    batch = p.sink.cut(1)
    assert ended(p, batch) == {"shipped": 124, "failed": 3, "timed_out": 1}
    p.ledger.release(batch.samples)
    await finish(p)
    assert arena.stats()["blocks"] == 0


@pytest.mark.parametrize("turns", range(1, 8))
async def test_an_episode_that_is_given_up_before_it_began_gives_its_permit_back(tmp_path, worker, parts, turns):
    p = parts(tree(tmp_path, batch_size=8, group_size=2, max_inflight=6), [Client(worker, lambda call: forever())])
    running = asyncio.create_task(p.dispatcher.run())
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await p.dispatcher.stop()
    async with asyncio.timeout(5):
        for _ in range(6):
            await p.episodes.permits.acquire()
    for _ in range(6):
        p.episodes.permits.release()
    await finish(p)


async def test_nothing_of_batch_n_starts_before_version_n_minus_1_serves(tmp_path, worker, parts):
    client = Client(worker)
    p = parts(tree(tmp_path, batch_size=4, group_size=2, max_off_policy_steps=0, max_inflight=16), [client])
    p.ledger.release((await collect(p, 1)).samples)
    assert len(client.asked) == 4
    waiting = asyncio.create_task(collect(p, 2))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(client.asked) == 4
    p.dispatcher.serving(1)
    batch = await waiting
    assert len(client.asked) == 8
    assert {asked[1]["version"] for asked in client.asked[4:]} == {1}
    assert {episode.result.version_start for episode in batch.episodes} == {1}
    p.ledger.release(batch.samples)
    await finish(p)


@pytest.mark.parametrize(("max_lag", "ahead"), [(0, 1), (1, 2), (2, 3)])
async def test_the_gate_lets_as_many_batches_ahead_as_the_lag_allows(tmp_path, worker, parts, max_lag, ahead):
    client = Client(worker)
    p = parts(tree(tmp_path, batch_size=4, group_size=2, max_off_policy_steps=max_lag, max_inflight=64), [client])
    running = asyncio.create_task(p.dispatcher.run())
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(client.asked) == 4 * ahead
    running.cancel()
    await finish(p)
    assert ended(p) == {"cancelled": 4 * ahead}


async def test_no_episode_starts_for_a_step_beyond_the_last(tmp_path, worker, parts):
    run = tree(tmp_path, batch_size=4, group_size=2, max_off_policy_steps=8, max_inflight=64)
    client = Client(worker)
    p = parts(run.model_copy(update={"run": run.run.model_copy(update={"max_steps": 2})}), [client])
    running = asyncio.create_task(p.dispatcher.run())
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(client.asked) == 8
    running.cancel()
    await finish(p)


async def test_a_group_is_one_task_with_its_own_seeds_and_is_continued_first(tmp_path, worker, parts):
    client = Client(worker)
    p = parts(tree(tmp_path, batch_size=8, group_size=4, max_inflight=5), [client])
    batch = await collect(p, 1)
    first, second = client.asked[:4], client.asked[4:8]
    for group in (first, second):
        assert len({(task, group_id) for task, _, group_id, *_ in group}) == 1
        assert len({seed for *_, seed, _, _ in group}) == 4
    assert [asked[5] for asked in first] == [f"t/a/a-0/{i}" for i in range(4)]
    assert (first[0][0], second[0][0]) == ("train0", "train1")
    assert first[0][1]["cache_salt"] != second[0][1]["cache_salt"]
    p.ledger.release(batch.samples)
    await finish(p)


async def test_sources_are_drawn_by_ratio_and_the_draw_goes_on_after_a_resume(tmp_path, worker, parts):
    run = tree(
        tmp_path, sources=[{"name": "a", "ratio": 3.0}, {"name": "b", "ratio": 1.0}], batch_size=800, group_size=2
    )
    first = parts(run, [Client(worker), Client(worker)])
    first.ledger.release((await collect(first, 1)).samples)
    drawn = [asked[5].split("/")[1] for client in (first.clients) for asked in client.asked]
    counts = Counter(drawn)
    assert sum(counts.values()) == 800
    assert 0.70 <= counts["a"] / 800 <= 0.80

    state = first.dispatcher.state()
    assert state["groups"] == 400
    assert state["positions"]["a"] + state["positions"]["b"] == 400
    second, whole = (parts(run, [Client(worker), Client(worker)]) for _ in range(2))
    second.dispatcher.restore(state)
    second.dispatcher.serving(1)
    second.ledger.release((await collect(second, 2)).samples)
    whole.ledger.release((await collect(whole, 1)).samples)
    whole.dispatcher.serving(1)
    whole.ledger.release((await collect(whole, 2)).samples)
    third = parts(run, [Client(worker), Client(worker)])
    third.dispatcher.skip_to(400)  # without the state: the draw alone says what was given out
    assert third.dispatcher.state() == state
    for resumed, straight in zip(second.clients, whole.clients, strict=True):
        assert [(a[0], a[3]) for a in resumed.asked] == [(a[0], a[3]) for a in straight.asked[-len(resumed.asked) :]]
    for made in (first, second, third, whole):
        await finish(made)


async def test_a_group_goes_on_without_a_failed_episode_and_is_dropped_when_one_is_left(tmp_path, arena, worker, parts):
    fails = {1, 4, 5}  # one of the first group's three; two of the second's three
    client = Client(worker, lambda call: ErrorInfo("EngineError", "503") if call in fails else float(call))
    p = parts(tree(tmp_path, batch_size=6, group_size=3, max_inflight=6), [client])
    batch = await collect(p, 1)
    sizes = Counter(episode.group_id for episode in batch.episodes)
    assert sizes["a-0"] == 2
    assert "a-1" not in sizes
    kept = [episode.result.reward for episode in batch.episodes if episode.group_id == "a-0"]
    assert kept == [0.0, 2.0]
    counts = ended(p, batch)
    assert (counts["failed"], counts["shipped"]) == (3, len(batch.kept))
    assert counts.get("filtered", 0) + counts.get("cancelled", 0) >= 1
    p.ledger.release(batch.samples)
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_replies_that_return_after_their_group_was_dropped_are_released(tmp_path, arena, worker, parts):
    go = asyncio.Event()

    async def late():
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                go.set()  # the cancel came too late: the reply is on its way
        return 1.0

    client = Client(worker, lambda call: late())
    p = parts(tree(tmp_path, batch_size=3, group_size=3, max_inflight=3), [client])
    running = asyncio.create_task(p.dispatcher.run())
    await until(lambda: len(client.asked) == 3)
    running.cancel()
    await finish(p)
    stats = arena.stats()
    assert (stats["created"], stats["freed"], stats["blocks"]) == (3, 3, 0)
    assert ended(p) == {"cancelled": 3}


async def test_an_episode_that_must_be_stale_is_cancelled_and_its_group_refilled(tmp_path, arena, worker, parts):
    slow = asyncio.Event()

    def play(call):
        return slow.wait() if call in (0, 1) else float(call % 2)

    client = Client(worker, play)
    p = parts(tree(tmp_path, batch_size=4, group_size=2, max_off_policy_steps=0, max_inflight=16), [client])
    first = asyncio.create_task(collect(p, 1))
    await until(lambda: p.sink.pending == 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    p.dispatcher.serving(1)
    batch = await collect(p, 2)  # version 0 is too old now: one group hung in flight, one waited in the queue
    assert {episode.result.version_start for episode in batch.episodes} == {1}
    p.ledger.release(batch.samples)
    await finish(p)
    counts = ended(p, batch)
    assert (counts["stale"], counts["shipped"]) == (4, 4)
    assert arena.stats()["blocks"] == 0


async def test_three_batches_of_nothing_but_failures_end_the_run(tmp_path, worker, parts):
    client = Client(worker, lambda call: ErrorInfo("PayloadError", "routing: rows missing"))
    p = parts(tree(tmp_path, batch_size=4, group_size=2), [client], fail_limit=12)
    with pytest.raises(RunError, match=r"12 episodes in a row failed .* 12 of them with PayloadError: routing: rows"):
        await collect(p, 1)
    assert p.episodes.rejected >= 12
    await finish(p)


async def test_a_field_that_is_missing_in_a_sources_first_sample_ends_the_run(tmp_path, arena, worker, parts):
    missing = ErrorInfo("MissingField", "mask: no kept ids at position 3 of math/g1, sampled with top_p=0.95")
    clients = [Client(worker, lambda call: missing if call == 0 else 1.0)]
    p = parts(tree(tmp_path, batch_size=4, group_size=4), clients)
    with pytest.raises(RunError, match=r"source 'a': its first sample \(t/a/a-0/0\) lacks a field .*: mask: no kept"):
        await collect(p, 1)
    assert p.episodes.rejected == 1
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_successes_of_a_group_whose_failures_end_the_run_are_released(tmp_path, arena, worker, parts):
    client = Client(worker, lambda call: 1.0 if call == 1 else ErrorInfo("EngineError", "503"))
    p = parts(tree(tmp_path, batch_size=4, group_size=4, max_inflight=4), [client], fail_limit=3)
    p.sources[0].scores_groups = True
    with pytest.raises(RunError, match="3 episodes in a row failed"):
        await collect(p, 1)
    assert p.ledger.open() == {}
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_a_field_that_came_before_and_is_missing_now_fails_its_episode(tmp_path, arena, worker, parts):
    missing = ErrorInfo("MissingField", "routing: the engine returned none for 7 tokens")
    client = Client(worker, lambda call: missing if call == 5 else float(call))
    p = parts(tree(tmp_path, batch_size=4, group_size=4, max_inflight=4), [client])
    p.ledger.release((await collect(p, 1)).samples)
    p.dispatcher.serving(1)
    batch = await collect(p, 2)
    assert (p.episodes.rejected, ended(p)["failed"]) == (1, 1)
    p.ledger.release(batch.samples)
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_a_success_in_every_group_does_not_hide_that_all_are_dropped(tmp_path, arena, worker, parts):
    client = Client(worker, lambda call: 1.0 if call % 4 == 0 else ErrorInfo("ArenaFull", "no room for 2.4 KiB"))
    p = parts(tree(tmp_path, batch_size=4, group_size=4, max_inflight=4), [client], fail_limit=12)
    with pytest.raises(RunError, match=r"12 episodes failed, and every group was dropped .*: ArenaFull: no room"):
        await collect(p, 1)
    await finish(p)
    assert arena.stats()["blocks"] == 0


@pytest.mark.parametrize("error", [ServerDied("tcp://127.0.0.1:5000 is gone"), TasksetError("Traceback ...")])
async def test_a_lost_server_ends_the_run_at_once(tmp_path, worker, parts, error):
    p = parts(tree(tmp_path), [Client(worker, lambda call: error)])
    with pytest.raises(type(error), match=str(error).split()[0]):
        await collect(p, 1)
    await finish(p)


async def test_a_task_set_that_is_empty_ends_the_run(tmp_path, worker, parts):
    p = parts(tree(tmp_path), [Client(worker, size=0)])
    running = asyncio.create_task(p.dispatcher.run())
    with pytest.raises(TasksetError, match="source 'a' has no train tasks"):
        await asyncio.wait_for(running, 10)


async def test_a_finite_task_set_starts_over(tmp_path, worker, parts):
    client = Client(worker, size=3)
    p = parts(tree(tmp_path, batch_size=10, group_size=2), [client])
    p.ledger.release((await collect(p, 1)).samples)
    assert [asked[0] for asked in client.asked[::2]] == ["train0", "train1", "train2", "train0", "train1"]
    await finish(p)


async def test_nothing_starts_while_paused(tmp_path, worker, parts):
    client = Client(worker)
    p = parts(tree(tmp_path), [client])
    p.dispatcher.pause()
    waiting = asyncio.create_task(collect(p, 1))
    for _ in range(50):
        await asyncio.sleep(0)
    assert client.asked == []
    p.dispatcher.resume()
    p.ledger.release((await waiting).samples)
    await finish(p)


async def test_a_reward_that_is_no_number_is_a_failure(tmp_path, arena, worker, parts):
    client = Client(worker, lambda call: float("nan") if call == 0 else float(call))
    p = parts(tree(tmp_path, batch_size=3, group_size=3), [client])
    batch = await collect(p, 1)
    assert ended(p)["failed"] == 1
    p.ledger.release(batch.samples)
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_an_engine_that_says_it_kept_old_weights_ends_the_run(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, batch_size=4, group_size=2), [Client(worker, version=0)], fail_limit=12)
    p.ledger.release((await collect(p, 1)).samples)
    p.dispatcher.serving(3)
    with pytest.raises(RunError, match=r"12 episodes in a row failed .* EngineError: .* version 0, .* version 3 "):
        await collect(p, 4)
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_a_group_its_environment_scores_is_one_request(tmp_path, arena, worker, parts):
    client = Client(worker, lambda call: ErrorInfo("EngineError", "503") if call == 1 else float(call))
    p = parts(tree(tmp_path, batch_size=4, group_size=4, max_inflight=4), [client])
    p.sources[0].scores_groups = True
    batch = await collect(p, 1)
    assert [asked[5] for asked in client.asked[:4]] == [f"t/a/a-0/{i}" for i in range(4)]
    assert [episode.result.reward for episode in batch.episodes[:3]] == [0.0, 2.0, 3.0]
    assert ended(p)["failed"] == 1
    assert p.ledger.open()[batch.samples[0].handles[0]].tag == "t/a/a-0/0"
    p.ledger.release(batch.samples)
    await finish(p)
    assert p.episodes.permits._value == 4
    assert arena.stats()["blocks"] == 0


def test_outcomes_are_the_pinned_ones():
    assert OUTCOMES == ("shipped", "filtered", "stale", "failed", "cancelled", "timed_out")


async def test_only_the_death_of_the_last_replica_ends_the_run_and_it_is_named(tmp_path, worker, parts, caplog):
    def dying(number):
        return lambda call: ServerDied(f"env server tcp://10.0.0.{number}:5000 died")

    p = parts(tree(tmp_path, batch_size=8, group_size=2), [Client(worker, dying(1))])
    p.sources[0].replicas.every.append(Replica(Client(worker, dying(2)), Place("tcp://10.0.0.2:5000", "node2")))
    with pytest.raises(ServerDied) as died:
        await collect(p, 1)
    (last,) = p.sources[0].replicas.alive
    (first,) = (replica for replica in p.sources[0].replicas.every if replica.lost)
    assert last.place.address in str(died.value)
    assert (
        f"source 'a' goes on without its replica at {first.place.address} on {first.place.node}, 1 are left"
        in caplog.text
    )
    await finish(p)
