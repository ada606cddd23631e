"""The HTTP design: the worker keeps blobs in its heap behind a ThreadingHTTPServer, readers GET and then DELETE them.

At its best: HTTP/1.1 with connections kept alive, no Nagle. Read by http.client and by requests.
"""

from __future__ import annotations

import http.client
import threading
import uuid
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from benches.peers.interface import Blob, Consumer, Peer, Producer, Setup


class HttpProducer(Producer):
    """One copy, into a bytes object; the reader comes for it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.blobs: dict[str, bytes] = {}
        self.server = serve(self.blobs)

    def put(self, data: Blob) -> Any:
        key = uuid.uuid4().hex
        self.blobs[key] = data.tobytes()
        return self.server.server_port, key

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def serve(blobs: dict[str, bytes]) -> ThreadingHTTPServer:
    """A server on a free port of the loopback, in threads of this process: GET /<key>, DELETE /<key>."""

    class Blobs(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            self._answer(blobs[self.path[1:]])

        def do_DELETE(self):
            del blobs[self.path[1:]]
            self._answer(b"")

        def _answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Blobs)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class HttpConsumer(Consumer):
    """call(method, port, key) -> body."""

    def __init__(self, setup: Setup, client: type[_HttpClient] | type[_Requests]) -> None:
        super().__init__(setup)
        self.client = client()

    def get(self, ref: Any) -> Blob:
        return np.frombuffer(self.client.call("GET", *ref), np.uint8)

    def done(self, refs: Any) -> None:
        for ref in refs:
            self.client.call("DELETE", *ref)

    def close(self) -> None:
        self.client.close()


class _HttpClient:
    connection: http.client.HTTPConnection | None = None

    def call(self, method: str, port: int, key: str) -> bytes:
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", port)
        self.connection.request(method, f"/{key}")
        return self.connection.getresponse().read()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class _Requests:
    def __init__(self) -> None:
        import requests

        self.session = requests.Session()
        self.session.trust_env = False  # no proxies

    def call(self, method: str, port: int, key: str) -> bytes:
        return self.session.request(method, f"http://127.0.0.1:{port}/{key}").content

    def close(self) -> None:
        self.session.close()


PEERS = [
    Peer("HTTP, http.client", HttpProducer, partial(HttpConsumer, client=_HttpClient)),
    Peer("HTTP, requests", HttpProducer, partial(HttpConsumer, client=_Requests), packages=("requests",)),
]
