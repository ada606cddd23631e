"""`fetch`: the same bytes, columns and checksums in another arena, whatever happens to connections and servers."""

import hashlib
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest

from shmrl import wire
from shmrl.arena import Arena, span_bytes
from shmrl.errors import ArenaFull, ChecksumError, ConfigError, ForeignArena, LostPayload, NodeError
from shmrl.node import fetch, http
from shmrl.node.blocks import moved
from shmrl.node.client import Client
from shmrl.node.server import NodeServer
from shmrl.node.service import Reply
from shmrl.node.transfer import fetch_one
from shmrl.payload import assemble, encode, pack
from tests.node.conftest import TOKEN, held, noise, process
from tests.payload import branches
from tests.support.runs import free_ports


def columns(arena):
    """A block of 300 rows of 700 bytes between bytes of no column."""
    rows = noise(210_000)
    with arena.reserve(211_000) as block:
        np.frombuffer(block.buffer, np.uint8)[500:210_500] = rows
        return block.seal(columns=[("routing", 500, 700, 300)])


@pytest.mark.parametrize(("backing", "local"), [("shm", True), ("shm", False), ("memfd", False), ("file", False)])
def test_copies_have_the_bytes_the_columns_and_the_checksums(here, backing, local, tmp_path, request):
    if not local:
        request.getfixturevalue("by_sendfile")
    base = str(tmp_path) if backing == "file" else None
    with Arena.create("8MiB", backing=backing, base=base, spill_dir=str(tmp_path)) as there:
        handles = [there.put(noise(n, n)) for n in (0, 1, 100, 65_536, 65_537, 1_000_000)]
        handles += [columns(there), there.put(noise(9 << 20), on_full="spill"), there.put(b"xy", checksum=False)]
        with NodeServer(there, TOKEN) as server:
            copies = fetch(here, handles, {there.origin: server.url}, token=TOKEN)
        assert [copy.origin for copy in copies] == [here.origin] * len(handles)
        for handle, copy in zip(handles, copies, strict=True):
            assert held(here, copy) == held(there, handle)
            assert here.columns(copy) == there.columns(handle)
        for copy in copies[:-1]:
            here.get(copy, verify=True).release()
        with pytest.raises(ChecksumError, match="without checksums"):
            here.get(copies[-1], verify=True)
        with here.get(copies[6], field="routing", rows=(120, 290), verify=True) as view:
            assert bytes(memoryview(view)) == held(there, handles[6])[500 + 120 * 700 : 500 + 290 * 700]
        assert here.free(copies) == len(copies)
        assert here.stats()["blocks"] == 0
        there.unlink()


def test_a_broken_connection_is_resumed_behind_the_last_byte(there, here, server, by_sendfile, monkeypatch):
    data, sent, whole = noise(10 << 20), [], http.Stream.send_file

    def breaks(self, fd, offset, nbytes):
        part = min(nbytes, 3 << 20)
        whole(self, fd, offset, part)
        sent.append(part)
        if part < nbytes:
            self.shutdown()

    monkeypatch.setattr(http.Stream, "send_file", breaks)
    (copy,) = fetch(here, [there.put(data)], {there.origin: server.url}, token=TOKEN)
    assert held(here, copy) == data.tobytes()
    assert sent == [3 << 20, 3 << 20, 3 << 20, 1 << 20]


@pytest.mark.parametrize("nbytes", [24 << 20, pytest.param(1 << 30, marks=pytest.mark.long)])
def test_a_server_killed_in_the_middle_and_started_again_is_resumed(tmp_path, nbytes):
    data, port, cut = noise(nbytes), free_ports(1), nbytes * 3 // 8
    capacity = nbytes * 17 // 16
    with Arena.create(capacity) as there, Arena.create(capacity, backing="file", base=str(tmp_path)) as here:
        handle, nodes, copies = there.put(data), {there.origin: f"http://127.0.0.1:{port}"}, []
        with process(there, port, dies_after=cut) as first:
            fetching = threading.Thread(target=lambda: copies.extend(fetch(here, [handle], nodes, token=TOKEN)))
            fetching.start()
            first.wait(60)
        with process(there, port):
            fetching.join()
            with Client(TOKEN) as client:
                assert client.run(nodes[there.origin], counters)["sent_bytes"] == nbytes - cut
        assert hashlib.sha256(held(here, copies[0])).digest() == hashlib.sha256(data).digest()
        there.free([handle])  # nobody has a hold any more
        there.sweep()
        assert there.stats()["used_bytes"] == 0
        there.unlink()
        here.unlink()


