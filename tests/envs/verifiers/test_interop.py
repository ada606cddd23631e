"""verifiers itself, 0.4 (v1) and 0.1.14 (v0), each under an interpreter of its own, hosted by our server.

`.ci/run clients` makes the interpreters; by hand, set SHMRL_VERIFIERS_V1_PYTHON and SHMRL_VERIFIERS_V0_PYTHON."""

import asyncio
import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from shmrl.env.chat import chat_format
from shmrl.errors import TasksetError
from shmrl.payload import assemble, pack, read_text
from tests.env.conftest import rollout, server_config, serving, until
from tests.support.fake_engine import Oracle
from tests.support.model_dir import IM_END

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]
EXAMPLES = Path(__file__).parents[3] / "configs" / "debug" / "verifiers"
MODULES = Path(__file__).parent / "modules"
BOTH = pytest.mark.parametrize(
    ("version", "env_id"), [("v1", "verifiers:reverse-text-v1"), ("v0", "legacy:reverse-text-v0")]
)


@pytest.fixture
def interpreter(monkeypatch):
    """interpreter("v1"): the one that has verifiers v1; environments of ours are on its path."""
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{MODULES}")

    def named(version):
        variable = f"SHMRL_VERIFIERS_{version.upper()}_PYTHON"
        return os.environ.get(variable) or pytest.skip(f"{variable} is not set")

    return named


@pytest.fixture
def hosts(arena, interpreter):
    """`async with hosts("v1", "verifiers:...", {...}) as client`; nothing of it is left in the arena."""

    @asynccontextmanager
    async def host(version, env_id, args=None, **rest):
        config = server_config(arena.address, env_id, args, serve={"python": interpreter(version)}, **rest)
        async with serving(config) as (client, _):
            yield client
        assert arena.stats()["blocks"] == 0

    return host


def check_arrays(arena, samples):
    """Every array of the branches in the arena is what the engine had: by its functions of token and position."""
    oracle = Oracle()
    for sample in samples:
        arena.adopt(sample.handles)
        batch = assemble(arena, pack([sample], seq_len=1024, num_ranks=1)[0][0])
        fed, sampled = np.arange(sample.T - 1), np.flatnonzero(batch.loss_mask)
        assert len(sampled) == sample.S
        assert np.array_equal(batch.routing[:-1], oracle.routing(0, batch.tokens[:-1], fed))
        assert np.array_equal(batch.logprobs[sampled], oracle.logprobs(0, batch.tokens[sampled], sampled))
        assert np.array_equal(batch.head_ids[sampled], oracle.head(0, batch.tokens[sampled], sampled, 4)[0])
        kept = [oracle.kept(0, int(batch.tokens[position]), int(position)) for position in sampled]
        assert batch.mask_ids.tolist() == [token for row in kept for token in row]
        arena.free(sample.handles)


@BOTH
async def test_episodes_come_back_as_references_with_every_array_captured(version, env_id, hosts, spec, arena, engine):
    async with hosts(version, env_id, {"taskset": {"seed": 3}} if version == "v1" else {"seed": 3}) as client:
        tasks = await client.tasks("train", 0, 4)
        assert [task.id for task in tasks] == ["0", "1", "2", "3"]
        assert len(await client.tasks("train", 990, 20)) == 10
        results = await asyncio.gather(*(rollout(client, task, spec(), task.seed) for task in tasks))
        for task, result in zip(tasks, results, strict=True):
            assert result.success, result.error
            (sample,) = result.samples
            word, said = (message["content"] for message in read_text(arena, sample))
            assert word == task.data["answer"][::-1]
            hits = sum(letter in said for letter in word) / len(word)
            assert result.rewards == {"letters": hits, "exact": 0.0}
            assert (result.reward, result.stop_reason, result.num_turns) == (hits, "stop", 1)
            assert result.metrics == ({"reply_length": float(len(said))} if version == "v1" else {"num_turns": 1.0})
            check_arrays(arena, result.samples)
        shown = await rollout(client, tasks[0], spec(), keep="eval")
        assert [message["role"] for message in shown.messages] == ["user", "assistant"]
        assert shown.samples == ()
        for bad in (_cancelled, _failing, _without_room):
            await bad(client, tasks[0], spec, engine)
        result = await rollout(client, tasks[0], spec(), 9)
        assert result.success, result.error
        check_arrays(arena, result.samples)


async def _cancelled(client, task, spec, engine):
    """It ends at the engine, too."""
    engine.open.clear()
    asking = asyncio.create_task(rollout(client, task, spec()))
    await until(lambda: engine.running == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: engine.running == 0)
    engine.open.set()


async def _failing(client, task, spec, engine):
    """What the engine did is the episode's error, not what verifiers saw of it."""
    engine.open.clear()
    result = await rollout(client, task, spec(timeout_s=0.3))
    engine.open.set()
    assert (result.success, result.error.type) == (False, "EngineError"), result
    engine.routing = False
    result = await rollout(client, task, spec())
    engine.routing = True
    assert (result.success, result.error.type) == (False, "MissingField"), result


