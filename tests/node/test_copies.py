"""One copy per node: counted by the servers' own counters, through kills of ranks and of the node server."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmrl.arena import Arena
from shmrl.errors import LostPayload, NodeError
from shmrl.node.client import Client
from shmrl.node.copies import Copies, RemoteCopies
from shmrl.node.server import NodeServer
from shmrl.types import Handle
from tests.node.conftest import TOKEN, held, noise, process
from tests.node.test_fetch import counters
from tests.support.clock import wait_until
from tests.support.runs import free_ports

LEDGER = 4


@pytest.fixture
def copies(here):
    copies = Copies(here, Client(TOKEN, patience_s=0.5))
    yield copies
    copies.close()


@pytest.fixture
def own(here):
    """The fetching node's own server, as its ranks reach it."""
    with NodeServer(here, TOKEN) as own, Client(TOKEN) as client:
        yield RemoteCopies(client, own.url)


def shipped(there, count, nbytes=100_000, ranks=4):
    handles = [there.put(noise(nbytes, i), tag=f"run/s/{i}") for i in range(count)]
    there.ship(handles, readers=ranks + 1, step=1)
    return handles


def test_ranks_that_ask_at_once_cause_one_transfer_each_and_the_last_done_frees(there, here, server, own):
    handles, nodes, found = shipped(there, 20), {there.origin: server.url}, {}

    def ask(rank):
        found[rank] = own.want(handles, nodes, rank, 20.0)

    ranks = [threading.Thread(target=ask, args=(rank,)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert found[0] == found[1] == found[2] == found[3]
    assert [held(here, found[0][handle]) for handle in handles] == [held(there, handle) for handle in handles]
    assert server.counters["sent_bytes"] == 20 * 100_000
    assert server.counters["requests"] == 40  # a tail and a payload each
    for rank in range(3):
        own.done(handles, nodes, rank)
        own.done(handles, nodes, rank)
    assert (here.stats()["blocks"], there.stats()["blocks"]) == (20, 20)
    own.done(handles, nodes, 3)
    assert (here.stats()["blocks"], there.stats()["blocks"]) == (0, 20)
    there.done(handles, reader=LEDGER)
    assert there.stats()["blocks"] == 0
    assert (here.fsck(), there.fsck()) == ([], [])


def test_a_second_question_is_answered_from_the_copy_and_a_discarded_copy_is_fetched_again(there, here, server, copies):
    (handle,), nodes = shipped(there, 1), {there.origin: server.url}
    first = copies.want([handle], nodes, 0, 20.0)
    assert copies.want([handle], nodes, 1, 20.0) == first
    assert copies.counters == {"fetched": 1, "fetched_bytes": 100_000, "joined": 1, "lost": 0}
    assert here.discard(f"@{there.origin}") == 1
    assert copies.want([handle], nodes, 0, 20.0) != first
    assert copies.counters["fetched"] == 2


def test_a_block_that_is_gone_is_lost_and_the_others_are_there(there, here, server, own):
    (gone, kept), nodes = shipped(there, 2), {there.origin: server.url}
    there.free([gone])
    found = own.want([gone, kept], nodes, 0, 20.0)
    assert isinstance(found[gone], LostPayload)
    assert f"{server.url} is gone" in str(found[gone])
    assert held(here, found[kept]) == held(there, kept)
    own.done([gone, kept], nodes, 0)
    assert here.stats()["blocks"] == 0


def test_a_node_that_is_away_is_a_failure_that_is_tried_anew(there, here, copies):
    (handle,), port = shipped(there, 1), free_ports(1)
    nodes = {there.origin: f"http://127.0.0.1:{port}"}
    assert isinstance(copies.want([handle], nodes, 0, 20.0)[handle], NodeError)
    copies.done([handle], nodes, 0)  # what cannot be told is logged
    with NodeServer(there, TOKEN, f"127.0.0.1:{port}"):
        assert held(here, copies.want([handle], nodes, 0, 20.0)[handle]) == held(there, handle)
        copies.done([handle], nodes, 0)


def test_what_has_not_arrived_yet_is_left_out_of_the_answer(there, here, copies):
    (handle,), port = shipped(there, 1), free_ports(1)
    nodes = {there.origin: f"http://127.0.0.1:{port}"}
    copies._client.patience_s = 30.0
    assert copies.want([handle], nodes, 0, 0.0) == {}
    with NodeServer(there, TOKEN, f"127.0.0.1:{port}"):
        assert list(copies.want([handle], nodes, 0, 20.0)) == [handle]


ASK = """
import sys
from shmrl import wire
from shmrl.node.client import Client
from shmrl.node.copies import RemoteCopies
own, origin, url, *handles = sys.argv[1:]
from shmrl.types import Handle
import os
copies = RemoteCopies(Client(os.environ["SHMRL_TOKEN"]), own)
print("asks", flush=True)
copies.want([Handle.parse(h) for h in handles], {origin: url}, 0, 20.0)
"""


def test_a_rank_killed_while_it_waits_breaks_off_no_transfer(there, here, own):
    """It is killed before the origin serves at all; the transfer it asked for is there for the next rank."""
    handles, port = shipped(there, 3, nbytes=4 << 20), free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", ASK, own._url, there.origin, url, *map(str, handles)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "SHMRL_TOKEN": TOKEN}) as rank:
        assert rank.stdout.readline() == "asks\n"
        wait_until(lambda: here.stats()["used_bytes"] > 3 * 4 << 20, what="blocks reserved for the copies")
        os.kill(rank.pid, signal.SIGKILL)
    with NodeServer(there, TOKEN, f"127.0.0.1:{port}") as server:
        found = own.want(handles, {there.origin: url}, 1, 20.0)
        assert [held(here, found[h]) for h in handles] == [held(there, h) for h in handles]
        assert server.counters["sent_bytes"] == 3 * 4 << 20


def test_a_node_server_killed_and_started_again_adopts_its_copies(there, here, server):
    handles, nodes, port = shipped(there, 5), {there.origin: server.url}, free_ports(1)
    with Client(TOKEN) as client:
        own = RemoteCopies(client, f"http://127.0.0.1:{port}")
        with process(here, port):
            found = own.want(handles, nodes, 0, 20.0)
        here.sweep()
        assert here.stats()["orphaned"] == 5
        with process(here, port):
            assert own.want(handles, nodes, 0, 20.0) == found
            assert client.run(own._url, counters)["fetched"] == 0
            assert here.stats()["orphaned"] == 0
            assert server.counters["sent_bytes"] == 5 * 100_000
            own.done(handles, nodes, 0)
            assert here.stats()["blocks"] == 0


def test_a_rank_that_comes_back_takes_over_its_own_copies_and_nobody_elses(there, here, server):
    """Ranks without a server of their node; else the first to come back would hold what the other reads again."""
    handles, nodes = shipped(there, 4, ranks=2), {there.origin: server.url}
    mine = {0: handles[:2], 1: handles[2:]}
    with Client(TOKEN) as client:
        for reader in mine:
            with Arena.attach(here.address) as arena:
                copies = Copies(arena, client, whose=str(reader))
                assert len(copies.want(mine[reader], nodes, reader, 20.0)) == 2
                copies._pool.shutdown()
        here.sweep()
        assert here.stats()["orphaned"] == 4
        for reader in mine:
            with Arena.attach(here.address) as arena:
                copies = Copies(arena, client, whose=str(reader))
                assert len(copies.want(mine[reader], nodes, reader, 20.0)) == 2
                assert copies.counters["fetched"] == 0
                copies.done(mine[reader], nodes, reader)
                copies._pool.shutdown()
            assert here.stats()["blocks"] == (2, 0)[reader]
    assert server.counters["sent_bytes"] == 4 * 100_000


def test_a_node_server_killed_in_the_middle_of_a_fetch_leaves_nothing_half(there, here):
    """The origin stops in the middle of a block, the fetching server is killed, both come back."""
    (handle,), ports = shipped(there, 1, nbytes=8 << 20), (free_ports(1), free_ports(1))
    nodes = {there.origin: f"http://127.0.0.1:{ports[0]}"}
    with Client(TOKEN) as client:
        own, found = RemoteCopies(client, f"http://127.0.0.1:{ports[1]}"), {}
        with process(here, ports[1]) as fetching:
            asking = threading.Thread(target=lambda: found.update(own.want([handle], nodes, 0, 20.0)))
            asking.start()
            with process(there, ports[0], dies_after=3 << 20) as origin:
                origin.wait()
            os.kill(fetching.pid, signal.SIGKILL)
        here.sweep()
        assert here.stats()["used_bytes"] == 0
        with process(there, ports[0]), process(here, ports[1]):
            asking.join()
            assert held(here, found[handle]) == held(there, handle)


def test_a_server_that_stops_breaks_off_a_fetch_that_hangs_and_calls_nothing_lost(there, here):
    """The origin accepts and says nothing; who asked tries again, at whatever server comes next."""
    (handle,), port = shipped(there, 1), free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as silent, Client(TOKEN) as client, ThreadPoolExecutor() as pool:
        own = RemoteCopies(client, f"http://127.0.0.1:{port}")
        with NodeServer(here, TOKEN, f"127.0.0.1:{port}"):
            nodes = {there.origin: f"http://127.0.0.1:{silent.getsockname()[1]}"}
            asked = pool.submit(own.want, [handle], nodes, 0, 15.0)
            accepted, _ = silent.accept()
            assert accepted.recv(1) == b"G"
        assert here.stats()["blocks"] == 0
        assert not asked.done()
        accepted.close()
        with NodeServer(here, TOKEN, f"127.0.0.1:{port}"):
            accepted, _ = silent.accept()  # the same question, asked anew
            accepted.close()
            silent.close()
            asked.cancel()
            client.close()
            with pytest.raises(NodeError, match="given up"):
                asked.result()


def test_a_server_that_stops_waits_neither_for_room_nor_for_who_asked(there, here, server, monkeypatch):
    """Of two copies that find no room one waits for it and one behind it; who asked is told that the server stops."""
    monkeypatch.setattr("shmrl.node.copies.LONGEST_WAIT_S", 1e6)
    here.put(noise(90 << 20))
    handles, nodes = shipped(there, 2, nbytes=16 << 20), {there.origin: server.url}
    full = NodeServer(here, TOKEN)
    full._copies._pool._max_workers = 1
    with Client(TOKEN, patience_s=0.0) as client, ThreadPoolExecutor() as pool:
        asked = pool.submit(RemoteCopies(client, full.url).want, handles, nodes, 0, 1e6)
        wait_until(lambda: len(full._copies._copies) == 2, what="the question")
        stopping = pool.submit(full.close)
        stopping.result(10)
        with pytest.raises(NodeError, match="given up"):
            asked.result()
    assert here.stats()["blocks"] == 1


def test_a_wait_for_longer_than_a_connection_may_be_silent_is_cut_short(there, here, own, monkeypatch):
    monkeypatch.setattr("shmrl.node.copies.LONGEST_WAIT_S", 0.1)
    (handle,) = shipped(there, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nodes = {there.origin: f"http://127.0.0.1:{silent.getsockname()[1]}"}
        assert own.want([handle], nodes, 0, 1e6) == {}


def test_an_origin_that_is_silent_holds_neither_copies_nor_what_other_nodes_are_told(there, here, server, tmp_path):
    with Arena.create("8MiB", backing="file", base=str(tmp_path)) as third, Client(TOKEN) as client:
        copies = Copies(here, client)
        with NodeServer(third, TOKEN) as dying:
            handles, nodes = [*shipped(third, 1), *shipped(there, 1)], {third.origin: dying.url}
            nodes[there.origin] = server.url
            assert len(copies.want(handles, nodes, 0, 20.0)) == 2
        with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:
            nodes[third.origin] = f"http://127.0.0.1:{silent.getsockname()[1]}"
            telling = pool.submit(copies.done, handles, nodes, 0)
            wait_until(lambda: here.stats()["blocks"] == 0, what="the copies' end")
            wait_until(lambda: server.counters["requests"] == 3, what="the healthy node to be told")
            assert not telling.done()
            copies.close()
            telling.result(10)
        third.unlink()


def test_copies_that_find_no_room_are_spilled_where_the_arena_may(there, server, tmp_path):
    (handle,) = shipped(there, 1, nbytes=3 << 20)
    with Arena.create("1MiB", spill_dir=str(tmp_path)) as small, Client(TOKEN) as client:
        copies = Copies(small, client)
        found = copies.want([handle], {there.origin: server.url}, 0, 20.0)
        assert held(small, found[handle]) == held(there, handle)
        assert small.stats()["spilled"] == 1
        copies.done([handle], {there.origin: server.url}, 0)
        assert small.stats()["blocks"] == 0
        copies.close()
        small.unlink()


def test_statistics_name_the_copies_and_the_tag_says_of_what_they_are(there, here, server, copies):
    (handle,) = shipped(there, 1)
    copies.want([handle], {there.origin: server.url}, 0, 20.0)
    assert here.stats(by="source")["by"]["fetched"]["blocks"] == 1
    assert Handle.parse(here.ls()[0]["tag"].split("/")[2]) == handle
    with Arena.attach(here.address) as other:
        assert Copies(other, Client(TOKEN))._copies == {}  # they stay with who fetched them while that lives
