"""Episodes end to end: a fake engine, a real server, a worker process, the arena, the client."""

import asyncio
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from shmrl.arena import Arena
from shmrl.env.chat import chat_format
from shmrl.env.keep import Keeper
from shmrl.errors import PayloadError, ProtocolError
from shmrl.payload import Branch, read_header, read_text, read_tokens
from shmrl.payload.header import read_loss_mask
from shmrl.types import Task
from tests.env.conftest import rollout, server_config, serving, until
from tests.support.fake_engine import FakeEngine, Oracle
from tests.support.model_dir import IM_END

ENVS = "tests.env.environments:"


async def test_a_training_episode_comes_back_as_references(hosted, spec, arena):
    async with hosted("reverse-text", {"seed": 3}) as (client, _):
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec())
        assert result.success, result.error
        assert result.messages is None
        assert (result.num_turns, result.version_start, result.version_end) == (1, 0, 0)
        (sample,) = result.samples
        arena.adopt(sample.handles)
        assert sample.fields == ("routing", "head", "mask")
        assert sample.T == sample.R + 1
        assert result.num_tokens == sample.S
        assert sample.meta["reward"] == result.reward
        assert read_text(arena, sample)[0] == {"role": "user", "content": task.data["text"]}
        assert len(read_tokens(arena, sample)) == sample.T
        meta = read_header(arena, sample.handles[0]).meta
        expected = {
            "task": task.id,
            "run": "run",
            "source": "test",
            "group": "g",
            "episode": "0",
            "rewards": result.rewards,
        }
        assert {key: meta[key] for key in expected} == expected
        assert (meta["logprobs_mode"], meta["temperature"], meta["top_p"]) == ("processed", 1.0, 0.9)
        arena.free(sample.handles)
        assert arena.stats()["blocks"] == 0


async def test_an_evaluation_episode_brings_messages_and_keeps_nothing(hosted, spec, arena, engine):
    async with hosted("reverse-text") as (client, _):
        (task,) = await client.tasks("eval", 0, 1)
        result = await rollout(client, task, spec(), keep="eval")
        assert result.success, result.error
        assert [message["role"] for message in result.messages] == ["user", "assistant"]
        assert result.messages[0]["content"] == task.data["text"]
        assert (result.samples, arena.stats()["blocks"]) == ((), 0)
        assert engine.requests[0]["sampling_params"]["logprobs"] == 0


async def test_a_warmup_episode_records_the_demonstration(hosted, spec, arena, engine):
    async with hosted("reverse-text") as (client, _):
        assert (await client.info())["demonstrates"] is True
        (task,) = await client.tasks("train", 5, 1)
        result = await rollout(client, task, spec(), keep="warmup")
        assert (result.success, result.reward) == (True, 1.0), result.error
        (sample,) = result.samples
        target = task.data["text"][::-1]
        assert (sample.S, sample.R, sample.fields) == (len(target) + 1, 0, ())
        tokens, loss = read_tokens(arena, sample), read_loss_mask(arena, sample)
        assert tokens[loss].tolist() == [64 + ord(letter) - ord("a") for letter in target] + [IM_END]
        assert engine.requests == []
        arena.discard("run")


async def test_an_engine_that_does_not_answer_in_time_fails_the_episode(hosted, spec, arena, engine):
    engine.open.clear()
    async with hosted("reverse-text") as (client, _):
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec(timeout_s=0.5))
        assert (result.success, result.error.type) == (False, "EngineError")
        await until(lambda: not engine.running)
        engine.open.set()
        assert (await rollout(client, task, spec())).success
        arena.discard("run")


async def test_multi_turn_and_session_environments_run_on_one_sequence(hosted, spec, arena):
    for env_id in ("alphabet-sort", "guess-number"):
        async with hosted(env_id) as (client, _):
            (task,) = await client.tasks("train", 0, 1)
            result = await rollout(client, task, spec())
            assert result.success, result.error
            assert result.num_turns >= 2
            (sample,) = result.samples
            assert result.num_tokens == sample.S
            assert int(read_loss_mask(arena, sample).sum()) == sample.S
            arena.discard("run")


