"""The model client alone: how calls become branches, how limits end a conversation, what is recorded."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from shmrl.env.chat import chat_format
from shmrl.env.model import Model, ModelSpec, ScriptedModel
from shmrl.errors import EngineError, EnvError, PayloadError, ProtocolError
from shmrl.inference.answers import Generation
from shmrl.inference.client import EngineClient
from tests.support.fake_engine import Oracle

USER = {"role": "user", "content": "a"}


@pytest.fixture
async def make(engine, spec, model_dir):
    """make(max_turns=..., **spec changes): a Model bound to the fake engine."""
    client = EngineClient([engine.url])
    chat = chat_format(str(model_dir))
    yield lambda max_turns=None, seed=0, **changes: Model(
        ModelSpec.from_wire(spec(**changes)), chat, client, seed=seed, max_turns=max_turns
    )
    await client.aclose()


async def test_a_conversation_goes_on_by_ids(make, engine):
    model = make()
    messages = [USER]
    for _ in range(3):
        reply = (await model.chat.completions.create(messages=messages)).choices[0]
        messages += [reply.message, {"role": "user", "content": "b"}]
    (conversation,) = model.conversations
    prompts = [request["token_ids"] for request in engine.requests]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
    assert conversation.builder.tokens[: len(prompts[2])] == prompts[2]
    (branch,) = model.branches({})
    assert (model.num_tokens, branch.T - 1) == (branch.S, branch.R)
    # Rows that are there already are not asked for again: each turn begins with the token that ended the last one.
    starts = [request["sampling_params"].get("routed_experts_prompt_start", 0) for request in engine.requests]
    assert starts == [0, len(prompts[0]) + len_of(model, 0) - 1, len(prompts[1]) + len_of(model, 1) - 1]


def len_of(model, turn):
    """Sampled tokens of a turn of the only conversation."""
    text = model.conversations[0].messages[2 * turn + 1]["content"]
    return len(text) + 1


async def test_a_call_that_does_not_continue_starts_a_branch_on_the_same_ids(make):
    model = make()
    first = (await model.create(messages=[USER])).choices[0].message
    await model.create(messages=[USER, first, {"role": "user", "content": "b"}])
    await model.create(messages=[USER, first, {"role": "user", "content": "c"}])
    await model.create(messages=[{"role": "system", "content": "other"}, USER])
    lengths = [len(conversation.turns) for conversation in model.conversations]
    assert lengths == [2, 1, 1]
    one, two, three = model.branches({})
    shared = model.conversations[0].turns[0][1]
    assert one.tokens[:shared].tolist() == two.tokens[:shared].tolist()
    assert one.loss_mask[:shared].any()
    assert not two.loss_mask[:shared].any()
    assert (three.meta["branch"], one.S + two.S + three.S) == (2, model.num_tokens)


async def test_two_calls_from_the_same_place_at_once_are_two_branches(make, engine):
    model = make()
    first = (await model.create(messages=[USER])).choices[0].message
    asked = [USER, first, {"role": "user", "content": "b"}]
    await asyncio.gather(model.create(messages=asked), model.create(messages=asked))
    one, two = model.branches({})
    assert np.array_equal(one.tokens, two.tokens)
    assert model.num_tokens == one.S + two.S


async def test_an_aborted_reply_goes_on_where_it_stopped(make, engine):
    plain = make()
    await plain.create(messages=[USER])
    engine.abort_every = 2
    engine.version = 5
    engine.requests.clear()
    aborted = make(version=4)
    engine.requests.append({})  # so that the next request is the one that is aborted
    reply = (await aborted.create(messages=[USER])).choices[0]
    assert reply.finish_reason == "stop"
    assert len(engine.requests) == 3
    assert aborted.num_tokens == plain.num_tokens
    assert aborted.versions == (5, 5)
    (branch,) = aborted.branches({})
    assert (branch.R, branch.meta["version_start"]) == (branch.T - 1, 5)


class Answering:
    """An engine that always gives the same answer."""

    def __init__(self, ids, finish, version=0):
        self.answer = Generation(
            ids, finish, None, [-0.5] * len(ids), None, None, None, [(str(version), 0, len(ids))], ""
        )

    async def generate(self, token_ids, sampling, **rest):
        return self.answer


def plain_spec(model_dir):
    return ModelSpec((), str(model_dir), {"max_tokens": 100})


async def test_an_engine_that_only_aborts_is_given_up(model_dir):
    model = Model(plain_spec(model_dir), chat_format(str(model_dir)), Answering([], "abort"))
    with pytest.raises(EngineError, match="aborted 64 times"):
        await model.create(messages=[USER])


async def test_a_reply_of_no_tokens_records_nothing(model_dir):
    model = Model(plain_spec(model_dir), chat_format(str(model_dir)), Answering([], "stop"))
    assert await model.chat_text([USER]) == ""
    assert (model.turns, model.branches({}), model.versions) == (0, [], (0, 0))


async def test_two_versions_of_the_weights_are_seen(make, engine):
    model = make()
    reply = (await model.create(messages=[USER])).choices[0].message
    engine.version = 2
    await model.create(messages=[USER, reply, USER])
    assert model.versions == (0, 2)
    (branch,) = model.branches({})
    assert (branch.meta["version_start"], branch.meta["version_end"]) == (0, 2)


async def test_a_full_context_ends_the_conversation(make, engine):
    engine.oracle = Oracle(stop_every=0)
    model = make(max_model_len=40)
    first = (await model.create(messages=[USER])).choices[0]
    assert (first.finish_reason, len(first.message.content)) == ("length", 12)
    assert model.exhausted is False
    second = (await model.create(messages=[USER, first.message, USER])).choices[0]
    assert (second.finish_reason, second.message.content) == ("length", "")
    assert (model.exhausted, model.stop_reason, model.turns, len(engine.requests)) == (True, "length", 1, 1)


async def test_max_turns_ends_the_conversation(make, engine):
    model = make(max_turns=1)
    first = (await model.create(messages=[USER])).choices[0].message
    assert (model.exhausted, model.limit, model.stop_reason) == (True, "max_turns", "stop")
    assert (await model.chat_text([USER, first, USER])) == ""
    assert (model.stop_reason, len(engine.requests)) == ("max_turns", 1)


async def test_every_request_has_its_own_seed(make, engine):
    for seed in (1, 1, 2):
        model = make(seed=seed)
        reply = (await model.create(messages=[USER])).choices[0].message
        await model.create(messages=[USER, reply, USER])
    seeds = [request["sampling_params"]["seed"] for request in engine.requests]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4


async def test_truncated_sampling_without_masks_is_an_error_where_masks_are_declared(make, engine):
    engine.masks = False
    model = make()
    await model.create(messages=[USER])
    with pytest.raises(PayloadError, match="mask"):
        model.branches({})
    undeclared = make(fields=["routing"])
    await undeclared.create(messages=[USER])
    (branch,) = undeclared.branches({})
    assert sorted(branch.rows) == ["routing"]
    assert "top_p" not in branch.meta


async def test_missing_routing_is_an_error_where_it_is_declared(make, engine):
    engine.routing = False
    with pytest.raises(PayloadError, match="routing"):
        await make().create(messages=[USER])


async def test_calls_of_tools_are_parsed(model_dir):
    chat = chat_format(str(model_dir))
    ids = chat.reply_ids('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    model = Model(plain_spec(model_dir), chat, Answering(ids, "stop"))
    reply = (await model.create(messages=[USER], tools=[{"type": "function"}])).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls
    assert call["function"]["name"] == call.function.name == "add"
    assert call.function.arguments == "{}"
    answer = {"role": "tool", "content": "2"}
    await model.create(messages=[USER, reply.message, answer], tools=[{"type": "function"}])
    assert len(model.conversations) == 1


async def test_a_scripted_model_records_what_it_is_told(model_dir, spec):
    chat = chat_format(str(model_dir))
    model = ScriptedModel(ModelSpec.from_wire(spec(version=0)), chat, lambda messages: f"r{len(messages)}")
    first = (await model.create(messages=[USER])).choices[0].message
    await model.create(messages=[USER, first, USER])
    (branch,) = model.branches({})
    assert [message["content"] for message in model.conversations[0].messages] == ["a", "r1", "a", "r3"]
    assert (branch.S, branch.R, sorted(branch.rows)) == (6, 0, [])
    assert branch.logprobs.tolist() == [0.0] * branch.T
    assert (branch.meta["version_start"], branch.meta["version_end"]) == (0, 0)


async def test_a_message_that_is_none_is_refused(make):
    with pytest.raises(EnvError, match="role and a content"):
        await make().create(messages=["hello"])
    with pytest.raises(EnvError, match="max_tokens = 0"):
        await make().create(messages=[USER], max_tokens=0)


def test_a_model_map_is_checked(spec):
    with pytest.raises(ProtocolError, match=r"missing \['urls'\], unknown \['colour'\]"):
        ModelSpec.from_wire({"tokenizer": "", "sampling": {}, "colour": 1})
    with pytest.raises(ProtocolError, match=r"a map with max_tokens, not \{\}"):
        ModelSpec.from_wire({**spec(), "sampling": {}})
    with pytest.raises(ProtocolError, match="there are routing, head, mask"):
        ModelSpec.from_wire(spec(fields=["routng"]))
    with pytest.raises(ProtocolError, match="not list"):
        ModelSpec.from_wire([])
    assert ModelSpec.from_wire({**spec(), "logprobs_mode": "raw_logprobs"}).logprobs_mode == "raw"


async def test_arguments_of_other_clients_are_taken_or_refused(make, engine):
    """The model is there, whatever it is called; how it samples, the source says."""
    model = make()
    await model.create(model="policy", messages=[USER], max_tokens=2)
    with pytest.raises(EnvError, match=r"temperature, n: no argument here; how a model samples"):
        await model.create(messages=[USER], temperature=0.5, n=2)
