"""The ranks' socket: hello, token, order of messages, and who is missing."""

import asyncio

import pytest
import zmq
import zmq.asyncio

from shmrl import wire
from shmrl.errors import RunError
from shmrl.orchestrator.link import TrainerLink
from shmrl.orchestrator.shipped import ShippedStep, ShippedSteps

TOKEN = "0123456789abcdef" * 2


class Rank:
    """A rank's DEALER in this process."""

    def __init__(self, address):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    async def say(self, **message):
        await self.socket.send(wire.pack(message))

    async def hello(self, rank, world=1, token=TOKEN, step=0, phase="new", report=None, sender=None, origin="1f2e"):
        stands = {"step": step, "phase": phase, "report": report, "sender": sender, "origin": origin}
        await self.say(kind="hello", rank=rank, world=world, token=token, **stands)

    async def hear(self):
        return wire.unpack(await asyncio.wait_for(self.socket.recv(), 10))

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
async def link_of(tmp_path):
    """`link_of(num_ranks)` -> a link and a function that connects a rank to it."""
    links, ranks = [], []

    def build(num_ranks, token=TOKEN, **more):
        address = f"ipc://{tmp_path}/sockets/trainer.sock"
        link = TrainerLink(address, num_ranks, token, ShippedSteps(tmp_path / "steps"), **more)
        links.append(link)

        def connect():
            ranks.append(Rank(address))
            return ranks[-1]

        return link, connect

    yield build
    for rank in ranks:
        rank.close()
    for link in links:
        await link.close()


async def test_a_step_goes_out_and_comes_back_published_then_reported(link_of):
    link, connect = link_of(2)
    ranks = [connect(), connect()]
    for index, rank in enumerate(ranks):
        await rank.hello(index, world=2, step=7)
    await link.hellos(10)
    assert link.completed == 7
    await link.send(1, wire.pack({"kind": "step", "step": 8}))
    assert await ranks[1].hear() == {"kind": "step", "step": 8}
    await ranks[0].say(kind="published", version=8, path="/w/step_8")
    await ranks[0].say(kind="report", step=8, mode="warmup", metrics={"train/loss": 2.0})
    await ranks[0].say(kind="report", step=8, mode="train", metrics={"train/loss": 1.0})
    assert await link.published(8) == "/w/step_8"
    assert await link.report(8, "train") == {"train/loss": 1.0}
    assert await link.report(8, "warmup") == {"train/loss": 2.0}
    await link.finish()
    assert [await rank.hear() for rank in ranks] == [{"kind": "finish"}] * 2


async def test_no_message_is_lost_to_a_wait_that_times_out(link_of, monkeypatch):
    """10,000 messages while somebody waits 0.1 ms at a time."""
    monkeypatch.setattr("shmrl.orchestrator.link.REPEAT_S", 1e-4)
    link, connect = link_of(1)
    rank = connect()
    await rank.hello(0)
    await link.hellos(10)

    async def say_all():
        for version in range(10_000):
            await rank.say(kind="published", version=version, path=str(version))
            if version % 20 == 0:
                await asyncio.sleep(3e-4)  # longer than a wait

    async with asyncio.timeout(60):
        saying = asyncio.create_task(say_all())
        assert [await link.published(version) for version in range(10_000)] == [str(i) for i in range(10_000)]
        await saying


async def test_a_wrong_token_a_stranger_and_noise_change_nothing(link_of):
    link, connect = link_of(1)
    thief, stranger, rank = connect(), connect(), connect()
    await thief.hello(0, token="f" * 32)
    await stranger.say(kind="published", version=1, path="/evil")
    await stranger.socket.send(b"\xc1")
    await stranger.socket.send_multipart([b"a", b"b", b"c"])
    await stranger.say(kind="hello", rank=0)
    with pytest.raises(RunError, match=r"no hello from trainer ranks \[0\]"):
        await link.hellos(0.3)
    await rank.hello(0)
    await link.hellos(10)
    await rank.say(kind="published", version=float("inf"), path="/never")
    await rank.say(kind="published", version=1, path="/good")
    assert await link.published(1) == "/good"


async def test_a_message_that_is_too_long_is_not_taken(link_of, monkeypatch):
    monkeypatch.setattr(wire, "MAX_MESSAGE", 1000)
    link, connect = link_of(1)
    noisy, rank = connect(), connect()
    ended = noisy.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    await noisy.socket.send(bytes(2000))
    assert await ended.poll(10_000)
    noisy.socket.disable_monitor()
    ended.close(0)
    await rank.hello(0)
    await link.hellos(10)


async def test_where_shared_memory_is_required_a_rank_of_another_arena_is_refused_at_its_hello(link_of):
    link, connect = link_of(2, shares="1f2e")
    near, far = connect(), connect()
    await near.hello(0, world=2)
    await far.hello(1, world=2, origin="5ec2")
    with pytest.raises(RunError, match=r"rank 1 is in arena 5ec2, the run's blocks are in 1f2e, .*'required' allows"):
        await link.hellos(10)


async def test_ranks_that_never_came_are_named(link_of):
    link, connect = link_of(3)
    await connect().hello(1, world=3)
    with pytest.raises(RunError, match=r"no hello from trainer ranks \[0, 2\] within 0.3 s"):
        await link.hellos(0.3)


async def test_ranks_of_another_size_or_at_different_steps_are_refused(link_of):
    link, connect = link_of(1)
    await connect().hello(1, world=2)
    with pytest.raises(RunError, match="rank 1 of 2 said hello"):
        await link.hellos(10)


