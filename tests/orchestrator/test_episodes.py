"""Reaching the peers of a run: all at once, and the log says who is missing. Groups that come back in one reply."""

import asyncio
import logging

import pytest

from shmrl.errors import RunError
from shmrl.orchestrator.admission import share_bytes
from shmrl.orchestrator.episodes import Ask
from shmrl.orchestrator.together import reach
from shmrl.payload import read_tokens
from shmrl.types import EpisodeResult, ErrorInfo, Task
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
    stored = share_bytes(batch.episodes[0].result.samples, batch.samples, size=2)
    assert [*p.admission._sizes["a"]][-2:] == [stored, stored]
    assert 2 * stored == arena.stats()["used_bytes"]
    p.sink.give_up(batch.episodes)
    await finish(p)


class Siblings(Client):
    """Each request is an episode; all refer to the prompt that the first one stored."""

    prompt = None

    async def run_rollout(self, task, *, model, group_id, seed, keep, tag, shares=False):
        assert shares
        group, _, index = tag.rpartition("/")
        self.prompt = self.prompt or sample(self.arena, f"{group}/prompt-{index}", T=4, S=0)
        one = sample(self.arena, tag, T=12, S=8, prefix=(self.prompt, 4))
        return EpisodeResult(success=True, task_id=task.id, reward=self.play(int(index)), samples=(one,))


@pytest.mark.parametrize("kept", [True, False])
async def test_a_prompt_stays_while_its_group_is_under_way(tmp_path, arena, worker, parts, kept):
    """The first episode is refused, the second released; the third refers to what both have left."""
    client = Siblings(worker, play=lambda i: float("nan" if i == 0 else i))
    p = parts(tree(tmp_path, group_size=3, batch_size=3), [client])
    source = p.sources[0]
    asks = [Ask(source, Task("0", {}), "a-0", index, (index,), keep="train", version=0) for index in range(3)]
    assert [result.success for result in await p.episodes.run(asks[0])] == [False]
    assert arena.stats()["blocks"] == 1
    (second,) = await p.episodes.run(asks[1])
    p.ledger.release(second.samples)
    assert arena.stats()["blocks"] == 1
    (third,) = await p.episodes.run(asks[2])
    assert read_tokens(arena, third.samples[0]).tolist() == list(range(12))
    if kept:
        p.episodes.group_left(source, "a-0")
        assert arena.stats()["blocks"] == 2
        p.ledger.release(third.samples)
    else:
        p.ledger.release(third.samples)
        assert arena.stats()["blocks"] == 1
        p.episodes.group_left(source, "a-0")
    assert (arena.stats()["blocks"], len(p.ledger)) == (0, 0)


async def test_failures_of_a_kind_are_counted_and_the_first_says_where_to_look(tmp_path, worker, parts, caplog):
    """Messages of one place may differ; the log file is named where it is one of this run."""
    log = tmp_path / "logs" / "latest" / "envs" / "train" / "a.log"
    log.parent.mkdir(parents=True)
    log.touch()
    client = Client(worker, lambda call: ErrorInfo("ValueError", f"bug {call % 2}", (), "env.py:23, in rollout"))
    p = parts(tree(tmp_path, sources=["a", "b"]), [client, client], fail_limit=13)
    asks = [Ask(p.sources[0], Task("0", {}), "a-0", index, (index,), keep="warmup", version=0) for index in range(13)]
    for ask in asks[:12]:
        await p.episodes.run(ask)
    assert [one for one in caplog.messages if "failed" in one] == [
        f"t/a/a-0/0 failed: ValueError: bug 0 (env.py:23, in rollout); traceback: {log}",
        "t/a/a-0/9: 10 episodes of source 'a' failed so by now: ValueError: bug 1 (env.py:23, in rollout)",
    ]
    why = rf"7 of them with ValueError: bug 0 \(env\.py:23, in rollout\); traceback: {log}"
    with pytest.raises(RunError, match=rf"^13 episodes in a row failed \(three batches of nothing else\); {why}$"):
        await p.episodes.run(asks[12])
