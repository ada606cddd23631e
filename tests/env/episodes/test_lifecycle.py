"""One turn of an agent: in order when all goes well, and closed in reverse order however it ends."""

import asyncio
import json
import time

import pytest

from shmrl.env.episodes import episodes
from tests.env.conftest import until
from tests.env.episodes.conftest import turn
from tests.env.episodes.stub import LIFE, RESPONSE, SANDBOX

BEFORE_CLOSE = LIFE[:-1]
STAGES = {
    "/seed_session": "seed",
    "/v1/agent_sessions": "agent",
    "/v1/responses": "agent",
    "/v1/agent_sessions/close": "cleanup",
    "/verify": "verification",
}


def closed_in_reverse(stub):
    """What was opened is closed, the last opened first."""
    return stub.closed == list(reversed(stub.opened))


async def test_all_well_in_order(turns, stub):
    async with turns() as client:
        answer = await client.run(turn("7-1", attempt=2))
        assert answer.keys() == {"episode_id", "task_id", "result"}
        assert answer["episode_id"] == {"rollout_id": "7-1", "attempt": 2}
        assert answer["task_id"] == {"taskset": "shmrl:rev", "task_id": "t0"}
        result = answer["result"]
        assert (result["reward"], result["ng_agent_observations"], result["city"]) == (1.0, {"calls": 1}, "SF")
        assert stub.paths == LIFE
        assert closed_in_reverse(stub)
        assert await client.count('shmrl_episodes_total{outcome="result",server="turn"') == 1


async def test_cookies_ids_and_the_borrowed_sandbox_are_handed_on(turns, stub):
    async with turns(resources_tool_transports=["direct_http", "mcp"]) as client:
        await client.run(turn("7-1"))
    seed, opened, verify = stub.of("/seed_session"), stub.of("/v1/agent_sessions"), stub.of("/verify")
    assert seed.body["task_data"] == {"city": "SF"}
    assert seed.body["episode_id"] == opened.body["episode_id"] == {"rollout_id": "7-1", "attempt": 0}
    url = f"http://127.0.0.1:{stub.ports[0]}"
    assert opened.body["sandbox_access"] == SANDBOX
    assert opened.body["tool_accesses"] == [
        {
            "kind": "direct_http",
            "name": "weather.direct_http",
            "required": True,
            "base_url": url,
            "cookies": {"resources": "signed.one"},
            "headers": {},
        },
        {
            "kind": "mcp",
            "name": "weather",
            "required": True,
            "connection": {"transport": "streamable_http", "url": f"{url}/mcp", "headers": {"X-Session": "1"}},
        },
    ]
    assert stub.of("/v1/responses").cookies == {"agent": "signed.agent"}
    assert verify.body == {
        "city": "SF",
        "responses_create_params": {"input": "how cold is it?"},
        "response": RESPONSE,
    }
    assert verify.cookies == stub.of("/close_session").cookies == {"resources": "signed.two"}  # the agent gave it back


@pytest.mark.parametrize("path", BEFORE_CLOSE)
@pytest.mark.parametrize(("how", "terminal"), [(503, False), (404, True), ("drop", False), ({"no": "map"}, True)])
async def test_a_failure_at_each_stage_closes_what_is_open(turns, stub, path, how, terminal):
    if path in ("/verify", "/v1/responses") and isinstance(how, dict):
        how = [1]
    stub.on[path] = how
    async with turns() as client:
        answer = await client.run(turn())
        assert answer.keys() == {"episode_id", "task_id", "failure"}
        failure = answer["failure"]
        assert (failure["stage"], failure["terminal"]) == (STAGES[path], terminal)
        assert path in failure["failure_reason"] or "session_id" in failure["failure_reason"]
        assert ("partial_response" in failure) == (path in ("/verify", "/v1/agent_sessions/close"))
        if how == "drop":
            assert failure["failure_kind"] == "transport_peer_drop"
        if path != "/v1/agent_sessions/close":  # else it stays broken, and is tried once more at the end
            assert closed_in_reverse(stub)
        assert stub.paths[-1] == "/close_session"
        assert await client.count('shmrl_episodes_running{server="turn"') == 0


