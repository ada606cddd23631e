"""The policy on its engines: what is checked at the start, updates that fail, engines that come back."""

import asyncio

import pytest

from shmrl.errors import EngineError
from shmrl.inference.client import EngineClient
from shmrl.orchestrator.policy import Policy
from tests.support.fake_vllm import FakeVllm, run_on


class Link:
    """What a policy asks of the link to the ranks: where rank 0 broadcasts weights."""

    async def sender(self):
        return 4321


@pytest.fixture
async def policy(tmp_path):
    """policy(*engines, **flags): a Policy of a run on these engines."""
    clients = []

    def build(*engines, **flags):
        tree = run_on(tmp_path, *(engine.url for engine in engines), **flags)
        clients.append(EngineClient([engine.url for engine in engines], timeout_s=20))
        return Policy(clients[-1], tree, Link())

    yield build
    for client in clients:
        await client.aclose()


async def test_it_learns_at_the_start_whether_masks_are_derived(policy):
    async with FakeVllm() as engine:
        made = policy(engine)
        await made.reach(10)
        assert made.derive_masks
        await made.serve("/w/step_1", 1)
    assert engine.label == "1"


async def test_an_engine_that_does_not_come_up_is_reported_with_its_last_lines(policy, tmp_path):
    async with FakeVllm() as engine:
        made = policy(engine, inference__urls="[]", inference__port=engine.url.rsplit(":", 1)[1])
    log = tmp_path / "out" / "logs" / "latest" / "inference.log"
    log.parent.mkdir(parents=True)
    log.write_text("loading\nRuntimeError: out of memory\n")
    said = r"is not healthy.*last lines of .*inference\.log:\n  \| loading\n  \| RuntimeError: out of memory"
    with pytest.raises(EngineError, match=said):
        await made.reach(0.2)


async def test_an_update_that_fails_ends_the_run_and_the_old_version_serves(policy):
    async with FakeVllm() as engine:
        made = policy(engine)
        await made.serve("/w/step_1", 1)
        with pytest.raises(EngineError, match="/w/broken is cut short"):
            await made.serve("/w/broken", 2)
        assert (engine.label, engine.open.is_set()) == ("1", True)


async def test_an_update_waits_for_an_engine_that_is_restarted(policy):
    engine = FakeVllm()
    await engine.start()
    port = int(engine.url.rsplit(":", 1)[1])
    made = policy(engine, run__restarts__inference="1")
    await made.serve("/w/step_1", 1)
    await engine.stop()
    serving = asyncio.ensure_future(made.serve("/w/step_2", 2))
    await asyncio.sleep(0)
    again = FakeVllm()
    await again.start(port)
    await asyncio.wait_for(serving, 20)
    assert (again.loaded, again.label) == (["/w/step_2"], "2")
    await again.stop()


async def test_an_engine_that_came_back_with_other_weights_is_brought_to_the_current_version(policy, monkeypatch):
    monkeypatch.setattr("shmrl.orchestrator.policy.WATCH_S", 0.02)
    async with FakeVllm() as engine:
        made = policy(engine, run__restarts__inference="1")
        watching = asyncio.ensure_future(made.watch())
        await made.serve("/w/step_1", 1)
        engine.label, loads = "default", len(engine.loaded)
        async with asyncio.timeout(20):
            while engine.label != "1":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.loaded[loads:] == ["/w/step_1"]
        watching.cancel()
    await policy(engine).watch()  # without a budget there is nothing to watch for


async def test_the_engine_sleeps_while_a_step_is_trained_on_its_accelerator(policy):
    async with FakeVllm() as engine:
        made = policy(engine, inference__colocate="true")
        await made.leave_accelerator()
        await made.serve("/w/step_1", 1)
        update = ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
        assert engine.calls == ["/pause?mode=wait", "/sleep?level=1", "/wake_up", *update]
        apart = policy(engine)
        engine.calls.clear()
        await apart.leave_accelerator()
        assert engine.calls == []


async def test_with_broadcast_every_engine_receives_from_rank_0_before_any_is_paused(policy):
    async with FakeVllm() as one, FakeVllm() as two:
        made = policy(one, two, inference__weight_transfer="broadcast")
        await made.reach(10)
        initial = str(made._tree.initial_weights)
        assert one.loaded == two.loaded == [f"/received{initial}"]  # what is probed is the way that steps will take
        for engine in (one, two):
            engine.calls.clear()
        await made.serve("/w/step_1", 1)
    for rank, engine in enumerate((one, two), 1):
        assert engine.transfers == [("127.0.0.1", 4321, path, rank, 3) for path in (initial, "/w/step_1")]
        assert engine.loaded[-1] == "/received/w/step_1"
        assert engine.calls[:3] == ["/collective_rpc", "/pause?mode=keep", "/collective_rpc"]
        assert engine.label == "1"


async def test_a_broadcast_that_fails_pauses_nobody(policy):
    async with FakeVllm() as one, FakeVllm() as two:
        made = policy(one, two, inference__weight_transfer="broadcast")
        two.refuses = "OSError: no room"
        with pytest.raises(EngineError, match=f"{two.url}: shmrl_receive_weights: OSError: no room"):
            await made.serve("/w/step_1", 1)
        assert one.calls == two.calls == ["/collective_rpc"]


async def test_an_engine_that_stays_away_drops_out_and_the_others_take_up_the_version(policy, monkeypatch):
    monkeypatch.setattr("shmrl.orchestrator.policy.AWAY_S", 0.2)
    async with FakeVllm() as one:
        two = FakeVllm()
        await two.start()
        made = policy(one, two)
        await made.serve("/w/step_1", 1)
        await two.stop()
        await made.serve("/w/step_2", 2)
        assert made._engine.urls == [one.url]
        assert (one.label, one.open.is_set()) == ("2", True)
    with pytest.raises(EngineError):  # the last one
        await made.serve("/w/step_3", 3)


async def test_an_engine_that_is_back_in_time_goes_on(policy):
    async with FakeVllm() as one:
        two = FakeVllm()
        await two.start()
        made = policy(one, two)
        await made.serve("/w/step_1", 1)
        await two.stop()
        serving = asyncio.ensure_future(made.serve("/w/step_2", 2))
        await asyncio.sleep(0)
        await two.start(int(two.url.rsplit(":", 1)[1]))
        await asyncio.wait_for(serving, 30)
        assert (one.label, two.label) == ("2", "2")
        await two.stop()