async def test_message_size_does_not_depend_on_the_number_of_tokens(hosted, spec, arena, engine):
    engine.oracle = Oracle(stop_every=0)
    sizes = {}
    async with hosted(ENVS + "Echo") as (client, _):
        for T in (100, 20_000):
            prompt = 1 + len("user\nab") + 1 + 1 + 1 + len("assistant\n")
            result = await rollout(
                client, Task("train-0", {"text": "ab"}), spec(max_tokens=T - prompt, max_model_len=20_001)
            )
            assert result.success, result.error
            assert result.samples[0].T == T
            sizes[T] = result.wire_bytes
            arena.discard("run")
    assert sizes[20_000] - sizes[100] <= 32
    assert max(sizes.values()) <= 512, sizes


async def test_every_row_of_a_branching_episode_is_the_engines(hosted, spec, arena, engine):
    """Three turns, every second request aborted half-way and resumed, then a branch off the first turn."""
    engine.abort_every = 2
    async with hosted(ENVS + "Turns") as (client, _):
        result = await rollout(client, Task("0", {"turns": 3, "branch": True}), spec())
        assert result.success, result.error
        first, second = result.samples
        tokens = [read_tokens(arena, sample) for sample in result.samples]
        shared = int(np.argmin(tokens[0][: len(tokens[1])] == tokens[1][: len(tokens[0])]))
        assert shared > 20
        assert not read_loss_mask(arena, second)[:shared].any()  # the first turn trains once, in the first branch
        for sample, ids in zip(result.samples, tokens, strict=True):
            check_rows(arena, sample, ids, engine.oracle)
        assert result.num_tokens == first.S + second.S
        arena.discard("run")


class Calling(FakeEngine):
    """Says what it is told to, turn by turn, by the rules of its oracle."""

    def __init__(self, directory, texts):
        super().__init__()
        self.turns = [chat_format(str(directory)).reply_ids(text) for text in texts]

    def _draw(self, n, room, stop_id):
        return self.turns.pop(0), "stop"


async def test_an_episode_that_calls_tools_trains_on_its_calls_and_answers(hosted, spec, arena, model_dir):
    """Two turns with calls (three in all), then the answer: one branch, whose every row is the engine's."""
    call = '<tool_call>{"name": "add", "arguments": {"a": %d, "b": %d}}</tool_call>'
    texts = ["I shall " + call % (2, 3) + call % (1, 1), call % (5, 0), "5"]
    async with Calling(model_dir, texts) as engine, hosted(ENVS + "Calculator") as (client, _):
        task, model = Task("0", {"a": 2, "b": 3}), spec(urls=[engine.url], max_tokens=200, max_model_len=1024)
        result = await rollout(client, task, model)
        assert result.success, result.error
        assert (result.reward, result.metrics, result.num_turns) == (1.0, {"calls": 3.0}, 3)
        (sample,) = result.samples
        tokens = read_tokens(arena, sample)
        check_rows(arena, sample, tokens, engine.oracle)
        chat = chat_format(str(model_dir))
        sampled = [chat.reply_ids(text) for text in texts]
        assert tokens[np.flatnonzero(read_loss_mask(arena, sample))].tolist() == [i for ids in sampled for i in ids]
        text = chat._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert text.startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "add"')
        assert "<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n" in text
        engine.turns = [chat.reply_ids(text) for text in texts]
        played = await rollout(client, task, model, 1, keep="eval")
        calls = [call["id"] for message in played.messages for call in message.get("tool_calls", ())]
        assert calls == ["call_0", "call_1", "call_2"]
        arena.discard("run")


