"""`RemoteEnv`: somebody else's sessions, as a client and as a source of a run."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shmrl.env import RemoteEnv
from shmrl.env.interface import Step
from shmrl.env.sessions import remote
from shmrl.errors import EnvError
from tests.env.conftest import rollout, server_config, serving
from tests.env.sessions.conftest import ENVS, serving_sessions
from tests.support.runs import free_ports


class Scripted:
    """A model that gives its replies in turn."""

    def __init__(self, *replies):
        self.replies, self.turns, self.limit = list(replies), 0, ""
        self.chat = self.completions = self

    @property
    def exhausted(self):
        return not self.replies

    async def create(self, messages):
        self.turns += 1
        reply = {"role": "assistant", "content": self.replies.pop(0)}
        return type("Completion", (), {"choices": [type("Choice", (), {"message": reply})]})


async def test_an_episode_over_a_remote_session(sessions):
    async with sessions("TextEcho") as client:
        env = RemoteEnv(client.server.url)
        await env.setup()
        assert client.server.facts()["active_sessions"] == 0
        task = env.tasks("train")[13]
        episode = await env.rollout(task, Scripted("x"))
        assert episode.reward == 1.0
        assert episode.stop_reason == "done"
        assert episode.messages[0]["content"].endswith("row=3 eval=None")
        assert await env.rollout(task, Scripted("x")) == episode
        assert client.server.facts()["active_sessions"] == 1
        await env.teardown()
        await client.free()


async def test_evaluations_share_one_session_that_opens_with_the_first(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        env = RemoteEnv(client.server.url)
        tasks = env.tasks("eval")
        episodes = await asyncio.gather(*(env.rollout(tasks[index], Scripted("x")) for index in range(4)))
        assert [episode.messages[0]["content"].partition(" row=")[2] for episode in episodes] == [
            f"{index} eval=True" for index in range(4)
        ]
        await env.teardown()


async def test_evaluations_may_share_more_sessions(sessions):
    async with sessions("TextEcho", max_concurrent_envs=2) as client:
        env = RemoteEnv(client.server.url, evaluation_sessions=2)
        tasks = env.tasks("eval")
        await asyncio.gather(*(env.rollout(tasks[index], Scripted("x")) for index in range(4)))
        assert client.server.facts()["active_sessions"] == 2
        await env.teardown()


async def test_replicas_in_turn(sessions):
    async with sessions("TextEcho") as one, sessions("TextEcho") as two:
        env = RemoteEnv([one.server.url, two.server.url])
        tasks = env.tasks("train")
        await asyncio.gather(*(env.rollout(tasks[index], Scripted("sleep 0.3")) for index in range(4)))
        assert one.server.facts()["active_sessions"] == two.server.facts()["active_sessions"] == 2
        await env.teardown()


async def test_the_first_refusal_is_told_with_the_sum(sessions, caplog):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        async with RemoteEnv(client.server.url).session() as session:
            await session.reset(seed=1)
            env = RemoteEnv(client.server.url, sessions=[32, 1])
            with caplog.at_level(logging.WARNING), pytest.raises(EnvError, match="up to 33 sessions here: 32"):
                await env.rollout(env.tasks("train")[0], Scripted("x"))
            await env.teardown()
        told = [record.message for record in caplog.records if "This run opens" in record.message]
        assert len(told) == 1
        assert "Server at capacity: 1/1 sessions active" in told[0]


async def test_a_session_that_times_out_is_dropped_and_its_episode_fails(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        env = RemoteEnv(client.server.url, timeout_s=0.3)
        task = env.tasks("train")[0]
        with pytest.raises(EnvError, match=r"no answer to \w+ within 0\.3 s"):
            await env.rollout(task, Scripted("sleep 60"))
        env.timeout_s = 60.0
        assert (await env.rollout(task, Scripted("x"))).reward == 1.0
        await env.teardown()


async def test_a_cancelled_episode_frees_its_session(sessions):
    async with sessions("TextEcho", max_concurrent_envs=1) as client:
        env = RemoteEnv(client.server.url)
        episode = asyncio.create_task(env.rollout(env.tasks("train")[0], Scripted("sleep 60")))
        await client.free(1, 5)
        while client.server._opened == 0 or not env._http:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        await client.free(0, 2)
        await env.teardown()


async def test_a_server_that_is_not_there_is_said_to_be(free_port):
    env = RemoteEnv(f"http://127.0.0.1:{free_port}")
    with pytest.raises(EnvError, match=rf"http://127\.0\.0\.1:{free_port} cannot be reached"):
        await env.setup()
    await env.teardown()


async def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(remote, "DIALS", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = RemoteEnv(url, timeout_s=0.2)
        with pytest.raises(EnvError, match=rf"{url} cannot be reached: no answer within 0\.2 s"):
            await env.setup()
        await env.teardown()
        assert await RemoteEnv(url, timeout_s=0.2).check() == f"{url} cannot be reached: no answer within 0.2 s"


@asynccontextmanager
async def saying(text):
    """A server that answers every message of a session with one text; its URL."""

    async def ws(request):
        answering = web.WebSocketResponse()
        await answering.prepare(request)
        async for _ in answering:
            await answering.send_str(text)
        return answering

    app = web.Application()
    app.router.add_get("/ws", ws)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "hi",
        "",
        "[]",
        "[" * 100_000,
        '{"type":"state"}',
        '{"type":"error"}',
        '{"data":{}}',
        '{"type":"state","data":[1]}',
        '{"type":"state","data":{"dataset_size":"many"}}',
        '{"type":"state","data":{"dataset_size":-1}}',
    ],
)
async def test_an_answer_that_is_none_is_an_error_of_the_server(text):
    async with saying(text) as url:
        assert (await RemoteEnv(url).check()).startswith(f"{url}: no answer to state: {text[:200]!r}")


async def test_a_check_says_in_a_line_that_nobody_is_there():
    url = f"http://127.0.0.1:{free_ports(1)}"
    assert await RemoteEnv(url).check() == f"{url} cannot be reached: Connection refused"


@pytest.mark.parametrize(
    "data", ['{"observation":"x"}', '{"observation":{},"reward":"much"}', '{"done":[]}', '{"metadata":[1]}']
)
async def test_an_observation_that_is_none_is_an_error_of_the_server(data):
    async with saying(f'{{"type":"observation","data":{data}}}') as url, RemoteEnv(url).session() as session:
        with pytest.raises(EnvError, match="no answer to reset: "):
            await session.reset(seed=1)
        assert session.broken


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_remote_source_is_captured_as_any_other(arena, spec):
    """Our own loop in an env worker, the environment behind a socket: a training episode is references to blocks."""
    async with serving_sessions(ENVS + "TextEcho") as far:
        config = server_config(arena.address, f"openenv:{far.server.url}", max_turns=3)
        async with serving(config) as (client, _):
            (task,) = await client.tasks("train", 0, 1)
            result = await rollout(client, task, spec())
            assert result.success, result.error
            assert (result.reward, result.num_turns, result.stop_reason) == (1.0, 1, "done")
            (sample,) = result.samples
            arena.adopt(sample.handles)
            assert sample.S == result.num_tokens > 0
            arena.free(sample.handles)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (("a", 1, False, {"k": 1}), Step("a", 1.0, False, False, {"k": 1})),
        (("a", 1, False, True, {}), Step("a", 1.0, True, True)),
        (Step("a", 0.5, True), Step("a", 0.5, True)),
    ],
)
def test_what_a_step_may_give_back(answer, expected):
    assert Step.of(answer) == expected


def test_what_a_step_may_not_give_back():
    with pytest.raises(EnvError, match="step returned a NoneType, not a Step"):
        Step.of(None)
    with pytest.raises(EnvError, match="an observation is a text or a map, not a int"):
        Step.of((3, 1.0, True, {}))
