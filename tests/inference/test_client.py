"""The client: retries by class, several engines, both routes of generation, weight updates."""

import asyncio
import itertools
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shmrl.errors import EngineError
from shmrl.inference.client import STICKY_EXCESS, EngineClient
from tests.inference.conftest import free_port
from tests.support.fake_vllm import FakeVllm

DATA = Path(__file__).parents[1] / "data" / "vllm"
ANSWER = json.loads((DATA / "v0.32.0_v2runner_interp_inference_v1_generate.json").read_text())


# ---------------------------------------------------------------------------------------------------- a scripted engine


class Scripted:
    """An engine whose answers are a list: a status, or a callable that makes the response; the last one repeats."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.seen = list(answers), []
        self.url = f"http://127.0.0.1:{free_port()}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path_qs, await request.text()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            return await answer(request)
        body = ANSWER if answer == 200 else {"error": {"message": f"said {answer}"}}
        return web.json_response(body, status=answer)

    @asynccontextmanager
    async def serving(self) -> Any:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rsplit(":", 1)[1])).start()
        yield self
        await runner.cleanup()


def sends(body: bytes) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return answer


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("answers", "tries"), [([500, 200], 2), ([reset, 503, 429, 503, 200], 5), ([reset, 500, 200], 3)]
)
async def test_what_is_retried(answers: list[Any], tries: int, caplog: pytest.LogCaptureFixture) -> None:
    async with Scripted(*answers).serving() as engine, EngineClient([engine.url], timeout_s=30) as client:
        assert (await client.generate([1], {})).token_ids == [113, 471, 498, 407]
        assert len(engine.seen) == tries
    assert all(record.levelno == logging.WARNING and engine.url in record.message for record in caplog.records)
    assert len(caplog.records) == len({str(answer) for answer in answers[:-1]})  # each kind is told once


@pytest.mark.parametrize(("answers", "tries", "message"), [([400], 1, "400: said 400"), ([500], 3, "500: said 500")])
async def test_what_is_given_up(answers: list[Any], tries: int, message: str) -> None:
    async with Scripted(*answers).serving() as engine, EngineClient([engine.url], timeout_s=30) as client:
        with pytest.raises(EngineError, match=message):
            await client.generate([1], {})
        assert len(engine.seen) == tries


async def test_an_answer_that_is_no_json_is_an_engine_error() -> None:
    async with Scripted(sends(b"<html>\xff")).serving() as engine, EngineClient([engine.url]) as client:
        with pytest.raises(EngineError, match=f"{engine.url} sent no JSON: Expecting value"):
            await client.generate([1], {})


async def test_a_long_answer_is_read_beside_the_loop() -> None:
    """9 MB of heads, 8192 tokens, in a form that a JSON library has to read: between two turns the loop's thread never
    works for long, another one reads them.

    Counted in CPU time of the threads, which a busy machine does not change.
    """
    entry = {"token_id": 7, "logprob": -0.25, "rank": 1}
    content = [{**entry, "top_logprobs": [entry] * 16}] * 8192
    choice = {"token_ids": [7] * 8192, "finish_reason": "length", "logprobs": {"content": content}}
    body = json.dumps({"choices": [choice]}).encode().replace(b'"token_id"', rb'"token\u005fid"')
    turns: list[float] = []

    async def turning() -> None:
        while True:
            turns.append(time.thread_time())
            await asyncio.sleep(0.001)

    async with Scripted(sends(body)).serving() as engine, EngineClient([engine.url]) as client:
        ticking = asyncio.ensure_future(turning())
        before = time.process_time()
        got = await client.generate([1], {"logprobs": 16})
        turns.append(time.thread_time())
        spent = time.process_time() - before
        ticking.cancel()
    assert list(got.top_logprobs) == [([7] * 16, [-0.25] * 16)] * 8192
    longest = max(b - a for a, b in itertools.pairwise(turns))
    assert longest < 0.3 * spent, (longest, spent)


async def test_the_deadline_covers_the_retries() -> None:
    async with EngineClient([f"http://127.0.0.1:{free_port()}"], timeout_s=0.5) as client:
        with pytest.raises(EngineError, match=r"(ClientConnectorError|TimeoutError).*attempt \d"):
            await client.generate([1], {})
        with pytest.raises(EngineError, match="is not healthy: ClientConnectorError"):
            await client.health(0.2)


@pytest.mark.parametrize(("status", "said"), [(200, None), (503, "status 503"), (404, "status 404")])
async def test_health_is_a_route_of_its_own(status: int, said: str | None) -> None:
    """Whatever the root says: 404 here."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status if request.path == "/health" else 404)

    async with Scripted(answer).serving() as engine, EngineClient([engine.url]) as client:
        with pytest.raises(EngineError, match=f"is not healthy: {said}") if said else nullcontext():
            await client.health(0.2)