def check_rows(arena, sample, tokens, oracle):
    header = read_header(arena, sample.handles[0])
    with arena.get(sample.handles[0]) as view:
        columns = {name: column.of(view).copy() for name, column in header.columns.items()}
    at = np.flatnonzero(read_loss_mask(arena, sample))
    fed = np.arange(sample.R)
    assert sample.R == sample.T - 1
    assert np.array_equal(columns["routing"], oracle.routing(0, tokens[: sample.R], fed))
    assert np.array_equal(columns["logprobs"][at], oracle.logprobs(0, tokens[at], at))
    ids, values = oracle.head(0, tokens[at], at, 4)
    assert np.array_equal(columns["head_ids"], ids)
    assert np.array_equal(columns["head_logprobs"], values)
    kept = [oracle.kept(0, int(tokens[i]), int(i)) for i in at]
    assert columns["mask"].tolist() == [i for ids in kept for i in ids]
    assert columns["mask/offsets"].tolist() == np.cumsum([0, *map(len, kept)]).tolist()


async def test_failures_are_data_and_leave_nothing(hosted, spec, arena, engine):
    async with hosted(ENVS + "Echo") as (client, _):
        nan = await rollout(client, Task("0", {"text": "a", "reward": float("nan")}), spec())
        assert (nan.success, nan.error.type) == (False, "EnvError")
        assert "nan" in nan.error.message
        unsendable = await rollout(client, Task("1", {"text": "a", "lone": True}), spec())  # found only after encoding
        assert (unsendable.success, unsendable.error.type) == (False, "ProtocolError")
        engine.masks = False
        masks = await rollout(client, Task("2", {"text": "a"}), spec())
        assert (masks.success, masks.error.type, masks.samples) == (False, "MissingField", ())
        engine.masks, engine.routing = True, False
        routing = await rollout(client, Task("3", {"text": "a"}), spec())
        assert (routing.error.type, "routing" in routing.error.message) == ("MissingField", True)
        assert (await rollout(client, Task("4", {"text": "a"}), spec(), keep="maybe")).error.type == "EnvError"
        assert "unknown ['colour']" in (await rollout(client, Task("5", {"text": "a"}), spec(colour=1))).error.message
        with pytest.raises(ProtocolError, match=r"\$\.task\[1\]\.big"):
            await rollout(client, Task("6", {"big": 1 << 70}), spec())
        assert (await rollout(client, Task("7", {"text": "a"}), spec(fields=[]))).success
        arena.discard("run")
        assert arena.stats()["blocks"] == 0


@pytest.fixture
def arena_of_1mib():
    arena = Arena.create(capacity="1MiB", run_id="small")
    yield arena
    arena.close()
    arena.unlink()


async def test_siblings_are_freed_when_one_branch_does_not_fit(spec, arena_of_1mib, engine):
    engine.oracle = Oracle(stop_every=0)
    config = server_config(arena_of_1mib.address, ENVS + "Turns", arena={"timeout_s": 0.2})
    async with serving(config) as (client, _):
        task = Task("0", {"turns": 2, "branch": True})
        result = await rollout(client, task, spec(max_tokens=5000, max_model_len=1 << 16))
        assert (result.success, result.error.type) == (False, "ArenaFull"), result
        stats = arena_of_1mib.stats()
        assert (stats["blocks"], stats["created"], stats["freed"]) == (0, 1, 1)


def test_siblings_are_freed_when_one_branch_does_not_encode(arena):
    """The text of the second cannot be stored, which shows when it is written."""
    texts = ([{"role": "user", "content": "ab"}], [{"role": "user", "content": object()}])
    branches = (Branch([1, 2], [0, 1], [0, -0.5], messages=messages) for messages in texts)
    model = SimpleNamespace(branches=lambda meta: branches)
    one = Keeper(arena, None, {"timeout_s": 1.0, "on_full": "block"})
    with pytest.raises(PayloadError, match="text: something that msgpack cannot carry"):
        one._store(model, {}, "run/test/g/0", SimpleNamespace(prefix=lambda key, **limits: None), threading.Event())
    stats = arena.stats()
    assert (stats["blocks"], stats["created"], stats["freed"]) == (0, 1, 1)


