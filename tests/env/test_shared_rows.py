"""What the branches of a request have in common, stored once by a real worker, and who frees it."""

import asyncio
import os
import signal
from collections import Counter

import numpy as np
import pytest

from shmrl.arena import Arena
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.ledger import Ledger
from shmrl.payload import assemble, read_header
from shmrl.types import Handle, MicroBatch, Task
from tests.env.conftest import rollout, server_config, serving, until
from tests.support.fake_engine import FakeEngine, Oracle

ENVS = "tests.env.environments:"
PROMPT, ANSWER = 30_000, 1000
TASK = Task("0", {"text": "a" * (PROMPT - 4 - len("user\nassistant\n"))})  # and 4 tokens around the message
NAMES = ("tokens", "positions", "loss_mask", "logprobs", "routing", "routing_covered", "head_ids", "head_logprobs")


@pytest.fixture
def long(engine, spec):
    """The model map of answers of exactly ANSWER tokens."""
    engine.oracle = Oracle(stop_every=0)
    return spec(max_tokens=ANSWER, max_model_len=1 << 16)


def group(client, model, n, task=TASK):
    return client.run_group(task, model=model, group_id="g", seeds=list(range(n)), keep="train", tag="run/test/g")


def stored_rows(arena, results):
    handles = {handle for result in results for sample in result.samples for handle in sample.handles}
    assert arena.stats()["blocks"] == len(handles)
    return sum(read_header(arena, handle).tokens_here for handle in handles)


def content(arena, sample):
    batch = assemble(arena, MicroBatch((sample,)))
    return [getattr(batch, name).tobytes() for name in (*NAMES, "mask_ids", "mask_counts")]


def counts(arena):
    stats = arena.stats()
    return stats["blocks"], stats["freed"] == stats["created"]


async def test_a_group_of_16_with_a_prompt_of_30_000_stores_46_000_rows(hosted, long, arena):
    async with hosted(ENVS + "Scored") as (client, _):
        results = await group(client, long, 16)
        assert [result.error for result in results] == [None] * 16
        assert stored_rows(arena, results) == 46_000
        samples = [sample for result in results for sample in result.samples]
        assert {(sample.T, sample.S) for sample in samples} == {(31_000, 1000)}
        alone = await rollout(client, TASK, long, 99)
        (whole,) = alone.samples
        assert len(whole.segments) == 1
        expected = content(arena, whole)
        for sample in samples:
            assert content(arena, sample) == expected  # the engine says the same to all of them

        ledger = Ledger(Arenas(arena), num_ranks=1)
        tags = {f"run/test/g/{i}": result.samples for i, result in enumerate(results)}
        assert await ledger.adopt_all(tags | {"run/test/g/99": alone.samples}) == {}
        ledger.release([whole, *samples[:15]])
        assert arena.stats()["blocks"] == 2
        assert content(arena, samples[15]) == expected
        ledger.release(samples[15:])
        assert ledger.close() == {}
    assert counts(arena) == (0, True)


async def test_a_discard_by_a_siblings_tag_leaves_the_prompt(hosted, long, arena):
    async with hosted(ENVS + "Scored") as (client, _):
        results = await group(client, long, 3)
        expected = content(arena, results[1].samples[0])
        assert arena.discard("run/test/g/0") == 1
        assert [content(arena, result.samples[0]) for result in results[1:]] == [expected] * 2
        assert arena.discard("run/test/g") == 3
    assert counts(arena) == (0, True)


class Odd(FakeEngine):
    """The second answer is changed: `change(its tokens)` is put over it."""

    answers = 0

    def choice(self, prompt, sampling, abort=False):
        choice = super().choice(prompt, sampling, abort)
        self.answers += 1
        return choice | (self.change(prompt + choice["token_ids"]) if self.answers == 2 else {})


