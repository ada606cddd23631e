"""Reaching the peers of a run: all at once, and the log says who is missing. Groups that come back in one reply."""

import asyncio
import logging

import pytest

from shmrl.errors import RunError
from shmrl.orchestrator.admission import stored_bytes
from shmrl.orchestrator.episodes import Ask, reach
from shmrl.payload import read_tokens
from shmrl.types import EpisodeResult, Task
from tests.orchestrator.conftest import collect, finish, until
from tests.orchestrator.fakes import Client, sample, tree


async def test_who_is_missing_is_said_until_everybody_is_there(caplog):
    caplog.set_level(logging.INFO)
    late = asyncio.Event()
    peers = {"env server a": asyncio.sleep(0), "inference": late.wait(), "trainer": late.wait()}
    reaching = asyncio.create_task(reach(peers, remind_s=0.01))
    await until(lambda: "waiting for inference, trainer" in caplog.messages)
    late.set()
    await reaching


async def test_one_that_cannot_be_reached_ends_the_wait_for_all():
    async def refuse():
        raise RunError("no hello")

    with pytest.raises(RunError, match="no hello"):
        await reach({"trainer": refuse(), "inference": asyncio.Event().wait()})


class Group(Client):
    """Its episodes share a prompt of 4 tokens; the first has `reward`. Waits for `open`, even if it is cancelled."""

    def __init__(self, arena, reward=0.0):
        super().__init__(arena)
        self.reward, self.open = reward, asyncio.Event()
        self.open.set()

    async def run_group(self, task, *, model, group_id, seeds, keep, tag):
        while not self.open.is_set():
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                continue
        prompt = sample(self.arena, tag, T=4, S=0)
        samples = [sample(self.arena, f"{tag}/{i}", T=12, S=8, prefix=(prompt, 4)) for i, _ in enumerate(seeds)]
        rewards = [self.reward, *range(1, len(seeds))]
        return [
            EpisodeResult(success=True, task_id=task.id, reward=float(reward), samples=(item,))
            for reward, item in zip(rewards, samples, strict=True)
        ]


def ask_for(parts, n=3):
    parts.sources[0].scores_groups = True
    return Ask(parts.sources[0], Task("0", {}), group_id="a-0", index=0, seeds=tuple(range(n)), keep="train", version=0)


async def test_an_episode_that_is_refused_leaves_the_prompt_to_its_siblings(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path), [Group(worker, reward=float("nan"))])
    results = await p.episodes.run(ask_for(p))
    assert [result.success for result in results] == [False, True, True]
    assert arena.stats()["blocks"] == 3
    assert len(read_tokens(arena, results[2].samples[0])) == 12
    p.ledger.release(one for result in results for one in result.samples)
    assert arena.stats()["blocks"] == 0


async def test_a_group_that_returns_late_is_freed_with_its_prompt(tmp_path, arena, worker, parts):
    client = Group(worker)
    client.open.clear()
    p = parts(tree(tmp_path), [client])
    asking = asyncio.create_task(p.episodes.run(ask_for(p)))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    client.open.set()
    await p.episodes.close()
    await until(lambda: arena.stats()["blocks"] == 0)
    assert (arena.stats()["created"], arena.stats()["freed"], len(p.ledger)) == (4, 4, 0)


async def test_a_shared_prompt_counts_once_in_what_a_group_is_expected_to_take(tmp_path, arena, worker, parts):
    p = parts(tree(tmp_path, batch_size=2, group_size=2), [Group(worker)])
    p.sources[0].scores_groups = True
    batch = await collect(p, 1)
    stored = stored_bytes(one for episode in batch.episodes for one in episode.result.samples)
    assert p.admission._sizes["a"][-1] == stored // 2
    p.sink.give_up(batch.episodes)
    await finish(p)
