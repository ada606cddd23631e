"""The server over real sockets: vLLM's forms, errors and controls."""

import asyncio
import base64
import io
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from shmrl.errors import PortInUse
from shmrl.inference.answers import parse_metrics
from shmrl.inference.client import EngineClient
from shmrl.inference.embedded.server import bind, run
from tests.inference.conftest import ServerProcess

DATA = Path(__file__).parents[1] / "data" / "vllm"
PROMPT = list(range(1, 13))
Http = Callable[..., Awaitable[tuple[int, Any]]]


def recorded(name: str) -> Any:
    return json.loads((DATA / f"v0.32.0_v2runner_interp_{name}.json").read_text())


def shape_of(value: Any, path: str = "") -> Any:
    """Keys and JSON types all the way down; texts, ids and base64 bodies count by type, maps by token as one entry."""
    if isinstance(value, dict):
        if value and all(key.startswith("token_id:") for key in value):
            return {"token_id:N": shape_of(next(iter(value.values())))}
        return {key: shape_of(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [] if path == "bytes" else [shape_of(item) for item in value]
    return type(value).__name__


def decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


def assert_same_routing(ours: str, theirs: str) -> np.ndarray:
    a, b = decoded(ours), decoded(theirs)
    assert (a.shape, a.dtype, a.flags.c_contiguous) == (b.shape, b.dtype, b.flags.c_contiguous)
    assert len(base64.b64decode(ours)) == len(base64.b64decode(theirs))
    return a


async def test_generate_answers_like_the_recorded_0_32(http: Http) -> None:
    sampling = {"max_tokens": 4, "temperature": 1.0, "top_k": 8, "seed": 3, "logprobs": 3, "ignore_eos": True}
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": sampling, "stream": False}
    status, answer = await http("POST", "/inference/v1/generate", body)
    theirs = recorded("inference_v1_generate")
    assert (status, shape_of(answer)) == (200, shape_of(theirs))
    ours, other = answer["choices"][0], theirs["choices"][0]
    assert assert_same_routing(ours["routed_experts"], other["routed_experts"]).shape == (15, 4, 2)
    assert [len(mask) for mask in ours["sampling_mask"]] == [8, 8, 8, 8]
    assert ours["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    for entry in ours["logprobs"]["content"]:
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token_id", "logprob", "rank")}
        assert len(entry["top_logprobs"]) == 3


async def test_excluded_head_entries_are_minus_9999_as_recorded(http: Http) -> None:
    cut = {"max_tokens": 6, "temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "logprobs": 20}
    _, answer = await http("POST", "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": cut})
    theirs = json.loads((DATA / "v0.32.0_v2_generate_topk_topp_minp.json").read_text())
    for choice in (answer["choices"][0], theirs["choices"][0]):
        for mask, entry in zip(choice["sampling_mask"], choice["logprobs"]["content"], strict=True):
            above = sorted(e["token_id"] for e in entry["top_logprobs"] if e["logprob"] > -9000)
            assert all(e["logprob"] == -9999.0 for e in entry["top_logprobs"] if e["token_id"] not in mask)
            assert above == mask or len(mask) > 20
            assert mask == sorted(mask)


async def test_completion_answers_like_the_recorded_0_32(http: Http) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 1.0,
        "top_k": 8,
        "top_p": 0.95,
        "seed": 3,
    }
    body |= {"logprobs": 4, "min_tokens": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    status, answer = await http("POST", "/v1/completions", body)
    theirs = recorded("completion_routed_experts")
    assert (status, shape_of(answer)) == (200, shape_of(theirs))
    ours = answer["choices"][0]
    assert_same_routing(ours["routed_experts"], theirs["choices"][0]["routed_experts"])
    assert ours["logprobs"]["tokens"] == [f"token_id:{token}" for token in ours["token_ids"]]
    assert all(len(top) in (4, 5) for top in ours["logprobs"]["top_logprobs"])
    assert ours["prompt_token_ids"] == PROMPT


async def test_chat_answers_like_the_recorded_0_32(http: Http) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 1.0}
    body |= {"top_k": 50, "seed": 1, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    status, answer = await http("POST", "/v1/chat/completions", body)
    theirs = recorded("chat_routed_experts")
    assert (status, shape_of(answer)) == (200, shape_of(theirs))
    # byte-level vocabularies without merges number their symbols alike, so even the prompt is the recorded one
    assert answer["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert_same_routing(answer["choices"][0]["routed_experts"], theirs["choices"][0]["routed_experts"])


async def test_n_choices_and_prompt_start(http: Http) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "top_k": 9, "n": 2, "seed": 5, "ignore_eos": True}
    body |= {"routed_experts_prompt_start": 10, "return_token_ids": True}
    _, answer = await http("POST", "/v1/completions", body)
    first, second = answer["choices"]
    assert [decoded(choice["routed_experts"]).shape for choice in (first, second)] == [(7, 4, 2), (7, 4, 2)]
    assert first["token_ids"] != second["token_ids"]
    _, alone = await http("POST", "/v1/completions", {**body, "n": 1, "seed": 6, "routed_experts_prompt_start": 0})
    assert alone["choices"][0]["token_ids"] == second["token_ids"]
    assert (decoded(alone["choices"][0]["routed_experts"])[10:] == decoded(second["routed_experts"])).all()


async def test_text_prompts_stop_strings_and_streams(http: Http) -> None:
    body = {"prompt": "hello", "max_tokens": 60, "seed": 9, "ignore_eos": True, "top_k": 40}
    _, whole = await http("POST", "/v1/completions", body)
    text = whole["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(10, len(text)) if text[i : i + 2].isascii())
    _, cut = await http("POST", "/v1/completions", {**body, "stop": stop})
    assert (cut["choices"][0]["text"], cut["choices"][0]["stop_reason"]) == (text[: text.index(stop)], stop)
    _, kept = await http("POST", "/v1/completions", {**body, "stop": stop, "include_stop_str_in_output": True})
    assert kept["choices"][0]["text"] == text[: text.index(stop) + 2]
    _, events = await http("POST", "/v1/completions", {**body, "stream": True})
    first, last = events.strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == text
    assert (last, "routed_experts" in first) == ("data: [DONE]", False)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 21}}, 400, "max allowed: 20"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"best_of": 2}}, 400, "'best_of'"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, 400, "one non-empty prompt"),
        ("/inference/v1/generate", {"token_ids": [512]}, 400, r"token ids in [0, 512), got 512"),
        ("/inference/v1/generate", {"token_ids": [1] * 1024}, 400, "maximum context length is 1024 tokens"),
        ("/inference/v1/generate", {"token_ids": [1], "stream": True}, 400, "stream must be false"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "The model `other` does not exist."),
        ("/v1/completions", {"prompt": [[1], [2]]}, 400, "one non-empty prompt"),
        ("/v1/completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "'frequency_penalty'"),
        ("/v1/completions", {"prompt": [1], "routed_experts_prompt_start": 2}, 400, "at most the prompt's 1 tokens"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages must be a list"),
        ("/v1/chat/completions", [], 400, "must be a JSON object"),
        ("/pause?mode=soon", None, 400, "mode must be abort, wait or keep"),
        ("/collective_rpc", {"method": "reload_weights"}, 400, "method must be 'shmrl_load_weights'"),
        (
            "/collective_rpc",
            {"method": "shmrl_load_weights", "args": ["/nowhere"]},
            500,
            "/nowhere is no model directory",
        ),
        ("/update_weight_version", {"new_version": 3}, 400, "new_version must be a non-empty string, got 3"),
        ("/nothing", None, 404, "Not Found"),
    ],
)
async def test_error_bodies(http: Http, path: str, body: Any, status: int, message: str) -> None:
    got, answer = await http("POST", path, body)
    assert got == status
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == status


