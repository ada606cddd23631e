"""What the branches of a request have in common, stored once by a real worker, and who frees it."""

import asyncio
import os
import signal
from collections import Counter

import numpy as np
import pytest

from shmrl.arena import Arena
from shmrl.orchestrator.ledger import Ledger
from shmrl.payload import assemble, read_header
from shmrl.types import MicroBatch, Task
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

        ledger = Ledger(arena, num_ranks=1)
        tags = {f"run/test/g/{i}": result.samples for i, result in enumerate(results)}
        assert ledger.adopt_all(tags | {"run/test/g/99": alone.samples}) == {}
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