async def test_ranks_at_different_steps_are_refused(link_of):
    link, connect = link_of(2)
    await connect().hello(0, world=2, step=3)
    await connect().hello(1, world=2, step=4)
    with pytest.raises(RunError, match=r"different steps: \{0: 3, 1: 4\}"):
        await link.hellos(10)


async def test_a_rank_that_reconnects_is_the_same_and_one_that_lost_steps_is_not(link_of):
    link, connect = link_of(1)
    await connect().hello(0)
    await link.hellos(10)
    again = connect()
    await again.hello(0)
    await again.say(kind="published", version=0, path="/w")
    assert await link.published(0) == "/w"
    await again.say(kind="report", step=1, mode="train", metrics={})
    await link.report(1, "train")
    await again.hello(0, step=0)
    with pytest.raises(RunError, match="rank 0 came back at step 0, after step 1 was completed"):
        await link.published(2)


def shipped(step, ranks=1):
    messages = tuple(wire.pack({"kind": "step", "step": step, "for": rank}) for rank in range(ranks))
    return ShippedStep(step, "t", "/out", "shm:0", {}, messages)


async def test_a_rank_that_comes_back_is_sent_what_it_has_not_had_the_same_bytes(link_of):
    link, connect = link_of(2, returning=True)
    ranks = [connect(), connect()]
    for index, rank in enumerate(ranks):
        await rank.hello(index, world=2, step=4)
    await link.hellos(10)
    for step in (5, 6):
        link.steps.add(shipped(step, 2))
        for index, rank in enumerate(ranks):
            await link.catch_up(index)
            assert await rank.hear() == {"kind": "step", "step": step, "for": index}
        await ranks[0].say(kind="report", step=step, mode="train", metrics={"train/loss": step})
        assert await link.report(step, "train") == {"train/loss": step}
    ranks[1].close()
    link.steps.add(shipped(7, 2))
    again = [connect(), connect()]
    await again[1].hello(1, world=2, step=4, phase="saved")
    assert [(await again[1].hear())["step"] for _ in range(3)] == [5, 6, 7]
    await again[0].hello(0, world=2, step=7, phase="saved", report={"path": "/w", "metrics": {"train/loss": 7}})
    assert (await link.published(7), await link.report(7, "train")) == ("/w", {"train/loss": 7})
    await again[0].say(kind="report", step=6, mode="train", metrics={"train/loss": 0})  # done once more
    finishing = asyncio.create_task(link.finish())
    for index, rank in enumerate(again):
        assert await rank.hear() == {"kind": "finish"}
        assert not finishing.done()
        await rank.say(kind="finished", rank=index)
    await asyncio.wait_for(finishing, 10)


async def test_a_successor_waits_for_the_step_that_was_shipped_and_not_reported(link_of):
    """One rank has trained it, the other has never heard of it: it gets it, and the report comes with a hello."""
    link, connect = link_of(2)
    link.steps.add(shipped(5, 2))
    link.unreported = 5
    ahead, behind = connect(), connect()
    await behind.hello(1, world=2, step=4, phase="begun")
    assert await behind.hear() == {"kind": "step", "step": 5, "for": 1}
    await ahead.hello(0, world=2, step=5, phase="begun", report={"path": "/w", "metrics": {"train/loss": 5}})
    await link.hellos(10)
    assert (link.completed, link.begun) == (4, True)
    assert (await link.published(5), await link.report(5, "train"), link.completed) == ("/w", {"train/loss": 5}, 5)


async def test_a_warm_up_whose_orchestrator_is_gone_cannot_go_on(link_of):
    link, connect = link_of(2)
    await connect().hello(0, world=2, phase="warming")
    with pytest.raises(RunError, match="rank 0 is in a warm-up whose orchestrator is gone"):
        await link.hellos(10)


async def test_a_rank_that_is_away_is_awaited_only_where_it_comes_back(link_of):
    for returning in (False, True):
        link, connect = link_of(1, returning=returning)
        rank = connect()
        await rank.hello(0)
        await link.hellos(10)
        rank.close()
        await until_gone(link)
        link.steps.add(shipped(1))
        if returning:
            await link.catch_up(0)
        else:
            with pytest.raises(RunError, match="trainer rank 0 cannot be reached"):
                await link.catch_up(0)
        await link.close()


async def until_gone(link):
    async with asyncio.timeout(10):
        while True:
            try:
                await link.send(0, b"")
            except RunError:
                return
            await asyncio.sleep(0.01)


async def test_whoever_starts_from_before_the_warm_up_again_is_refused(link_of):
    link, connect = link_of(1, returning=True)
    await connect().hello(0)
    await link.hellos(10)
    link.warmed_up = True
    await connect().hello(0)
    with pytest.raises(RunError, match="with the weights from before the warm-up: there is no checkpoint of it"):
        await link.published(0)


async def test_an_address_that_cannot_be_bound_says_so(tmp_path):
    with pytest.raises(RunError, match="cannot bind"):
        TrainerLink(f"ipc://{tmp_path}/{'x' * 120}/trainer.sock", 1, None, ShippedSteps(tmp_path / "steps"))


async def test_rank_0_says_where_it_broadcasts_weights_also_after_it_came_back(link_of):
    link, connect = link_of(2)
    asking = asyncio.ensure_future(link.sender())
    await connect().hello(1, world=2, sender=None)
    await connect().hello(0, world=2, sender=4321)
    assert await asyncio.wait_for(asking, 10) == 4321
    await link.hellos(10)
    again = connect()
    await again.hello(0, world=2, sender=4322)
    await again.say(kind="published", version=0, path="/w")  # what comes after it
    await link.published(0)
    assert await link.sender() == 4322