async def test_over_limit_error_is_the_recorded_one(http: Http) -> None:
    theirs = json.loads((DATA / "v0.32.0_v1runner_logprobs_21_over_limit.json").read_text())
    body = {"token_ids": [1], "sampling_params": {"logprobs": 21}}
    assert await http("POST", "/inference/v1/generate", body) == (theirs["HTTP"], theirs["body"])


async def test_a_dropped_connection_aborts_its_request(http: Http, client: EngineClient) -> None:
    task = asyncio.ensure_future(client.generate(PROMPT, {"max_tokens": 1000, "ignore_eos": True}))
    await load(client, running=1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await load(client, running=0)
    _, text = await http("GET", "/metrics")
    assert 'finished_reason="abort"' in text


async def load(client: EngineClient, *, running: int) -> None:
    async with asyncio.timeout(30):  # the condition is another process's, so it can only be asked for
        while (await client.metrics())[client.urls[0]]["vllm:num_requests_running"] != running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_observing(http: Http, server: ServerProcess) -> None:
    assert (await http("GET", "/health"))[0] == 200
    _, models = await http("GET", "/v1/models")
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 1024)
    before = parse_metrics((await http("GET", "/metrics"))[1])
    await http("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True})
    after = parse_metrics((await http("GET", "/metrics"))[1])
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 5
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 12
    assert (after["vllm:kv_cache_usage_perc"], after["vllm:num_requests_waiting"]) == (0, 0)


async def test_weights_are_updated_and_labelled(
    client: EngineClient, http: Http, tiny_dir: Path, other_dir: Path
) -> None:
    ask = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    old = await client.generate(PROMPT, ask)
    await client.update_weights(str(other_dir), 7)
    assert (await http("GET", "/weight_info"))[1]["weight_version"] == "7"
    new = await client.generate(PROMPT, ask)
    await client.update_weights(str(tiny_dir), 0, mode="wait")
    assert await client.generate(PROMPT, ask) == old
    assert (new.token_ids != old.token_ids, new.weight_versions) == (True, [("7", 0, 8)])
    assert (await http("GET", "/is_paused"))[1] == {"is_paused": False}


# ---------------------------------------------------------------------------------------------------------- processes


def test_a_taken_port_names_its_holder(server: ServerProcess, client: EngineClient) -> None:
    with pytest.raises(PortInUse, match=rf"port {server.port} is in use by .*pid \d+"):
        bind("127.0.0.1", server.port)
    with pytest.raises(PortInUse):
        run("/nothing/is/loaded/before", "127.0.0.1", server.port)


DYING = """
from shmrl.inference.embedded.engine import Engine
admit = Engine._admit
def poisoned(engine):
    if any(13 in row.prompt for row, _ in engine._waiting):
        raise MemoryError("the engine is gone")
    admit(engine)
Engine._admit = poisoned
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_server_with_its_number(
    servers: Any, tiny_dir: Path, tmp_path: Path, how: signal.Signals
) -> None:
    process = ServerProcess(servers, tiny_dir, tmp_path / "log")
    async with EngineClient([process.url], timeout_s=1) as client:
        await client.health(120)
    process.signal(how)
    assert process.wait() == 128 + how, process.log.read_text()


async def test_the_death_of_the_engine_thread_ends_the_process(servers: Any, tiny_dir: Path, tmp_path: Path) -> None:
    process = ServerProcess(servers, tiny_dir, tmp_path / "log", first=DYING)
    async with EngineClient([process.url], timeout_s=1) as client, aiohttp.ClientSession() as session:
        await client.health(120)
        url = process.url + "/inference/v1/generate"
        async with session.post(url, json={"token_ids": [13]}) as response:
            assert response.status == 500
            assert "the engine is gone" in (await response.json())["error"]["message"]
    assert process.wait() == 1
    assert "MemoryError: the engine is gone" in process.log.read_text()