async def test_what_a_killed_worker_had_stored_is_freed(spec, arena_of_1mib, engine):
    """The first branch is in the arena, the second waits for space when its worker dies."""
    engine.oracle = Oracle(stop_every=0)
    async with serving(server_config(arena_of_1mib.address, ENVS + "Turns")) as (client, _):
        task = Task("0", {"turns": 2, "branch": True})
        flying = asyncio.create_task(rollout(client, task, spec(max_tokens=5000, max_model_len=1 << 16)))
        await until(lambda: arena_of_1mib.stats()["waits"] == 1)
        assert arena_of_1mib.stats()["blocks"] == 1
        (pid,) = (await client.health())["pids"]
        os.kill(pid, signal.SIGKILL)
        assert (await flying).error.type == "WorkerDied"
        stats = arena_of_1mib.stats()
        assert (stats["blocks"], stats["created"], stats["freed"]) == (0, 1, 1)


async def test_a_cancelled_episode_gives_up_its_wait_for_space(spec, arena_of_1mib, engine):
    """Its request ends at once, not at arena.timeout_s, and its first branch is freed: others need the room."""
    engine.oracle = Oracle(stop_every=0)
    config = server_config(arena_of_1mib.address, ENVS + "Turns", arena={"timeout_s": 3600})
    async with serving(config) as (client, _):
        task = Task("0", {"turns": 2, "branch": True})
        flying = asyncio.create_task(rollout(client, task, spec(max_tokens=5000, max_model_len=1 << 16)))
        await until(lambda: arena_of_1mib.pressure()["waiting"])
        flying.cancel()
        await until(lambda: not arena_of_1mib.pressure()["waiting"] and arena_of_1mib.stats()["blocks"] == 0)


async def test_a_group_is_scored_together(hosted, spec, arena):
    async with hosted(ENVS + "Scored") as (client, _):
        (task,) = await client.tasks("train", 0, 1)
        results = await client.run_group(
            task, model=spec(), group_id="g", seeds=[1, 2, 3], keep="train", tag="run/test/g"
        )
        assert [result.reward for result in results] == [3.0, 3.0, 3.0]
        episodes = {read_header(arena, result.samples[0].handles[0]).meta["episode"] for result in results}
        assert episodes == {"0", "1", "2"}
        arena.discard("run/test/g")
        assert arena.stats()["blocks"] == 0


async def test_task_sets_are_read_by_index_and_end(hosted):
    async with hosted(ENVS + "Echo") as (client, _):
        assert [task.id for task in await client.tasks("train", 98, 5)] == ["train-98", "train-99"]
        assert await client.tasks("eval", 100, 5) == []
    async with hosted(ENVS + "IteratedTasks") as (client, _):
        assert [task.id for task in await client.tasks("train", 3, 5)] == ["train-3", "train-4"]
        assert [task.id for task in await client.tasks("train", 0, 2)] == ["train-0", "train-1"]
        assert await client.tasks("train", 100_000, 5) == []


async def test_a_far_start_in_an_endless_iterator_stops_nobody(hosted):
    """Others are answered while it is read, and what would never end is refused with the number that was read."""
    async with hosted(ENVS + "EndlessTasks") as (client, _):
        far = asyncio.create_task(client.tasks("train", 100_000, 2))
        await asyncio.sleep(0)  # it is sent first
        near = await client.tasks("train", 0, 1)
        assert (near[0].id, far.done()) == ("train-0", False)
        assert [task.id for task in await far] == ["train-100000", "train-100001"]
        with pytest.raises(ProtocolError, match=rf"start = {1 << 62}, and 100002 tasks of 'train' were read so far"):
            await client.tasks("train", 1 << 62, 1)
        assert (await client.tasks("train", 1, 1))[0].id == "train-1"
