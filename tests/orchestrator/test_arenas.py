"""The ledger over two arenas, the second behind a node server: counts in both, and what a lost node takes with it."""

import asyncio

import pytest

from shmrl.arena import Arena
from shmrl.errors import LostPayload
from shmrl.node.client import Client
from shmrl.node.server import NodeServer
from shmrl.orchestrator.adoption import adopt
from shmrl.orchestrator.arenas import Arenas, NodeLost
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.shipped import ShippedSteps
from shmrl.types import MicroBatch
from tests.orchestrator.conftest import until
from tests.orchestrator.fakes import Client as Served
from tests.orchestrator.fakes import sample, source, tree
from tests.orchestrator.test_adoption import episode

TOKEN = "5ec2e7" * 5 + "ab"


@pytest.fixture
def there():
    """Another node's arena, seen by an env worker there."""
    with Arena.create("16MiB") as arena:
        yield arena
        arena.unlink()


@pytest.fixture
async def arenas(arena, there):
    """Both, and the server of the other node as `arenas.server`."""
    attached = Arena.attach(there.address)
    with Client(TOKEN, patience_s=0.5) as client:
        made = Arenas(Arena.attach(arena.address), client)
        made.server = NodeServer(attached, TOKEN)
        await made.join(attached.origin, "node2", made.server.url)
        yield made
        await made.close()
        made.server.close()
    attached.close()


def blocks(*arenas):
    return [arena.stats()["blocks"] for arena in arenas]


async def test_blocks_of_both_arenas_are_owned_shipped_and_let_go_alike(arena, there, arenas):
    ledger = Ledger(arenas, num_ranks=1, longest=8)
    samples = [sample(arena, "t/a/g/0"), sample(there, "t/a/g/1"), sample(there, "t/a/g/2", T=12, S=6)]
    for i, item in enumerate(samples):
        await ledger.adopt([item], f"t/a/g/{i}")
    assert ledger.cut(samples[2], 8).S == 2  # counted over there when it was adopted
    ledger.release(samples[1:2])
    await arenas.flush()
    assert blocks(arena, there) == [1, 1]
    ledger.ship([[MicroBatch((samples[0], samples[2]))]], step=3)
    await arenas.flush()
    assert arenas.urls(samples[0].handles + samples[2].handles) == {there.origin: arenas.server.url}
    arena.done(samples[0].handles, reader=0)
    there.done(samples[2].handles, reader=0)
    assert blocks(arena, there) == [1, 1]
    ledger.let_go(3)
    await arenas.flush()
    assert blocks(arena, there) == [0, 0]
    assert ledger.close() == {}
    assert arenas.stats()["created"] >= 1
    await arenas.look()
    assert (arenas.stats()["created"], arenas.stats()["freed"]) == (3, 3)


async def test_an_adoption_that_is_cancelled_on_its_way_frees_what_came(there, arenas):
    ledger = Ledger(arenas, num_ranks=1)
    made = sample(there)
    adopting = asyncio.create_task(ledger.adopt([made], "t/a/g/0"))
    await asyncio.sleep(0)
    adopting.cancel()
    await asyncio.wait({adopting})
    await arenas.flush()
    assert (blocks(there), ledger.open()) == ([0], {})


async def test_a_lost_node_is_written_off_and_everything_there_is_gone(arena, there, arenas):
    lost = []
    ledger = Ledger(arenas, num_ranks=1)
    arenas.lost = lambda node: lost.append((node.name, ledger.write_off(node.origin)))
    here, kept, late = sample(arena), sample(there, "t/a/g/1"), sample(there, "t/a/g/2")
    await ledger.adopt([here], "t/a/g/0")
    await ledger.adopt([kept], "t/a/g/1")
    arenas.server.close()
    with pytest.raises(LostPayload, match="given up after"):
        await ledger.adopt([late], "t/a/g/2")
    await until(lambda: lost)
    assert lost == [("node2", 1)]
    assert (ledger.is_lost(kept), ledger.is_lost(here)) == (True, False)
    ledger.release([kept, here])  # whoever still has a reference
    await arenas.flush()
    assert (blocks(arena), ledger.close()) == ([0], {})
    assert arenas.alive == []


async def test_what_is_on_its_way_when_a_node_is_lost_ends_with_it(there, arenas):
    node = arenas.nodes[there.origin]
    arenas.server.close()
    asked, looking = node.ask("adopt", []), asyncio.create_task(node.look())
    await until(lambda: not node._queue)
    node.lose("its cable was cut")
    with pytest.raises(NodeLost, match="node node2 is lost: its cable was cut"):
        await looking
    assert await asyncio.wait_for(asked, 30) == {}
    await asyncio.wait_for(arenas.flush(), 30)
    assert arenas.urls(sample(there).handles) == {there.origin: ""}
    assert await arenas.find("t") == []


async def test_what_was_under_way_when_a_node_was_found_to_be_lost_is_answered_too(there, arenas):
    ledger = Ledger(arenas, num_ranks=1)
    arenas.server.close()
    adopting = asyncio.create_task(ledger.adopt([sample(there)], "t/a/g/0"))
    (node,) = arenas.alive
    await asyncio.sleep(0)
    assert node._queue
    while node._queue:  # noqa: ASYNC110 (its worker takes it within a turn or two of the loop)
        await asyncio.sleep(0)
    node.lose("its watch has seen nothing of it")
    with pytest.raises(LostPayload, match="could not be adopted"):
        await adopting


async def test_finished_episodes_of_another_node_are_adopted_and_others_freed(there, arenas, parts, tmp_path):
    worker = Arena.attach(there.address)
    whole = [*episode(worker, "t/a/0f-12/0", 2), *episode(worker, "t/a/0f-12/1", reward=1.0)]
    half = episode(worker, "t/a/0f-15/1")
    worker.close()
    run = tree(tmp_path, batch_size=2, max_off_policy_steps=1)
    p = parts(run, [Served(there)])
    ledger = Ledger(arenas, run.trainer.ranks)
    p.sink._ledger = ledger
    assert await adopt(arenas, "t", [source(run, 0, None)], ledger, p.sink, ShippedSteps(tmp_path / "steps")) == 16
    await arenas.flush()
    assert set(ledger.open()) == {handle for one in whole for handle in one.handles}
    assert half[0].handles[0] not in ledger.open()
    assert blocks(there) == [3]
    ledger.release(p.sink.cut(5).samples)
    await arenas.flush()
    assert blocks(there) == [0]
