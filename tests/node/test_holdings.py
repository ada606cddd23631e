"""Blocks that an orchestrator elsewhere owns: each verb once, however often it was asked for, through restarts too."""

import pytest

from shmrl.arena import Arena
from shmrl.errors import NodeError
from shmrl.node.client import Client
from shmrl.node.holdings import Holdings
from shmrl.node.remote import RemoteArena
from shmrl.node.server import NodeServer
from tests.node.conftest import TOKEN, noise
from tests.orchestrator.fakes import sample


@pytest.fixture
def remote(server):
    with Client(TOKEN, patience_s=0.5) as client:
        yield RemoteArena(client, server.url)


def put(there, count):
    with Arena.attach(there.address) as worker:
        return [worker.put(noise(1000, i), tag=f"run/s/g{i}/0") for i in range(count)]


def test_a_block_is_adopted_shipped_and_done_over_the_network(there, remote):
    one, two = put(there, 2)
    there.discard("run/s/g1")
    _, (gone, nothing) = remote.apply([("adopt", [one, two]), ("free", [])])
    assert (list(gone), nothing) == ([1], {})
    assert "discarded" in gone[1]
    remote.apply([("ship", [one], 2, 7), ("done", [one], 0)])
    assert [row["step"] for row in there.ls()] == [7]
    remote.apply([("done", [one], 1)])
    assert there.stats()["blocks"] == 0
    remote.apply([("done", [one], 1), ("free", [one, two]), ("discard", "run")])  # all of it is gone already
    assert there.stats()["created"] == there.stats()["freed"] == 2


def test_a_batch_is_done_once_however_often_it_arrives(there):
    (handle,) = put(there, 1)
    holdings = Holdings(there)
    ship = [["adopt", [handle]], ["ship", [handle], 3, 1]]
    first = holdings.apply("me", 1, ship)
    there.done([handle], reader=0)
    assert holdings.apply("me", 1, ship) == first  # asked again, because the answer was lost: the bit stays
    assert there.ls()[0]["done"] == (0,)
    holdings.apply("me", 2, [["free", [handle]]])
    with pytest.raises(ValueError, match="batch 1 of me came after batch 2"):
        holdings.apply("me", 1, ship)
    assert there.stats()["blocks"] == 0


def test_a_server_that_was_started_again_frees_what_the_one_before_it_held(there):
    (handle,) = put(there, 1)
    with Client(TOKEN) as client:
        with Arena.attach(there.address) as first, NodeServer(first, TOKEN) as server:
            before, _ = RemoteArena(client, server.url).apply([("adopt", [handle])])
        assert there.ls()[0]["flags"] == ("orphan",)
        with Arena.attach(there.address) as second, NodeServer(second, TOKEN) as server:
            after, _ = RemoteArena(client, server.url).apply([("free", [handle])])
        assert before != after
    assert there.stats()["blocks"] == 0


def test_what_is_there_is_found_by_its_tag_with_what_its_header_says(there, remote):
    made = sample(there, "run/s/g1/0", T=10, S=6, version=4)
    sample(there, "run2/s/g1/0")
    (found,) = remote.find("run")
    assert (found.handle, found.row["tag"]) == (made.handles[0], "run/s/g1/0")
    assert found.meta["version_start"] == 4
    assert found.sample is None or found.sample.T == 10
    assert remote.sampled(made.truncated(6)) == 2
    assert remote.shown(made)["messages"] == [{"role": "assistant", "content": "olleh"}]
    look = remote.look()
    assert look["stats"]["blocks"] == 2
    assert look["pressure"]["used_bytes"] == there.pressure()["used_bytes"]
    assert look["rss_bytes"] > 1 << 20
    there.free(made.handles)
    assert remote.sampled(made) is None
    there.discard("run2")


def test_a_wrong_token_and_a_server_that_is_away_are_errors(there, server):
    with Client("0" * 32, patience_s=0.2) as client, pytest.raises(NodeError, match="401"):
        RemoteArena(client, server.url).look()
    server.close()
    with Client(TOKEN, patience_s=0.2) as client, pytest.raises(NodeError, match="given up after"):
        RemoteArena(client, server.url).look()