def counters(connection):
    connection.ask("GET", "/v1/counters")
    return wire.unpack(connection.body(connection.answer()))


def test_bytes_that_do_not_match_are_asked_for_again_and_then_refused(there, here, server):
    with there.reserve(1_000_000) as block:
        array = np.frombuffer(block.buffer, np.uint8)
        handle = block.seal()
    array[500_000] ^= 1
    with pytest.raises(ChecksumError, match=r"row block 7"):
        fetch(here, [handle], {there.origin: server.url}, token=TOKEN)
    assert server.counters["sent_bytes"] == 2_000_000
    assert here.stats()["blocks"] == 0


def test_bytes_that_were_spoilt_on_the_way_are_asked_for_again(there, here, server, monkeypatch):
    whole, spoilt = http.Stream.some, []

    def some(self, into):
        n = whole(self, into)
        if n > 1000 and not spoilt:
            spoilt.append(n)
            into[n - 1] ^= 255
        return n

    monkeypatch.setattr(http.Stream, "some", some)
    data = noise(1_000_000)
    (copy,) = fetch(here, [there.put(data)], {there.origin: server.url}, token=TOKEN)
    assert spoilt
    assert held(here, copy) == data.tobytes()


def test_what_will_not_pass_is_raised_at_once_and_leaves_nothing(there, here, server):
    nodes = {there.origin: server.url}
    kept, freed = there.put(noise(1000)), there.put(b"x")
    there.free([freed])
    with pytest.raises(LostPayload, match=r"127\.0\.0\.1.*is gone"):
        fetch(here, [kept, freed], nodes, token=TOKEN)
    with pytest.raises(NodeError, match=r"401 Unauthorized.*SHMRL_TOKEN"):
        fetch(here, [kept], nodes, token="0" * 32)
    with pytest.raises(ForeignArena, match="no node server is known"):
        fetch(here, [kept], {}, token=TOKEN)
    with pytest.raises(NodeError, match=r"'ftp://x' is no node server's url"):
        fetch(here, [kept], {there.origin: "ftp://x"}, token=TOKEN)
    larger = there.put(noise(2 << 20))
    with Arena.create("1MiB") as small:
        small.unlink()
        with pytest.raises(ArenaFull):
            fetch(small, [larger], nodes, token=TOKEN)
    assert here.stats()["blocks"] == 0


def test_a_server_that_was_given_up_is_waited_for_once_and_asked_again(there, here):
    """Else each of a lost node's blocks would cost its reader another patience."""
    handles, port = [there.put(b"x" * n) for n in (1, 2, 3)], free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with Client(TOKEN, patience_s=0.2) as client:
        with pytest.raises(NodeError, match=r"given up after [2-9]\d* attempts"):
            fetch_one(here, client, handles[0], url)
        with pytest.raises(NodeError, match="given up after 1 attempts"):
            fetch_one(here, client, handles[1], url)
        with NodeServer(there, TOKEN, f"127.0.0.1:{port}"):
            here.free([fetch_one(here, client, handle, url) for handle in handles])
        with pytest.raises(NodeError, match=r"given up after [2-9]\d* attempts"):
            fetch_one(here, client, handles[2], url)
    assert here.stats()["blocks"] == 0


def test_a_connection_to_a_server_that_was_started_again_costs_no_patience(there, here):
    """What was kept is dead, and says nothing about the server."""
    handles, port = [there.put(b"x" * n) for n in (1, 2)], free_ports(1)
    with Client(TOKEN, patience_s=0) as client:
        for handle in handles:
            with NodeServer(there, TOKEN, f"127.0.0.1:{port}"):
                here.free([fetch_one(here, client, handle, f"http://127.0.0.1:{port}")])
        with pytest.raises(NodeError, match=r"given up after 1 attempts in .*Connection refused"):
            fetch_one(here, client, handles[0], f"http://127.0.0.1:{port}")


def test_a_server_that_stays_away_is_given_up_after_the_timeout(there, here):
    handle, url = there.put(b"x"), f"http://127.0.0.1:{free_ports(1)}"
    with pytest.raises(NodeError, match=rf"{url}: given up after \d+ attempts in .*Connection refused"):
        fetch(here, [handle], {there.origin: url}, timeout_s=0.2, token=TOKEN)
    assert here.stats()["blocks"] == 0