@pytest.mark.parametrize("path", BEFORE_CLOSE)
async def test_a_cancel_at_each_stage_closes_what_is_open(turns, stub, monkeypatch, path):
    """The collector goes away: nobody waits any more."""
    monkeypatch.setattr(episodes, "ABANDONED_S", 0.05)
    stub.on[path] = "hang"
    async with turns() as client:
        asking = asyncio.create_task(client.run(turn()))
        await asyncio.wait_for(stub.reached[path].wait(), 10)
        del stub.on[path]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: stub.paths[-1] == "/close_session")
        assert closed_in_reverse(stub)
        labels = f'outcome="cancelled",server="turn",server_type="environment_servers",stage="{STAGES[path]}"'
        await client.counted(f"shmrl_episodes_total{{{labels}", 1)


@pytest.mark.parametrize("path", BEFORE_CLOSE)
async def test_a_shutdown_at_each_stage_tells_and_closes(turns, stub, path):
    stub.on[path] = "hang"
    async with turns() as client:
        asking = asyncio.create_task(client.run(turn()))
        await asyncio.wait_for(stub.reached[path].wait(), 10)
        del stub.on[path]
        client.host.stop()
        failure = (await asking)["failure"]
        assert (failure["failure_kind"], failure["stage"], failure["terminal"]) == ("shutdown", STAGES[path], False)
        assert closed_in_reverse(stub)


@pytest.mark.parametrize("path", BEFORE_CLOSE)
async def test_a_deadline_at_each_stage_tells_and_closes(turns, stub, path):
    stub.on[path] = "hang"
    async with turns(default_episode_timeout_seconds=0.3, cleanup_timeout_seconds=1) as client:
        failure = (await client.run(turn()))["failure"]
        assert (failure["stage"], failure["terminal"]) == (STAGES[path], False)
        assert "default_episode_timeout_seconds = 0.3" in failure["failure_reason"]
        assert stub.paths[-1] == "/close_session"


async def test_a_close_that_hangs_leaves_time_for_the_others(turns, stub):
    stub.on |= {"/v1/agent_sessions/close": "hang", "/v1/responses": 500}
    async with turns(cleanup_timeout_seconds=1) as client:
        started = time.monotonic()
        failure = (await client.run(turn()))["failure"]
        assert failure["stage"] == "agent"
        assert stub.closed == stub.opened[:1]  # the resources session; the agent's took its half of the time
        assert time.monotonic() - started < 10
        assert await client.count('shmrl_sessions_unclosed_total{server="turn"') == 1


async def test_a_resources_session_that_cannot_be_closed_costs_no_verdict(turns, stub):
    stub.on["/close_session"] = 500
    async with turns() as client:
        assert (await client.run(turn()))["result"]["reward"] == 1.0
        assert await client.count('shmrl_sessions_unclosed_total{server="turn"') == 1


async def test_a_seed_without_a_session_cookie_is_refused(turns, stub):
    stub.on["cookie"] = "none"
    async with turns() as client:
        failure = (await client.run(turn()))["failure"]
        assert (failure["stage"], failure["terminal"], failure["failure_kind"]) == ("seed", True, "session_lost")
        assert closed_in_reverse(stub)


async def test_a_verdict_without_a_number_is_a_failure(turns, stub):
    stub.on["/verify"] = {"reward": "good"}
    async with turns() as client:
        failure = (await client.run(turn()))["failure"]
        assert (failure["stage"], failure["terminal"]) == ("verification", True)
        assert "'good'" in failure["failure_reason"]


async def test_one_more_than_there_are_places_waits_and_is_refused(turns, stub):
    stub.on["/v1/responses"] = "hang"
    async with turns(max_concurrent_episodes=1, queue_timeout_seconds=0.2) as client:
        first = asyncio.create_task(client.run(turn("0-0")))
        await stub.reached["/v1/responses"].wait()
        failure = (await client.run(turn("0-1")))["failure"]
        assert (failure["stage"], failure["terminal"]) == ("admission", False)
        assert "queue_timeout_seconds = 0.2" in failure["failure_reason"]
        del stub.on["/v1/responses"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: len(stub.closed) == 2)  # the place is free when its episode is closed, and not before
        await client.counted('shmrl_episodes_running{server="turn"', 0)
        assert (await client.run(turn("0-1")))["result"]["reward"] == 1.0  # a refusal is kept for nobody