async def odd_group(hosted, model, change):
    async with Odd(Oracle(stop_every=0)) as engine, hosted(ENVS + "Scored") as (client, _):
        engine.change = change
        return await group(client, model | {"urls": [engine.url]}, 4)


async def test_rows_that_an_engine_routed_otherwise_are_stored_for_their_episode_alone(hosted, long, arena):
    oracle = Oracle()

    def change(tokens):
        rows = oracle.routing(0, np.array(tokens[:-1]), np.arange(len(tokens) - 1))
        rows[20_000:] = (rows[20_000:] + 1) % oracle.experts
        return {"routed_experts": FakeEngine.npy(rows)}

    results = await odd_group(hosted, long, change)
    assert stored_rows(arena, results) == PROMPT + 10_000 + 4 * ANSWER
    assert sorted(Counter(content(arena, result.samples[0])[4] for result in results).values()) == [1, 3]
    arena.discard("run")
    assert counts(arena) == (0, True)


async def test_an_episode_that_does_not_encode_leaves_the_prompt_to_its_siblings(hosted, long, arena):
    results = await odd_group(hosted, long, lambda tokens: {"sampling_mask": None})
    (failed,) = [result for result in results if not result.success]
    assert (failed.error.type, failed.samples) == ("MissingField", ())
    good = [result for result in results if result.success]
    assert stored_rows(arena, good) == PROMPT + 3 * ANSWER
    arena.discard("run")
    assert counts(arena) == (0, True)


async def test_branches_of_a_conversation_store_its_beginning_once(hosted, long, arena, engine):
    """Three turns, then a branch off the first: what trains in the one and not in the other is not the same."""
    task = Task("0", {"turns": 2, "branch": True, "text": TASK.data["text"]})
    async with hosted(ENVS + "Turns") as (client, _):
        result = await rollout(client, task, long)
        first, second = result.samples
        assert first.segments[0] == second.segments[0]
        begins = PROMPT + len("t0")
        assert first.segments[0][1:] == (0, begins)
        assert stored_rows(arena, [result]) == first.T + second.T - begins
        for sample in result.samples:
            batch = assemble(arena, MicroBatch((sample,)))
            fed = np.arange(sample.R)
            assert sample.R == sample.T - 1
            assert np.array_equal(batch.routing[: sample.R], engine.oracle.routing(0, batch.tokens[: sample.R], fed))
        assert arena.discard("run/test/g/0") == 3
    assert counts(arena) == (0, True)


@pytest.fixture
def arena_of_1mib():
    """Room for the prompt and a few of its answers."""
    arena = Arena.create(capacity="1MiB", run_id="small")
    yield arena
    arena.close()
    arena.unlink()


@pytest.mark.parametrize("end", ["cancelled", "killed"])
async def test_a_group_that_ends_while_it_is_stored_leaves_nothing(long, arena_of_1mib, end):
    config = server_config(arena_of_1mib.address, ENVS + "Scored", arena={"timeout_s": 3600})
    async with serving(config) as (client, _):
        flying = asyncio.create_task(group(client, long, 16))
        await until(lambda: flying.done() or arena_of_1mib.pressure()["waiting"])
        assert arena_of_1mib.stats()["blocks"] > 2
        if end == "cancelled":
            flying.cancel()
            await until(lambda: arena_of_1mib.stats()["blocks"] == 0)
        else:
            (pid,) = (await client.health())["pids"]
            os.kill(pid, signal.SIGKILL)
            assert {result.error.type for result in await flying} == {"WorkerDied"}
        assert counts(arena_of_1mib) == (0, True)


def episode(client, model, index, task=TASK, group="g"):
    """One of a group whose episodes are requests of their own."""
    tag = f"run/test/{group}/{index}"
    return client.run_rollout(task, model=model, group_id=group, seed=index, keep="train", tag=tag, shares=True)


