"""put and get of a small and a large payload: the arena beside a heap behind HTTP and multiprocessing.shared_memory.

`pytest benches/bench_arena.py --benchmark-only`. The same bytes each time, in one run, so that ratios can be read off.
`put` ends when another process could read; `get` when this process can read every byte, handed over by another one.
Peers: a producer that keeps blobs in its heap and serves them by ThreadingHTTPServer, read by http.client over a
keep-alive connection from another process; SharedMemory, one segment per blob, as its documentation shows it.
"""

from __future__ import annotations

import http.client
import multiprocessing
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import shared_memory

import numpy as np
import pytest

from shmrl.arena import Arena

SIZES = pytest.mark.parametrize("nbytes", [4096, 6_300_000], ids=["4KiB", "6.3MB"])
KEPT = 40  # blobs in flight, so that sources and destinations are not in the caches


def sources(nbytes):
    """Eight different payloads, taken in turn."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, nbytes, np.uint8) for _ in range(8)]


class Turns:
    """put() on a ring of KEPT blobs: the oldest is freed as the next is put, as a steady run does."""

    def __init__(self, put, free, nbytes):
        self.put, self.free, self.data = put, free, sources(nbytes)
        self.kept = [put(self.data[i % 8]) for i in range(KEPT)]
        self.n = 0

    def __call__(self):
        self.free(self.kept[self.n % KEPT])
        self.kept[self.n % KEPT] = self.put(self.data[self.n % 8])
        self.n += 1

    def clear(self):
        for one in self.kept:
            self.free(one)


# -------------------------------------------------------------------------------------------------------------- arena


@pytest.mark.parametrize("huge_pages", ["auto", "always"])
def test_arena_first_publish(benchmark, huge_pages):
    """SH-18: from nothing to the first 8 MiB in an arena of 8 GiB; the promise is 0.5 s on a machine that is idle."""
    data = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)

    def publish():
        with Arena.create("8GiB", huge_pages=huge_pages) as made:
            made.free(made.put(data))
            made.unlink()

    benchmark.group = "first publish"
    benchmark.pedantic(publish, rounds=5)


@pytest.fixture
def arena():
    with Arena.create("1GiB") as made:
        yield made
        made.unlink()


@SIZES
@pytest.mark.parametrize("checksum", [True, False], ids=["checksum", "plain"])
def test_arena_put(benchmark, arena, nbytes, checksum):
    turns = Turns(lambda data: arena.put(data, checksum=checksum), arena.free, nbytes)
    benchmark.group = f"put {nbytes:,} bytes"
    benchmark(turns)
    turns.clear()


@SIZES
def test_arena_get(benchmark, arena, nbytes):
    with Arena.attach(arena.address) as reader:
        handles = [arena.put(data) for data in sources(nbytes)] * 5
        turn = iter(range(1 << 60))

        def get():
            return int(np.frombuffer(reader.get(handles[next(turn) % KEPT]), np.uint8).sum())

        benchmark.group = f"get and sum {nbytes:,} bytes"
        assert benchmark(get) > 0
    arena.free(handles[:8])


# --------------------------------------------------------------------------------------------------------------- HTTP


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and a small body leave together
    blobs: dict[str, bytes] = {}  # noqa: RUF012

    def do_PUT(self):
        self.blobs[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"")

    def do_GET(self):
        self._answer(self.blobs[self.path])

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def _serve(pipe):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    pipe.send(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.recv()


@pytest.fixture
def http_peer():
    """call(method, path, body) over one keep-alive connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    connection = http.client.HTTPConnection("127.0.0.1", ours.recv())

    def call(method, path, body=None):
        connection.request(method, path, body)
        return connection.getresponse().read()

    yield call
    connection.close()
    ours.send("stop")
    process.join()
    for end in (ours, theirs):
        end.close()


@SIZES
def test_http_put(benchmark, nbytes):
    """What the producer pays, who serves from its own heap: one copy there."""
    names = iter(range(1 << 60))

    def put(data):
        name = f"/{next(names)}"
        _Handler.blobs[name] = data.tobytes()
        return name

    turns = Turns(put, _Handler.blobs.pop, nbytes)
    benchmark.group = f"put {nbytes:,} bytes"
    benchmark(turns)
    turns.clear()


@SIZES
def test_http_get(benchmark, http_peer, nbytes):
    for i, data in enumerate(sources(nbytes)):
        http_peer("PUT", f"/{i}", memoryview(data))
    turn = iter(range(1 << 60))
    benchmark.group = f"get and sum {nbytes:,} bytes"
    assert benchmark(lambda: int(np.frombuffer(http_peer("GET", f"/{next(turn) % 8}"), np.uint8).sum())) > 0


# ------------------------------------------------------------------------------------------------------ shared_memory


def _segment(data):
    segment = shared_memory.SharedMemory(create=True, size=data.nbytes)
    np.frombuffer(segment.buf, np.uint8)[: data.nbytes] = data
    return segment


def _remove(segment):
    segment.close()
    segment.unlink()


@SIZES
def test_shared_memory_put(benchmark, nbytes):
    turns = Turns(_segment, _remove, nbytes)
    benchmark.group = f"put {nbytes:,} bytes"
    benchmark(turns)
    turns.clear()


@SIZES
def test_shared_memory_get(benchmark, nbytes):
    segments = [_segment(data) for data in sources(nbytes)]
    turn = iter(range(1 << 60))

    def get():
        segment = shared_memory.SharedMemory(name=segments[next(turn) % 8].name)
        total = int(np.frombuffer(segment.buf, np.uint8)[:nbytes].sum())
        segment.close()
        return total

    benchmark.group = f"get and sum {nbytes:,} bytes"
    assert benchmark(get) > 0
    for segment in segments:
        _remove(segment)