async def _without_room(client, task, spec, engine):
    """A prompt as long as the context is scored, and trains nothing."""
    result = await rollout(client, task, spec(max_model_len=16, max_tokens=4))
    assert (result.success, result.reward, result.samples) == (True, 0.0, ()), result.error


@pytest.mark.parametrize("version", ["v1", "v0"])
def test_it_trains_for_five_steps_on_the_embedded_engine(version, interpreter, run):
    python = interpreter(version)
    one = run(EXAMPLES / f"{version}.toml", **{"orchestrator.train.source.0.serve.python": python})
    shutil.copy(EXAMPLES / f"reverse_text_{version}.py", one.output_dir.parent)
    code, output = one.start().finish(280)
    print(output)  # `.ci/run clients` shows it
    assert code == 0, output
    one.assert_nothing_left()
    lines = one.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    last = lines[-1]
    assert last["arena/created"] == last["arena/freed"] >= 5 * 32
    assert (last["arena/blocks"], last["arena/used_bytes"]) == (0, 0)
    for line in lines:
        assert (line["episodes/failed"], line["payload/rejected_branches"]) == (0, 0)
        assert (line["payload/bytes"] > 0, line["payload/routing_missing_fraction"]) == (True, 0.0)
    assert lines[0]["train/mismatch_kl"] <= 1e-6  # before any update the trainer has what the sampler had


async def test_agents_of_an_episode_and_their_turns(hosts, spec, arena):
    """verifiers' own user-sim: a user played by the policy, whose tokens do not train, and the assistant."""
    async with hosts("v1", "verifiers:reverse-text-v1", {"id": "user-sim", "user": {"max_turns": 3}}) as client:
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec(max_model_len=2048))
        assert result.success, result.error
        (sample,) = result.samples
        assert (result.num_turns, result.num_tokens) == (3, sample.S)
        roles = [message["role"] for message in read_text(arena, sample)]
        assert roles == ["user", "assistant"] * 3
        check_arrays(arena, result.samples)


def tool_call(engine, model_dir, name):
    """The fake engine's first reply calls a tool; the later ones are its own."""
    chat, draw = chat_format(str(model_dir)), engine._draw
    call = [*chat._ids(f'<tool_call>{{"name": "{name}", "arguments": {{"text": "abc"}}}}</tool_call>'), IM_END]
    engine._draw = lambda start, room, stop_id: (
        draw(start, room, stop_id) if len(engine.requests) > 1 else (call, "stop")
    )


@pytest.mark.parametrize(
    ("version", "env_id", "args", "name"),
    [
        ("v1", "verifiers:tool-v1", {}, "letters_upper"),
        ("v0", "legacy:turns-v0", {"tools": True}, "upper"),
    ],
)
async def test_a_tool_is_called_and_the_branch_goes_on(
    version, env_id, args, name, hosts, spec, arena, engine, model_dir
):
    tool_call(engine, model_dir, name)
    async with hosts(version, env_id, args) as client:
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec(max_tokens=128))
        assert result.success, result.error
        (sample,) = result.samples
        said = [message for message in read_text(arena, sample) if message["role"] != "system"]
        assert [message["role"] for message in said] == ["user", "assistant", "tool", "assistant"]
        assert (said[2]["content"], result.num_turns) == ("ABC", 2)
        assert result.reward == (1.0 if version == "v1" else 2.0)
        check_arrays(arena, result.samples)


async def test_turns_of_v0_are_one_sequence_and_a_full_context_ends_them(hosts, spec, arena):
    async with hosts("v0", "legacy:turns-v0", {"max_turns": 40}) as client:
        (task,) = await client.tasks("train", 0, 1)
        result = await rollout(client, task, spec(max_model_len=200))
        assert result.success, result.error
        (sample,) = result.samples
        assert result.reward == result.num_turns / 2 >= 1.5
        assert (result.stop_reason, 150 < sample.T <= 200) == ("prompt_too_long", True)
        check_arrays(arena, result.samples)


async def test_a_rubric_with_functions_of_a_group_scores_groups(hosts, spec, arena, engine):
    engine.oracle = Oracle(seed=5)
    async with hosts("v0", "legacy:reverse-text-v0", {"grouped": True}) as client:
        assert (await client.info())["scores_groups"] is True
        (task,) = await client.tasks("train", 0, 1)
        results = await client.run_group(
            task, model=spec(), group_id="g", seeds=[1, 2, 3], keep="train", tag="run/test/g"
        )
        for result in results:
            assert result.success, result.error
            assert result.rewards["longest"] == 0.25  # the fake engine says the same to all: all are longest
            assert result.reward == pytest.approx(sum(result.rewards.values()))
        arena.discard("run")


async def test_what_its_own_code_raises_ends_the_server_with_it(hosts):
    with pytest.raises(TasksetError, match="the data set is not here"):
        async with hosts("v0", "legacy:turns-v0", {"fails": True}):
            raise AssertionError("it loaded")
