"""The node server as any HTTP client sees it: who is let in, what is told, and what garbage does to it."""

import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from shmrl import wire
from shmrl.arena import Arena
from shmrl.config import NodeConfig
from shmrl.errors import NodeError, PortInUse
from shmrl.node import fetch
from shmrl.node import server as serving
from shmrl.node.client import Client
from shmrl.node.server import NodeServer
from shmrl.types import Handle
from tests.node.conftest import TOKEN, noise
from tests.support.clock import wait_until

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def ask(server):
    """ask(method, path, **headers) -> (status, headers, body), over one connection that is kept."""
    address = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)

    def ask(method, path, headers=BEARER, body=None):
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    yield ask
    connection.close()


def test_a_block_is_served_whole_in_ranges_and_by_head(there, ask):
    data = noise(200_000).tobytes()
    path = f"/v1/blocks/{there.put(data)}"
    assert ask("GET", path)[::2] == (200, data)
    status, headers, body = ask("HEAD", path)
    assert (status, headers["Content-Length"], body) == (200, "200000", b"")
    for asked, start, stop in [
        ("bytes=0-0", 0, 1),
        ("bytes=65535-65536", 65535, 65537),
        ("bytes=199999-", 199_999, 200_000),
        ("bytes=100000-900000", 100_000, 200_000),
        ("bytes=-5", 199_995, 200_000),
    ]:
        status, headers, body = ask("GET", path, BEARER | {"Range": asked})
        assert (status, body) == (206, data[start:stop])
        assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/200000"
    for ignored in ("bytes=5-2", "rows=1-2", "bytes=a-b", "bytes=-", "bytes=0-1,5-6"):
        assert ask("GET", path, BEARER | {"Range": ignored})[0] == 200
    status, headers, _ = ask("GET", path, BEARER | {"Range": "bytes=200000-"})
    assert (status, headers["Content-Range"]) == (416, "bytes */200000")


def test_a_spilled_block_and_one_without_checksums_are_served(tmp_path, by_sendfile):
    with Arena.create("1MiB", spill_dir=str(tmp_path)) as arena, NodeServer(arena, TOKEN) as server:
        data = noise(4 << 20).tobytes()
        handles = [arena.put(data, on_full="spill"), arena.put(data[:1000], checksum=False)]
        assert arena.stats()["spilled"] == 1
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        for handle, nbytes in zip(handles, (4 << 20, 1000), strict=True):
            connection.request("GET", f"/v1/blocks/{handle}", headers=BEARER | {"Range": "bytes=7-"})
            assert connection.getresponse().read() == data[7:nbytes]
        connection.close()
        arena.unlink()


