"""Recorded episodes of verifiers 0.4 and 0.1.14 become branches: the right tokens, masks, arrays and rewards."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from shmrl.env.chat import chat_format
from shmrl.envs.verifiers.records import episode_of, finished, scores_of
from shmrl.errors import EngineError, EnvError
from shmrl.payload import assemble, encode, pack, read_text
from shmrl.types import ErrorInfo
from tests.envs.verifiers.replaying import path, replaying, wire
from tests.support.fake_engine import Oracle
from tests.support.model_dir import IM_END

DATA = Path(__file__).parents[2] / "data" / "verifiers"
V1 = [json.loads(line) for line in (DATA / "v1_traces.jsonl").read_text().splitlines()]
V0 = json.loads((DATA / "v0_rollout_output.json").read_text())
REWARD = {"exact": {"score": 1.0, "weight": 1.0}}


def node(role, content, parent=None, sampled=False):
    return {"parent": parent, "message": {"role": role, "content": content}, "sampled": sampled}


def record(*traces, ok=True, errors=()):
    """An episode of traces, each (id, nodes, changes)."""
    base = {"ok": True, "errors": [], "metrics": {}, "rewards": REWARD, "stop_condition": "agent_completed"}
    agent = {"name": "agent", "trainable": True}
    made = [{**base, "id": name, "nodes": nodes, "agent": agent, **changes} for name, nodes, changes in traces]
    return {"ok": ok, "errors": list(errors), "traces": made}


def expected(chat, trace):
    """(ids, which were sampled) of every path from the root to a leaf, built from the texts alone."""
    nodes = trace["nodes"]
    leaves = set(range(len(nodes))) - {node.get("parent") for node in nodes}
    for leaf in sorted(leaves):
        ids, mask, asked = [], [], []
        for step in (nodes[index] for index in path(trace, leaf)):
            asked.append(wire(step["message"]))
            if not step["sampled"]:
                continue
            prompt = chat.prompt(asked[:-1])
            reply = [*chat._ids(asked[-1]["content"]), IM_END]
            mask += [False] * (len(prompt) - len(ids)) + [True] * len(reply)
            ids = [*prompt, *reply]
        yield ids, mask


@pytest.mark.parametrize("episode", V1, ids=lambda episode: episode["task"]["data"]["answer"])
async def test_a_recorded_v1_episode(episode, spec, model_dir, arena):
    chat, (trace,) = chat_format(str(model_dir)), episode["traces"]
    async with replaying(spec, model_dir) as replay:
        await replay.play(episode)
        scored = finished(episode, replay.sessions, replay.model)
        length = float(len(trace["nodes"][1]["message"]["content"]))
        assert (scored.reward, scored.rewards, scored.metrics) == (1.0, {"exact": 1.0}, {"reply_len": length})
        assert scored.stop_reason == "stop"
        (branch,) = replay.model.branches({"reward": scored.reward})
        sample = encode(arena, branch, "run/test/g/0")
    ((ids, mask),) = expected(chat, trace)
    assert chat.text(np.array(ids)[mask]) == trace["nodes"][1]["message"]["content"] == trace["task"]["data"]["answer"]
    assert read_text(arena, sample) == [wire(one["message"]) for one in trace["nodes"]]
    batch = assemble(arena, pack([sample], seq_len=256, num_ranks=1)[0][0])
    assert (batch.tokens.tolist(), batch.loss_mask.tolist()) == (ids, mask)
    _check_arrays(batch, np.array(ids), np.flatnonzero(mask))
    arena.free(sample.handles)


def _check_arrays(batch, tokens, sampled):
    """Every array of the assembled branch is the engine's: rows of the tokens that were fed, and of those sampled."""
    oracle, fed = Oracle(), np.arange(len(tokens) - 1)
    assert np.array_equal(batch.routing[:-1], oracle.routing(0, tokens[:-1], fed))
    assert batch.routing_covered.tolist() == [True] * len(fed) + [False]
    expected_logprobs = np.zeros(len(tokens), np.float32)
    expected_logprobs[sampled] = oracle.logprobs(0, tokens[sampled], sampled)
    assert np.array_equal(batch.logprobs, expected_logprobs)
    ids, logprobs = oracle.head(0, tokens[sampled], sampled, 4)
    assert np.array_equal(batch.head_ids[sampled], ids)
    assert np.array_equal(batch.head_logprobs[sampled], logprobs.astype(np.float32))
    kept = [oracle.kept(0, int(tokens[position]), int(position)) for position in sampled]
    assert batch.mask_ids.tolist() == [token for row in kept for token in row]
    assert batch.mask_counts[sampled].tolist() == [len(row) for row in kept]