async def test_without_descriptors_it_waits_until_there_are_some(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmrl.inference.client.MAX_FAULTS", 1)  # it is no fault of an engine
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Scripted(200).serving() as engine, EngineClient([engine.url], timeout_s=30) as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            waiting = asyncio.ensure_future(client.generate([1], {}))
            async with asyncio.timeout(10):
                while "Too many open files" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (await waiting).token_ids == [113, 471, 498, 407]
        assert len(engine.seen) == 1


async def test_an_engine_that_comes_up_late_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmrl.inference.client.MAX_FAULTS", 1)  # an engine that is away has none
    engine = Scripted(200)
    async with EngineClient([engine.url], timeout_s=30) as client:
        waiting = asyncio.ensure_future(client.generate([1], {}))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            while "ClientConnectorError" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with engine.serving():
            assert (await waiting).url == engine.url


async def test_cancelling_drops_the_connection() -> None:
    arrived, dropped = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            dropped.set()
        return web.Response()

    async with Scripted(hang).serving() as engine, EngineClient([engine.url]) as client:
        task = asyncio.ensure_future(client.generate([1], {}))
        await arrived.wait()
        task.cancel()
        async with asyncio.timeout(10):
            await dropped.wait()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_engine_that_does_not_answer_in_time_loses_its_request() -> None:
    arrived, dropped = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            dropped.set()
        return web.Response()

    async with Scripted(hang).serving() as engine, EngineClient([engine.url], timeout_s=0.5) as client:
        with pytest.raises(EngineError, match=rf"{engine.url}/inference/v1/generate: TimeoutError.*\(attempt 1\)"):
            await client.generate([1], {})
        assert arrived.is_set()
        async with asyncio.timeout(10):
            await dropped.wait()


async def test_what_a_dropped_engine_was_asked_for_fails_at_once() -> None:
    arrived = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        arrived.set()
        await asyncio.Event().wait()
        return web.Response()

    other = f"http://127.0.0.1:{free_port()}"
    async with Scripted(hang).serving() as engine, EngineClient([engine.url, other]) as client:
        pausing = asyncio.create_task(client.pause())
        async with asyncio.timeout(10):
            await arrived.wait()
            client.drop(engine.url)
            with pytest.raises(EngineError) as caught:
                await pausing
        assert set(caught.value.away) == {engine.url, other}
        assert client.urls == [other]


async def test_requests_spread_and_stick() -> None:
    gate, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def held(request: web.Request) -> web.StreamResponse:
        arrived.release()
        await gate.wait()
        return web.json_response(ANSWER)

    async with Scripted(held).serving() as a, Scripted(held).serving() as b, EngineClient([a.url, b.url]) as client:
        tasks = [asyncio.ensure_future(client.generate([i], {})) for i in range(8)]
        tasks += [asyncio.ensure_future(client.generate([i], {}, cache_salt="task-1")) for i in range(4)]
        async with asyncio.timeout(10):
            for _ in range(12):
                await arrived.acquire()
        gate.set()
        await asyncio.gather(*tasks)
        salted = [["task-1" in body for _, body in engine.seen].count(True) for engine in (a, b)]
        assert sorted(salted) == [0, 4]
        assert [len(a.seen) - salted[0], len(b.seen) - salted[1]] == [4, 4]


async def test_a_prefix_leaves_its_engine_when_that_is_much_busier_than_another() -> None:
    async with EngineClient(["http://a", "http://b"]) as client:
        home = client._choose("group-1", None)
        (other,) = {"http://a", "http://b"} - {home}
        client._inflight[home] = STICKY_EXCESS
        assert client._choose("group-1", None) == home
        client._inflight[home] += 1
        assert client._choose("group-1", None) == other
        client._inflight[other] = 5
        assert client._choose("group-1", None) == home
        assert client._choose("group-1", avoid=home) == other


async def test_engines_of_the_own_host_are_asked_first_and_others_when_they_fail() -> None:
    async with (
        Scripted(200, 200, *[503] * 20).serving() as near,
        Scripted(200).serving() as far,
        EngineClient([far.url, near.url], near=[near.url + "/"], timeout_s=30) as client,
    ):
        for salt in (None, "task-1", "task-2"):
            await client.generate([1], {}, cache_salt=salt)
        assert (len(near.seen), len(far.seen)) == (3, 1)


async def test_an_engine_without_the_token_route_is_asked_through_completions() -> None:
    asked = {"top_k": 8, "max_tokens": 3}
    async with FakeVllm(generate=False) as engine, EngineClient([engine.url]) as client:
        first = await client.generate(
            [1, 2, 3], asked, cache_salt="s", derive_masks=True, routed_experts_prompt_start=2
        )
        await client.generate([1, 2, 3], asked)
    assert engine.calls == ["/inference/v1/generate", "/v1/completions", "/v1/completions"]  # it is asked once
    body = engine.requests[0]["sampling_params"]
    assert (body["prompt"], body["logprobs"], body["cache_salt"]) == ([1, 2, 3], 8, "s")
    assert (body["return_token_ids"], body["return_tokens_as_token_ids"]) == (True, True)
    assert body["routed_experts_prompt_start"] == 2
    kept = [engine.oracle.kept(0, token, 3 + i) for i, token in enumerate(first.token_ids)]
    assert (list(first.sampling_mask), first.top_logprobs) == (kept, None)


@pytest.mark.parametrize("release", ["0.30", "0.32"])
async def test_masks_are_the_same_native_and_derived(release: Any) -> None:
    async with FakeVllm(release=release) as engine, EngineClient([engine.url]) as client:
        got = await client.generate([1, 2, 3], {"top_k": 8, "max_tokens": 6, "logprobs": 2}, derive_masks=True)
    kept = [engine.oracle.kept(0, token, 3 + i) for i, token in enumerate(got.token_ids)]
    assert list(got.sampling_mask) == kept
    assert got.top_logprobs is not None
    assert [len(ids) for ids, _ in got.top_logprobs] == [3] * len(kept)  # the sampled token and the best two
    assert got.weight_versions == ([] if release == "0.30" else [("0", 0, len(kept))])


async def test_versions_labels_sleep_and_wake() -> None:
    async with FakeVllm() as engine, EngineClient([engine.url]) as client:
        assert await client.versions() == ["0.30.0"]
        assert await client.labels() == ["default"]
        await client.update_weights("/w/step_3", 3)
        assert await client.labels() == ["3"]
        await client.sleep()
        await client.wake()
    assert engine.calls[-2:] == ["/sleep?level=1", "/wake_up"]
    async with EngineClient([engine.url]) as client:
        assert await client.labels() == [None]


async def test_a_worker_that_refuses_weights_keeps_the_old_ones() -> None:
    async with FakeVllm() as engine, EngineClient([engine.url]) as client:
        with pytest.raises(EngineError, match="shmrl_load_weights: ValueError: /w/broken is cut short"):
            await client.update_weights("/w/broken", 3)
        assert engine.label == "default"
        assert engine.calls == ["/pause?mode=keep", "/collective_rpc", "/resume"]


async def test_the_request_carries_what_was_asked() -> None:
    async with Scripted(200).serving() as engine, EngineClient([engine.url + "/"], token="t0k") as client:
        await client.generate([1, 2], {"top_k": 5}, routed_experts_prompt_start=2, request_id="r1", cache_salt="s")
    path, body = engine.seen[0]
    assert path == "/inference/v1/generate"
    sampling = {"logprobs": 0, "top_k": 5, "routed_experts_prompt_start": 2}
    assert json.loads(body) == {
        "token_ids": [1, 2],
        "sampling_params": sampling,
        "stream": False,
        "request_id": "r1",
        "cache_salt": "s",
    }


def failing(path: str) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.StreamResponse:
        status = 500 if request.path == path else 200
        return web.json_response({"error": {"message": "no such step"}}, status=status)

    return answer


async def test_weight_updates_go_everywhere_and_always_resume() -> None:
    good, bad = Scripted(200), Scripted(failing("/collective_rpc"))
    async with good.serving(), bad.serving(), EngineClient([good.url, bad.url]) as client:
        with pytest.raises(EngineError, match=f"{bad.url}/collective_rpc answered 500: no such step"):
            await client.update_weights("/w/step_3", 3, mode="wait")
    assert [path for path, _ in good.seen] == [
        "/pause?mode=wait",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    assert json.loads(good.seen[1][1]) == {"method": "shmrl_load_weights", "args": ["/w/step_3"], "kwargs": {}}
    assert json.loads(good.seen[3][1]) == {"new_version": "3"}
    assert [path for path, _ in bad.seen] == ["/pause?mode=wait", "/collective_rpc", "/resume"]


def test_importing_the_client_is_light() -> None:
    code = "import sys, shmrl.inference.client; print({'torch', 'transformers'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