@pytest.mark.parametrize(
    "given", [{}, {"Authorization": f"Bearer {TOKEN[:-1]}"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"}]
)
def test_without_the_token_every_request_is_401_and_changes_nothing(there, server, given):
    handle = there.put(b"secret", tag="t")
    there.ship([handle], readers=1)
    for method, path in [
        ("GET", f"/v1/blocks/{handle}"),
        ("HEAD", f"/v1/blocks/{handle}"),
        ("DELETE", f"/v1/blocks/{handle}?reader=0"),
        ("POST", "/v1/blocks/free"),
        ("GET", "/v1/counters"),
        ("GET", "/"),
    ]:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request(method, path, headers=given)
        answer = connection.getresponse()
        assert (answer.status, b"secret" in answer.read(), answer.headers["Connection"]) == (401, False, "close")
        connection.close()
    assert there.stats()["blocks"] == 1
    assert server.counters["refused"] == 6


def test_a_wrong_token_is_told_to_whoever_sends_much(there, server):
    handles = [there.put(b"x")] * 30_000
    with Client("0" * 32) as client, pytest.raises(NodeError, match="401 Unauthorized"):
        client.call(server.url, "fetch", handles=handles, nodes={}, reader=0, wait_s=0.0)


def test_foreign_and_forged_ids_are_404_freed_ones_410_and_nothing_is_listed(there, here, ask):
    handle, foreign = there.put(b"x"), here.put(b"y")
    forged = Handle(handle[:-1] + bytes([handle[-1] ^ 1]))
    for path in (f"{foreign}", f"{forged}", "h00", f"{foreign}/tail", "", "..%2f"):
        assert ask("GET", f"/v1/blocks/{path}")[0] == 404
    for path in ("/", "/v1", "/v1/", "/v1/blocks", "/favicon.ico"):
        status, _, body = ask("GET", path)
        assert (status, body) == (404, b"nothing here")
    there.free([handle])
    assert ask("GET", f"/v1/blocks/{handle}")[0] == 410
    assert ask("GET", f"/v1/blocks/{foreign}")[0] == 404


def test_delete_is_done_by_a_reader_and_the_last_one_frees(there, ask):
    handle = there.put(b"x")
    path = f"/v1/blocks/{handle}"
    assert ask("DELETE", f"{path}?reader=0")[0] == 400  # never shipped
    there.ship([handle], readers=3)
    for query in ("reader=0", "reader=0", "reader=1"):
        assert ask("DELETE", f"{path}?{query}")[0] == 204
        assert ask("HEAD", path)[0] == 200
    assert ask("DELETE", path)[0] == 400
    assert ask("DELETE", f"{path}?reader=1&reader=2")[0] == 204
    assert there.stats()["blocks"] == 0
    assert ask("DELETE", f"{path}?reader=2")[0] == 204  # idempotent


def test_an_owner_elsewhere_acts_through_the_server(there, server):
    with Arena.attach(there.address) as worker:
        handles = [worker.put(b"x", tag=f"run/s/{i}") for i in range(4)]
        with Client(TOKEN) as client:
            client.call(server.url, "blocks/adopt", handles=handles)
            client.call(server.url, "blocks/ship", handles=handles[:1], readers=1, step=3)
            client.call(server.url, "blocks/done", handles=handles[:1], reader=0)
            assert client.call(server.url, "blocks/free", handles=handles[1:2]) == 1
            assert client.call(server.url, "blocks/discard", tag_prefix="run/s/2") == 1
    assert there.stats()["blocks"] == 1  # the worker has left: it is the server's, no orphan
    assert there.stats()["orphaned"] == 0


def test_a_server_refuses_what_is_no_request_and_goes_on(server, there, ask):
    handle = there.put(b"x")
    host, port = server.url.removeprefix("http://").split(":")
    token = f"Authorization: Bearer {TOKEN}\r\n"
    for raw, status in [
        (b"\0\1\2\3\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: 1\r\nA: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 40_000, 431),
        (f"BREW / HTTP/1.1\r\n{token}\r\n".encode(), 501),
        (f"POST /v1/fetch HTTP/1.1\r\n{token}Content-Length: -5\r\n\r\n".encode(), 400),
        (f"POST /v1/fetch HTTP/1.1\r\n{token}Transfer-Encoding: chunked\r\n\r\n".encode(), 400),
        (f"POST /v1/fetch HTTP/1.1\r\n{token}Content-Length: {10**12}\r\n\r\n".encode(), 413),
        (f"POST /v1/fetch HTTP/1.1\r\n{token}Content-Length: 4\r\n\r\nabcd".encode(), 400),
        (f"POST /v1/fetch HTTP/1.1\r\n{token}Content-Length: {'9' * 5000}\r\n\r\n".encode(), 400),
        (f"GET /v1/blocks/{handle} HTTP/1.1\r\n{token}Range: bytes=0-{'9' * 5000}\r\n\r\n".encode(), 200),
        (f"POST /v1/blocks/unlink HTTP/1.1\r\n{token}\r\n".encode(), 404),
    ]:
        with socket.create_connection((host, int(port)), 5) as sock:
            sock.sendall(raw)
            assert sock.recv(4096).startswith(f"HTTP/1.1 {status} ".encode()), raw[:60]
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.sendall(b"GET / HT")  # and goes
    assert ask("GET", f"/v1/blocks/{handle}")[2] == b"x"


def test_arguments_beyond_what_the_arena_counts_are_400(there, ask):
    handle = there.put(b"x")
    for verb, arguments in [
        ("ship", {"handles": [handle], "readers": 1, "step": 2**63}),
        ("ship", {"handles": [handle], "readers": -1}),
        ("done", {"handles": [handle], "reader": 2**63}),
    ]:
        assert ask("POST", f"/v1/blocks/{verb}", body=wire.pack(arguments))[0] == 400
    assert ask("DELETE", f"/v1/blocks/{handle}?reader={2**70}")[0] == 400


def test_our_own_mistake_is_answered_with_500_and_logged_and_the_server_goes_on(
    server, there, ask, monkeypatch, caplog
):
    handle = there.put(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(server.service, "answer", None)
        status, headers, body = ask("GET", f"/v1/blocks/{handle}")
    assert (status, headers["Connection"], body) == (500, "close", b"TypeError")
    assert "a request could not be answered" in caplog.text
    assert ask("GET", f"/v1/blocks/{handle}")[2] == b"x"


def test_a_stranger_who_says_nothing_is_cut_off_while_a_known_client_may_think(server, there, ask, monkeypatch):
    monkeypatch.setattr(serving, "HEAD_S", 0.2)
    assert ask("GET", f"/v1/blocks/{there.put(b'x')}")[0] == 200
    (known,) = server._threads
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        assert sock.recv(1) == b""
    assert list(server._threads) == [known]


def test_a_slow_loris_is_cut_off_while_others_are_served(server, there, ask, monkeypatch):
    monkeypatch.setattr(serving, "HEAD_S", 0.2)
    handle = there.put(b"x")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        for byte in b"GET / HTTP/1.1":
            sock.sendall(bytes([byte]))
        assert ask("GET", f"/v1/blocks/{handle}")[0] == 200
        assert sock.recv(100) == b""  # closed by the server, which waits for no further byte


def test_a_peer_that_takes_nothing_is_dropped_and_holds_no_block(server, there, by_sendfile, monkeypatch):
    monkeypatch.setattr(serving, "STALL_S", 0.2)
    handle = there.put(noise(48 << 20))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.sendall(f"GET /v1/blocks/{handle} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        wait_until(lambda: not server._threads, what="the connection's end")
    there.free([handle])
    assert there.stats()["used_bytes"] == 0


def test_a_client_killed_in_the_middle_leaves_no_hold(server, there, by_sendfile):
    handle = there.put(noise(48 << 20))
    host, port = server.url.removeprefix("http://").split(":")
    script = (
        "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); "
        "s.sendall(sys.stdin.read().encode()); s.recv(4096); print('got', flush=True); sys.stdin.close(); "
        "import signal; signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, host, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        child.stdin.write(f"GET /v1/blocks/{handle} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n")
        child.stdin.close()
        assert child.stdout.readline() == "got\n"
        os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: not server._threads, what="the connection's end")
    there.free([handle])
    assert there.stats()["used_bytes"] == 0


def test_two_hundred_connections_are_served_at_once_and_too_many_are_refused(server, there, monkeypatch):
    host, port = server.url.removeprefix("http://").split(":")
    handle = there.put(noise(1000))
    request = f"GET /v1/blocks/{handle} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    many = [socket.create_connection((host, int(port)), 10) for _ in range(200)]
    try:
        for sock in many:
            sock.sendall(request)
        assert all(sock.recv(4096).startswith(b"HTTP/1.1 200 OK") for sock in many)
        monkeypatch.setattr(serving, "MAX_CONNECTIONS", 200)
        with socket.create_connection((host, int(port)), 10) as sock:
            assert sock.recv(1) == b""
        many.pop().close()
        wait_until(lambda: len(server._threads) == 199, what="a place")
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(request)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")
    finally:
        for sock in many:
            sock.close()


def test_a_port_in_use_names_its_holder_and_leaves_no_thread(there, server):
    before = threading.active_count()
    with pytest.raises(PortInUse, match=r"the node server: port \d+ is in use by"):
        NodeServer(there, TOKEN, server.url.removeprefix("http://"))
    assert threading.active_count() == before


def test_the_token_is_in_no_log_line(there, here, server, caplog):
    caplog.set_level(logging.DEBUG)
    handle = there.put(noise(1000))
    fetch(here, [handle], {there.origin: server.url}, token=TOKEN)
    for wrong in (TOKEN[::-1], TOKEN + "0"):
        with pytest.raises(NodeError, match="401") as refused:
            fetch(here, [handle], {there.origin: server.url}, token=wrong)
        assert wrong not in str(refused.value)
        assert wrong not in caplog.text
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as sock:
        sock.sendall(f"GET {TOKEN} {TOKEN}\r\nAuthorization {TOKEN}\r\n\r\n".encode())
        assert TOKEN not in sock.recv(4096).decode()
    assert "GET /v1/blocks/" in caplog.text
    assert TOKEN not in caplog.text


def two_gib(arena, tmp_path):
    """A block of 2 GiB + 4 KiB, mostly zeros that were never written, which is sent as one with checksums is."""
    block = arena.reserve((2 << 30) + 4096)
    array = np.frombuffer(block.buffer, np.uint8)
    array[(2 << 30) - 4096 :] = noise(8192)
    del array
    return block._seal_as(b"", 0, True)


def test_two_gib_and_4_kib_by_head_and_ranges_across_the_line(tmp_path, by_sendfile):
    with Arena.create("2304MiB", backing="file", base=str(tmp_path)) as arena, NodeServer(arena, TOKEN) as server:
        handle, line = two_gib(arena, tmp_path), 2 << 30
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("HEAD", f"/v1/blocks/{handle}", headers=BEARER)
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["Content-Length"] == str(line + 4096)
        expected = noise(8192).tobytes()
        for asked, body in [
            (f"bytes={line - 4096}-{line + 4095}", expected),
            (f"bytes={line - 1}-{line}", expected[4095:4097]),
            (f"bytes={line}-", expected[4096:]),
            ("bytes=-1", expected[-1:]),
        ]:
            connection.request("GET", f"/v1/blocks/{handle}", headers=BEARER | {"Range": asked})
            assert connection.getresponse().read() == body
        connection.close()
        arena.unlink()


@pytest.mark.long
def test_two_gib_and_4_kib_by_get(tmp_path, by_sendfile):
    with Arena.create("2304MiB", backing="file", base=str(tmp_path)) as arena, NodeServer(arena, TOKEN) as server:
        handle, line = two_gib(arena, tmp_path), 2 << 30
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("GET", f"/v1/blocks/{handle}", headers=BEARER)
        answer = connection.getresponse()
        for _ in range(line // (1 << 20) - 1):
            assert answer.read(1 << 20) == bytes(1 << 20)
        assert answer.read() == bytes((1 << 20) - 4096) + noise(8192).tobytes()
        connection.close()
        arena.unlink()


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate of 127.0.0.1 and its key."""
    made = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=shmrl", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *names, "-out", made[0], "-keyout", made[1]], check=True, capture_output=True)
    return made


def test_over_tls_blocks_are_fetched_and_a_server_of_another_authority_is_refused_at_once(there, here, certificate):
    given = NodeConfig(address="127.0.0.1:1", certificate=certificate[0], key=certificate[1], ca=certificate[0])
    with NodeServer(there, TOKEN, tls=serving.context(given)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        handle = there.put(noise(3 << 20))
        (copy,) = fetch(here, [handle], {there.origin: server.url}, token=TOKEN, ca=given.ca)
        assert here.get(copy, verify=True).nbytes == 3 << 20
        with pytest.raises(NodeError, match="certificate verify failed"):
            fetch(here, [handle], {there.origin: server.url}, token=TOKEN)