async def test_who_asks_again_joins_and_gets_the_same(turns, stub):
    async with turns() as client:
        first, second = await asyncio.gather(client.run(turn("0-0")), client.run(turn("0-0")))
        assert first == second == await client.run(turn("0-0"))
        assert stub.paths == LIFE  # it ran once
        await client.run(turn("0-0", attempt=1))
        await client.run(turn("0-0", task="t1"))  # another run of a collector also begins with 0-0
        assert stub.paths == 3 * LIFE


async def test_who_lost_its_connection_joins_again(turns, stub):
    stub.on["/v1/responses"] = "hang"
    async with turns() as client:
        asking = asyncio.create_task(client.run(turn()))
        await stub.reached["/v1/responses"].wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        again = asyncio.create_task(client.run(turn()))
        client.host.stop()
        assert (await again)["failure"]["failure_kind"] == "shutdown"  # of the one that ran
        assert stub.paths.count("/seed_session") == 1


async def test_an_answer_that_was_handed_over_is_soon_forgotten(turns, stub, monkeypatch):
    monkeypatch.setattr(episodes, "HANDED_OVER_S", 0.05)
    async with turns() as client:
        await client.run(turn())
        async with asyncio.timeout(10):
            while stub.paths.count("/seed_session") == 1:
                await client.run(turn())


async def test_after_a_cancelled_one_it_is_run_afresh(turns, stub, monkeypatch):
    monkeypatch.setattr(episodes, "ABANDONED_S", 0.0)
    stub.on["/v1/responses"] = "hang"
    async with turns() as client:
        asking = asyncio.create_task(client.run(turn()))
        await stub.reached["/v1/responses"].wait()
        del stub.on["/v1/responses"]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: stub.paths[-1] == "/close_session")
        assert (await client.run(turn()))["result"]["reward"] == 1.0


async def test_seeds_and_closes_survive_a_broken_connection(turns, stub):
    """They are repeated under the same id; a call that may have had an effect is not."""
    stub.on["/v1/agent_sessions"] = "drop"
    async with turns() as client:
        await client.run(turn())
    assert stub.paths.count("/v1/agent_sessions") == 3
    assert len({call.body["agent_session_id"] for call in stub.calls if call.path == "/v1/agent_sessions"}) == 1


async def test_a_server_that_is_not_there_is_said_at_once(turns, stub, written):
    async with turns() as client:
        instance = client.host.nesting.instances["weather"]
        instance.block["port"] = 1
        failure = (await client.run(turn()))["failure"]
        assert (failure["stage"], failure["failure_kind"]) == ("seed", "transport_unreachable")
        assert await client.count('shmrl_server_calls_total{outcome="transport_unreachable",route="/close_session"')


async def test_a_result_that_came_after_the_cancel_is_kept(turns, stub, monkeypatch):
    """The body did not heed the cancel, and had its result: who asks again gets it."""
    monkeypatch.setattr(episodes, "ABANDONED_S", 0.0)
    async with turns() as client:
        protocol = client.host.fronts["turn"].protocol
        began, late = asyncio.Event(), asyncio.Event()

        async def heedless(request, course):
            began.set()
            try:
                await late.wait()
            except asyncio.CancelledError:
                return {"reward": 0.5}

        protocol.run = heedless
        asking = asyncio.create_task(client.run(turn()))
        await began.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await client.counted('shmrl_episodes_running{server="turn"', 0)
        assert (await client.run(turn()))["result"] == {"reward": 0.5}


async def test_a_time_out_of_its_own_is_no_deadline(turns, stub):
    async with turns() as client:

        async def impatient(request, course):
            raise TimeoutError("the tool took too long")

        client.host.fronts["turn"].protocol.run = impatient
        failure = (await client.run(turn()))["failure"]
        assert failure["failure_reason"] == "TimeoutError: the tool took too long"
        assert failure["terminal"] is True


async def test_who_leaves_before_reading_its_answer_leaves_it_for_the_next(turns, stub):
    """A connection that breaks while the answer is on its way: no traceback, and the answer is still there."""
    stub.on["/verify"] = {"reward": 1.0, "much": "x" * (8 << 20)}
    async with turns() as client:
        host, _, port = client.url().removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(turn()).encode()
        writer.write(b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.read(1)
        writer.transport.abort()
        assert len((await client.run(turn()))["result"]["much"]) == 8 << 20
        assert stub.paths == LIFE
