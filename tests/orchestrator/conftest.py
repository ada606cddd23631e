"""A real arena, seen by an env worker and by the orchestrator, and the orchestrator's parts around it."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from shmrl.arena import Arena
from shmrl.orchestrator.admission import Admission
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.dispatcher import Dispatcher
from shmrl.orchestrator.episodes import Episodes
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.loop import RELIEF_S
from shmrl.orchestrator.sinks import TrainSink
from tests.env.conftest import model_dir  # noqa: F401 (a fixture: a tokenizer and a router's shape)
from tests.orchestrator import fakes


@pytest.fixture
def arena():
    """The orchestrator's attachment of an arena of its own."""
    made = Arena.create(capacity="64MiB", run_id="t")
    attached = Arena.attach(made.address)
    yield attached
    attached.close()
    made.close()
    made.unlink()


@pytest.fixture
def worker(arena):
    """An env worker's attachment: what is encoded here is owned here until it is adopted."""
    attached = Arena.attach(arena.address)
    yield attached
    attached.close()


@pytest.fixture
def parts(arena):
    """`parts(tree, clients)` -> ledger, episodes, sink, dispatcher and its background task, joined as in the loop."""
    tasks = []

    def build(tree, clients, fail_limit=1000, longest_bytes=2048, spills=False):
        arenas = Arenas(arena)
        ledger = Ledger(arenas, tree.trainer.ranks)
        episodes = Episodes(ledger, tree.run.name, tree.orchestrator.inflight, fail_limit)
        sources = [fakes.source(tree, index, client) for index, client in enumerate(clients)]
        sink = TrainSink(tree, ledger, episodes)
        wake = asyncio.Event()
        admission = Admission(longest_bytes, spills=spills)
        dispatcher = Dispatcher(tree, sources, episodes, sink, "a", wake.set, arenas, admission)
        made = SimpleNamespace(**locals())
        tasks.append(made)
        return made

    yield build
    assert all(not made.ledger.open() for made in tasks), "the test left holds in a ledger"


async def collect(parts, step):
    """What the loop does to get a batch."""
    if parts.dispatcher.step < step:
        parts.dispatcher.collecting(step)
    running = asyncio.create_task(parts.dispatcher.run())
    try:
        async with asyncio.timeout(20):
            while True:
                parts.wake.clear()
                if parts.dispatcher.failure:
                    raise parts.dispatcher.failure
                if (batch := parts.sink.cut(step)) is not None:
                    parts.dispatcher.collecting(step + 1)
                    return batch
                parts.dispatcher.relieve()
                parts.dispatcher.wake()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(parts.wake.wait(), RELIEF_S)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(condition, timeout_s=20, poll_s=0.001):
    """Let the loop run until `condition()` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(poll_s)


async def finish(parts):
    """What the loop does at the end; then nothing may be held."""
    await parts.dispatcher.stop()
    parts.sink.close()
    await parts.episodes.close()