async def test_a_graph_that_forks_is_a_branch_per_leaf_and_no_token_trains_twice(spec, model_dir, arena):
    chat = chat_format(str(model_dir))
    nodes = [
        node("system", "you reverse"),
        node("user", "abc", 0),
        node("assistant", "cba", 1, True),
        node("user", "de", 2),
        node("assistant", "ed", 3, True),
        node("user", "fg", 2),
        node("assistant", "gf", 5, True),
        node("assistant", "bca", 1, True),
    ]
    # the last two are asked from places that are spoken for: other branches, whose past is not trained again
    episode = record(("one", nodes, {}))
    async with replaying(spec, model_dir) as replay:
        await replay.play(episode)
        finished(episode, replay.sessions, replay.model)
        branches = replay.model.branches({})
    assert replay.model.turns == 4
    built = list(expected(chat, episode["traces"][0]))
    assert [branch.tokens.tolist() for branch in branches] == [ids for ids, _ in built]
    first, second, third = (branch.loss_mask.tolist() for branch in branches)
    assert (first, third) == (built[0][1], built[2][1])
    start = len(chat.prompt([wire(nodes[i]["message"]) for i in (0, 1)]))
    assert second == [False] * start + [False] * 4 + built[1][1][start + 4 :]  # "cba" and its end are the first's
    samples = [encode(arena, branch, "run/test/g/0") for branch in branches]
    for sample, (ids, _) in zip(samples, built, strict=True):  # rows at the boundary of two turns too
        batch = assemble(arena, pack([sample], seq_len=256, num_ranks=1)[0][0])
        _check_arrays(batch, np.array(ids), np.flatnonzero(batch.loss_mask))
    arena.discard("run")


async def test_agents_record_apart_and_only_the_trainable_ones_train(spec, model_dir):
    solver, judge = {"name": "solver", "trainable": True}, {"name": "judge", "trainable": False}
    nodes = [node("user", "abc"), node("assistant", "cba", 0, True)]
    asked = [node("user", "is it cba?"), node("assistant", "yes", 0, True)]
    episode = record(("a", nodes, {"agent": solver}), ("b", nodes, {"agent": solver}), ("c", asked, {"agent": judge}))
    episode["traces"][1]["rewards"] = {"exact": {"score": 0.5, "weight": 1.0}, "length": {"score": 1.0, "weight": 0.25}}
    episode["traces"][2]["rewards"] = {"exact": {"score": 100.0, "weight": 1.0}}
    async with replaying(spec, model_dir) as replay:
        await replay.play(episode)
        scored = finished(episode, replay.sessions, replay.model)
        texts = [branch.messages[-1]["content"] for branch in replay.model.branches({})]
    assert texts == ["cba", "cba"]
    assert (scored.reward, scored.rewards) == (0.875, {"exact": 0.75, "length": 0.25})


def test_parts_are_named_after_their_agents_where_these_differ():
    one = {"name": "white", "trainable": True}
    two = {"name": "black", "trainable": True}
    episode = record(("a", [], {"agent": one, "metrics": {"moves": 3.0}}), ("b", [], {"agent": two, "rewards": {}}))
    scored = episode_of(episode)
    assert (scored.reward, scored.rewards, scored.metrics) == (0.5, {"white/exact": 1.0}, {"white/moves": 3.0})


def test_why_a_trace_stopped_is_told():
    assert episode_of(record(("a", [], {"stop_condition": "max_turns"}))).stop_reason == "max_turns"
    nothing = record(("a", [], {"rewards": {"exact": None}, "metrics": {"n": None}}))  # scoring that did not run
    assert (episode_of(nothing).rewards, episode_of(nothing).metrics) == ({}, {})


async def test_a_failed_episode_is_its_error_and_trains_nothing(spec, model_dir):
    error = [{"type": "TaskError", "message": "the reward raised"}, {"type": "EnvError", "message": "so it ended"}]
    nodes = [node("user", "abc"), node("assistant", "cba", 0, True)]
    episode = record(("a", nodes, {"ok": False, "errors": error[:1]}), ok=False, errors=error[1:])
    async with replaying(spec, model_dir) as replay:
        await replay.play(episode)
        with pytest.raises(EnvError) as caught:
            finished(episode, replay.sessions, replay.model)
        info = ErrorInfo.of(caught.value)
        assert (info.type, info.message, info.chain) == (
            "EnvError",
            "EnvError: so it ended",
            ("EnvError: TaskError: the reward raised",),
        )
        assert replay.model.branches({}) == []
        # what the engine said is better than what verifiers saw of it
        replay.sessions["a"].error = EngineError("the engine is gone")
        with pytest.raises(EngineError, match="the engine is gone"):
            finished(episode, replay.sessions, replay.model)
    with pytest.raises(EnvError, match="verifiers recorded no error"):
        finished(record(ok=False), {}, replay.model)


async def test_a_recorded_v0_rollout(spec, model_dir):
    chat = chat_format(str(model_dir))
    texts = [re.search(r"content='(.*?)'", said)[1] for said in (*V0["prompt"], *V0["completion"])]
    nodes = [node("user", texts[0]), node("assistant", texts[1], 0, True)]
    async with replaying(spec, model_dir) as replay:
        await replay.play(record(("a", nodes, {})))
        (branch,) = replay.sessions["a"].model.branches({})
    ((ids, mask),) = expected(chat, {"nodes": nodes})
    assert (branch.tokens.tolist(), branch.loss_mask.tolist()) == (ids, mask)
    assert chat.text(branch.tokens[branch.loss_mask]) == V0["answer"]
    weights = {"exact": 1.0, "num_turns": 0.0}
    assert scores_of(V0, weights) == (1.0, {"exact": 1.0}, {"num_turns": 1.0})
    assert scores_of({"reward": None, "metrics": None}, weights) == (0.0, {}, {})
