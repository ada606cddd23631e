"""An OpenAI-style client at the worker's endpoint: what it says becomes branches; what is wrong is said in HTTP."""

import asyncio
import json

import aiohttp
import numpy as np
import pytest

from shmrl.env.chat import chat_format
from shmrl.env.endpoint import SESSION, Endpoint
from shmrl.env.model import Model, ModelSpec
from shmrl.errors import EngineError, EnvError
from shmrl.inference.client import EngineClient
from tests.env.conftest import until

USER = {"role": "user", "content": "a"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
async def endpoint():
    async with Endpoint() as endpoint:
        yield endpoint


@pytest.fixture
async def post(endpoint):
    """post(body, session="s") -> (status, JSON)."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:

        async def send(body, session="s", **headers):
            body = {"model": "policy", **body} if isinstance(body, dict) else body
            named = {SESSION: session, **headers}
            async with http.post(f"{endpoint.url}/chat/completions", json=body, headers=named) as answer:
                return answer.status, await answer.json(content_type=None)

        yield send


@pytest.fixture
async def model(engine, spec, model_dir):
    """model(max_turns=..., **spec changes): a Model bound to the fake engine."""
    client = EngineClient([engine.url])
    chat = chat_format(str(model_dir))
    yield lambda max_turns=None, **changes: Model(
        ModelSpec.from_wire(spec(**changes)), chat, client, max_turns=max_turns
    )
    await client.aclose()


async def said(post, messages, **more):
    status, reply = await post({"messages": messages, **more})
    assert status == 200, reply
    return reply["choices"][0]


async def test_a_conversation_goes_on_by_ids_however_a_client_sends_it_back(post, endpoint, model):
    session = endpoint.open("s", model())
    first = await said(post, [USER])
    answer = first["message"]
    assert first["finish_reason"] == "stop"
    for again in (
        {**answer, "refusal": None, "tool_calls": None, "reasoning_content": None},
        {**answer, "content": [{"type": "text", "text": answer["content"]}], "name": "agent"},
    ):
        await said(post, [USER, again, {"role": "user", "content": "b"}])
    lengths = [len(conversation.turns) for conversation in session.model.conversations]
    assert lengths == [2, 1]  # the second question after the same reply is another branch
    one, two = session.model.branches({})
    shared = session.model.conversations[0].turns[0][1]
    assert one.tokens[:shared].tolist() == two.tokens[:shared].tolist()


async def test_a_reply_with_tool_calls_is_recognised_though_its_empty_content_is_gone(post, endpoint, model):
    session = endpoint.open("s", model())
    (reply,) = [await said(post, [USER])]
    message = session.model.conversations[0].turns[0][0][-1]
    session.said.clear()
    message.update(content="", tool_calls=[CALL])
    session.reply(message)
    assert reply
    back = {"role": "assistant", "tool_calls": [CALL]}
    await said(post, [USER, back, {"role": "tool", "tool_call_id": "call_0", "content": "1"}])
    assert [len(conversation.turns) for conversation in session.model.conversations] == [2]


async def test_only_max_tokens_of_a_request_counts(post, endpoint, model, engine):
    endpoint.open("s", model(max_tokens=7))
    await said(post, [USER], max_completion_tokens=2, temperature=0.1, top_p=0.2)
    await said(post, [{"role": "user", "content": "b"}], max_tokens=100)
    params = [request["sampling_params"] for request in engine.requests]
    assert [(p["max_tokens"], p["temperature"], p["top_p"]) for p in params] == [(2, 1.0, 0.9), (7, 1.0, 0.9)]


async def test_usage_and_shape_are_openai_s(post, endpoint, model):
    endpoint.open("s", model())
    _, reply = await post({"messages": [USER]})
    assert reply["object"] == "chat.completion"
    usage = reply["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert reply["choices"][0]["index"] == 0


async def test_a_stream_is_the_whole_reply_in_one_event(endpoint, model):
    session = endpoint.open("s", model())
    headers = {"Authorization": f"Bearer {endpoint.key}", SESSION: "s"}
    async with aiohttp.ClientSession(headers=headers) as http:
        body = {"messages": [USER], "stream": True}
        async with http.post(f"{endpoint.url}/chat/completions", json=body) as answer:
            first, last, _ = (await answer.text()).split("\n\n")
    (choice,) = json.loads(first.removeprefix("data: "))["choices"]
    assert choice["delta"]["content"] == session.model.conversations[0].messages[-1]["content"]
    assert (choice["finish_reason"], last) == ("stop", "data: [DONE]")


async def test_a_model_that_is_exhausted_says_so_as_vllm_does(post, endpoint, model):
    endpoint.open("s", model(max_model_len=20))
    status, reply = await post({"messages": [{"role": "user", "content": "long" * 10}]})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 20 tokens; the prompt has" in reply["error"]["message"]
    session = endpoint.open("s", model(max_turns=1))
    first = await said(post, [USER])
    status, reply = await post({"messages": [USER, first["message"], USER]})
    assert (status, reply["error"]["code"]) == (400, "max_turns_reached")
    assert session.error is None  # limits are no faults


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "a request is a map with messages"),
        ({"messages": "hello"}, "a request is a map with messages"),
        ({"messages": ["hello"]}, "a message is a map, not a str"),
        ({"messages": [USER], "n": 2}, "n = 2: one completion per request"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url: only text is supported"),
        ({"messages": [{"content": "a"}]}, "a message is a mapping with a role"),
        ({"messages": [USER], "max_tokens": -3}, "a reply has at least one token"),
        ({"messages": [USER], "max_tokens": "many"}, "TypeError"),
    ],
)
async def test_a_bad_request_is_refused_and_remembered(post, endpoint, model, body, said):
    session = endpoint.open("s", model())
    status, reply = await post(body)
    assert status == 400
    assert said in reply["error"]["message"]
    assert isinstance(session.error, EnvError | TypeError)
    assert session.model.conversations == []
    assert (await post({"messages": [USER]}))[0] == 200


async def test_an_engine_s_error_is_kept_for_whoever_ran_the_episode(post, endpoint, model, engine):
    engine.open.clear()
    session = endpoint.open("s", model())
    session.model._engine._timeout_s = 0.2
    status, reply = await post({"messages": [USER]})
    assert (status, reply["error"]["code"]) == (502, "EngineError")
    assert isinstance(session.error, EngineError)


async def test_a_client_that_leaves_takes_its_request_with_it(post, endpoint, model, engine):
    engine.open.clear()
    endpoint.open("s", model())
    asking = asyncio.create_task(post({"messages": [USER]}))
    await until(lambda: engine.running == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: engine.running == 0)


async def test_who_has_no_key_or_no_episode_is_refused(post, endpoint, model):
    endpoint.open("s", model())
    assert (await post({"messages": [USER]}, Authorization="Bearer other"))[0] == 401
    assert (await post({"messages": [USER]}, session="other"))[0] == 404
    endpoint.close("s")
    endpoint.close("s")
    assert (await post({"messages": [USER]}))[0] == 404


async def test_parts_of_an_episode_record_apart_and_join(post, endpoint, model):
    whole = model()
    parts = [whole.part(index) for index in range(2)]
    for index, part in enumerate(parts):
        endpoint.open(str(index), part)
        assert (await post({"messages": [USER]}, session=str(index)))[0] == 200
    assert whole.conversations == []
    whole.join(parts[1])
    (branch,) = whole.branches({})
    assert (whole.turns, whole.num_tokens, branch.S) == (1, parts[1].num_tokens, parts[1].num_tokens)
    whole.join(parts[0])
    assert len(whole.branches({})) == 2
    assert np.array_equal(*(one.tokens for one in whole.branches({})))  # the fake engine draws by position alone