async def test_16_requests_of_one_group_store_46_000_rows_over_two_workers(hosted, long, arena):
    """As the dispatcher asks: some at once, and some when nothing of the group is under way."""
    async with hosted(ENVS + "Echo", workers=2) as (client, _):
        await until_ready(client, 2)
        results = await asyncio.gather(*(episode(client, long, index) for index in range(8)))
        for index in range(8, 12):
            results.append(await episode(client, long, index))
        results += await asyncio.gather(*(episode(client, long, index) for index in range(12, 16)))
        assert [result.error for result in results] == [None] * 16
        assert stored_rows(arena, results) == 46_000
        alone = await rollout(client, TASK, long, 99)
        expected = content(arena, alone.samples[0])
        for result in results:
            assert content(arena, result.samples[0]) == expected

        ledger = Ledger(Arenas(arena), num_ranks=1)
        assert arena.discard("run/test/g/99") == 1
        for index, result in enumerate(results):
            assert await ledger.adopt_all({f"run/test/g/{index}": result.samples}) == {}
            ledger.pin("g", result.samples)
            ledger.release(result.samples)
            assert arena.stats()["blocks"] == 16 - index
        ledger.unpin("g")
        assert ledger.close() == {}
    assert counts(arena) == (0, True)


async def until_ready(client, workers, restarts=0):
    async with asyncio.timeout(60):
        while ((facts := await client.health())["ready"], facts["restarts"]) != (workers, restarts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_idle(client):
    """Every request has ended, in its worker too: the client's cancels do not wait for that."""
    async with asyncio.timeout(60):
        while (facts := await client.health())["sessions"] + facts["waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_next_episode_of_a_group_whose_prompt_is_gone_stores_it_again(hosted, long, arena):
    async with hosted(ENVS + "Echo") as (client, _):
        first = await episode(client, long, 0)
        assert arena.discard("run") == 2
        second = await episode(client, long, 1)
        assert (first.error, second.error) == (None, None)
        assert stored_rows(arena, [second]) == PROMPT + ANSWER
        assert arena.discard("run") == 2
    assert counts(arena) == (0, True)


async def test_requests_whose_prompt_was_routed_otherwise_share_what_is_the_same(hosted, long, arena):
    oracle = Oracle()

    def change(tokens):
        rows = oracle.routing(0, np.array(tokens[:-1]), np.arange(len(tokens) - 1))
        rows[20_000:] = (rows[20_000:] + 1) % oracle.experts
        return {"routed_experts": FakeEngine.npy(rows)}

    async with Odd(Oracle(stop_every=0)) as engine, hosted(ENVS + "Echo") as (client, _):
        engine.change = change
        model = long | {"urls": [engine.url]}
        results = [await episode(client, model, index) for index in range(4)]
        assert [result.error for result in results] == [None] * 4
        assert stored_rows(arena, results) == PROMPT + 10_000 + 4 * ANSWER
        assert sorted(Counter(content(arena, result.samples[0])[4] for result in results).values()) == [1, 3]
        arena.discard("run")
    assert counts(arena) == (0, True)


async def test_what_no_reply_brought_to_the_client_is_freed_with_the_last_request(hosted, long, arena):
    """The first stores the prompt and does not encode; another refers to the prompt of one whose reply nobody wants."""
    async with Odd(Oracle(stop_every=0)) as engine, hosted(ENVS + "Echo") as (client, _):
        engine.change = lambda tokens: {"sampling_mask": None}
        model = long | {"urls": [engine.url]}
        engine.answers = 1
        assert (await episode(client, model, 0)).error.type == "MissingField"
        assert counts(arena) == (0, True)
        first, second = await episode(client, model, 1), await episode(client, model, 2)
        assert stored_rows(arena, [first, second]) == PROMPT + 2 * ANSWER
        await unclaim(client, 1)
        assert stored_rows(arena, [second]) == PROMPT + ANSWER
        await unclaim(client, 2)
        assert counts(arena) == (0, True)


async def unclaim(client, index):
    await client._call("cancel", {"request_id": b"none", "tag": f"run/test/g/{index}"})


@pytest.mark.parametrize("end", ["cancelled", "killed"])
async def test_requests_of_a_group_that_end_while_they_are_stored_leave_nothing(long, arena_of_1mib, end):
    """One holds the prompt and waits for room for its answer, the others wait for the prompt or for room."""
    config = server_config(arena_of_1mib.address, ENVS + "Echo", arena={"timeout_s": 3600})
    async with serving(config) as (client, _):
        flying = [asyncio.create_task(episode(client, long, index)) for index in range(16)]
        kept = await flying[0]
        await until(lambda: arena_of_1mib.pressure()["waiting"])
        assert kept.error is None
        done = sum(task.done() for task in flying)
        assert arena_of_1mib.stats()["blocks"] >= 1 + done
        if end == "cancelled":
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)
        else:
            (pid,) = (await client.health())["pids"]
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait(flying)
            assert {task.result().error.type for task in flying if task.result().error} == {"WorkerDied"}
        await until_idle(client)
        results = [task.result() for task in flying if not task.cancelled()]
        good = [result for result in results if result.success]
        await until(lambda: stored_rows_now(arena_of_1mib) == PROMPT + len(good) * ANSWER)
        assert stored_rows(arena_of_1mib, good) == PROMPT + len(good) * ANSWER
        for handle in {handle for result in good for sample in result.samples for handle in sample.handles}:
            arena_of_1mib.adopt(handle)
            arena_of_1mib.free(handle)
        assert counts(arena_of_1mib) == (0, True)


def stored_rows_now(arena):
    return sum(
        read_header(arena, Handle.parse(row["handle"])).tokens_here for row in arena.ls() if row["state"] == "ready"
    )


async def test_a_worker_killed_in_the_middle_of_a_group_takes_nothing_from_its_siblings(hosted, long, arena):
    """The prompt that it stored stays for those that follow, in its successor."""
    async with hosted(ENVS + "Echo") as (client, _):
        first = await episode(client, long, 0)
        (pid,) = (await client.health())["pids"]
        os.kill(pid, signal.SIGKILL)
        await until_ready(client, 1, restarts=1)
        second = await episode(client, long, 1)
        assert (first.error, second.error) == (None, None)
        assert stored_rows(arena, [first, second]) == PROMPT + 2 * ANSWER
        ledger = Ledger(Arenas(arena), num_ranks=1)
        assert await ledger.adopt_all({"run/test/g/0": first.samples, "run/test/g/1": second.samples}) == {}
        ledger.release([*first.samples, *second.samples])
        assert ledger.close() == {}
    assert counts(arena) == (0, True)


async def test_a_worker_killed_while_it_stores_the_prompt_leaves_it_to_the_next(long):
    """Behind the prompt there is no room for an answer: who has stored it is waited for, and dies."""
    arena = Arena.create(capacity="1MiB", run_id="small")
    try:
        with arena.reserve(448 << 10, tag="other/other/other") as block:
            config = server_config(arena.address, ENVS + "Echo", arena={"timeout_s": 3600})
            async with serving(config) as (client, _):
                flying = [asyncio.create_task(episode(client, long, index)) for index in range(2)]
                await until(lambda: arena.pressure()["waiting"])
                assert [row["tag"] for row in arena.ls() if row["state"] == "ready"] == ["run/test/g/prompt-0"]
                (pid,) = (await client.health())["pids"]
                os.kill(pid, signal.SIGKILL)
                for task in flying:
                    assert (await task).error.type == "WorkerDied"
                assert arena.stats()["blocks"] == 1
                block.free()
                await until_ready(client, 1, restarts=1)
                result = await episode(client, long, 2)
                assert result.error is None
                assert stored_rows(arena, [result]) == PROMPT + ANSWER
                arena.discard("run")
        assert counts(arena) == (0, True)
    finally:
        arena.close()
        arena.unlink()