TAIL = b"HTTP/1.1 200 OK\r\nShmrl-Crc32c: 1\r\nShmrl-Checked: 0\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nShmrl-Crc32c: 1\r\nShmrl-Checked: 1\r\nContent-Length: x\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 999999999999999\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 65537\r\n\r\n" + bytes(65537),
        b"HTTP/1.1 " + b"2" * 5000 + b" OK\r\n\r\n",
        TAIL + b"Content-Length: 999999999999999\r\n\r\n",
        TAIL + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        TAIL + b"Content-Length: 900000\r\n\r\n" + bytes(900_000),
        b"HTTP/1.1 200 OK\r\nShmrl-Crc32c: 99999999999\r\nShmrl-Checked: 1\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nShmrl-Crc32c: " + b"1" * 5000 + b"\r\nShmrl-Checked: 1\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
)
def test_what_is_no_node_server_is_given_up_too(there, here, answer):
    def talk(listener, over):
        while not over.is_set():
            sock, _ = listener.accept()
            with sock, suppress(ConnectionError):  # who has seen enough reads no further
                sock.recv(4096)
                sock.sendall(answer)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=talk, args=(listener, over))
        thread.start()
        with pytest.raises(NodeError, match="given up"):
            fetch(here, [there.put(b"abc")], {there.origin: f"http://127.0.0.1:{port}"}, timeout_s=0.1, token=TOKEN)
        over.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()
    assert here.stats()["blocks"] == 0


@pytest.mark.parametrize("nbytes", [3, 50_000])
def test_a_tail_that_fits_no_copy_is_refused_at_once(there, here, server, nbytes, monkeypatch):
    """Just below what is received at all, and of a block without checksums: nothing but the seal can find it."""
    handle = there.put(noise(nbytes), checksum=False)
    room = span_bytes(nbytes) - nbytes
    monkeypatch.setattr(
        server.service, "_tail", lambda _: Reply(200, bytes(room), {"Shmrl-Crc32c": 0, "Shmrl-Checked": 0})
    )
    with pytest.raises(NodeError, match=r"127\.0\.0\.1.*do not fit"):
        fetch(here, [handle], {there.origin: server.url}, token=TOKEN)
    assert here.stats()["blocks"] == 0


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xd9\x05ab"])
def test_an_answer_that_is_no_msgpack_is_a_node_error(server, body, monkeypatch):
    monkeypatch.setattr(server.service, "answer", lambda *_: Reply(200, body))
    with Client(TOKEN) as client, pytest.raises(NodeError, match=r"no node server's answer: ProtocolError"):
        client.call(server.url, "blocks/adopt", handles=[])


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://h\u20acst\ud800:1", "http://[::1"])
def test_a_url_that_is_none_is_a_node_error(there, here, url):
    with pytest.raises(NodeError):
        fetch(here, [there.put(b"x")], {there.origin: url}, timeout_s=0, token=TOKEN)


@pytest.mark.parametrize("token", [TOKEN[:-1] + "\u20ac", TOKEN + "\r\nX: y"])
def test_a_token_that_no_header_can_carry_is_a_configuration_error_that_does_not_show_it(there, here, server, token):
    with pytest.raises(ConfigError, match="printable ASCII") as refused:
        fetch(here, [there.put(b"x")], {there.origin: server.url}, token=token)
    assert TOKEN[:-1] not in str(refused.value)
    assert server.counters["requests"] == 0


def test_proxies_of_the_environment_are_not_used(there, here, server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    fetch(here, [there.put(b"x")], {there.origin: server.url}, timeout_s=1, token=TOKEN)


def test_a_copy_of_a_payload_assembles_to_the_same_arrays(there, here, server):
    branch = branches.make(400, 100)
    branch.rows["head_logprobs"].values[::2, 1:] = -np.inf  # what JSON cannot carry
    sample = encode(there, branch, tag="run/source/group/0")
    ((original,),) = pack([sample], seq_len=4096, num_ranks=1)
    copies = dict(
        zip(sample.handles, fetch(here, sample.handles, {there.origin: server.url}, token=TOKEN), strict=True)
    )
    a, b = assemble(there, original, verify=True), assemble(here, moved(original, copies), verify=True)
    assert np.array_equal(a.tokens, b.tokens)
    assert np.array_equal(a.routing, b.routing)
    assert np.isneginf(b.head_logprobs[100::2, 1:]).all()
    assert a.head_logprobs.tobytes() == b.head_logprobs.tobytes()
    with pytest.raises(LostPayload, match=r"this is node"):
        assemble(here, original)
