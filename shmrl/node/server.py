"""The node server: a node's arena over HTTP, for other nodes. Sockets, threads, the token; `service` has the answers.

One per node of a run with several, a process of its own beside whoever hosts the arena (`shmrl node`, or a role of
`shmrl run`), so that it can be started again in place; and one inside an env server with an arena of its own. A thread
per connection: what it does is wait in sendfile(2) and recv(2), without the interpreter's lock.

A block's pages go into the socket without a copy, so they could change until the peer has received them. A client
finds that by the checksums; of a block sealed without, a copy is sent.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import signal
import socket
import ssl
import threading
from http import HTTPStatus
from typing import Self

from shmrl.arena import Arena, moving
from shmrl.config import NodeConfig, RunTree
from shmrl.errors import ConfigError, RunError
from shmrl.node.client import Client
from shmrl.node.copies import Copies
from shmrl.node.host import read_token, require_arena
from shmrl.node.http import MAX_BODY, BadMessage, Head, Stream, message
from shmrl.node.ports import port_in_use
from shmrl.node.published import Addresses
from shmrl.node.service import Reply, Service

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
IDLE_S = 120.0  # a connection between requests, once it has shown the token
HEAD_S = 10.0  # a request's head, from its first byte on; and until the first one begins
WATCH_S = 0.5  # how often the process looks whether its parent is there
DRAIN_S = 1.0  # a peer that was refused in the middle of its request, to read why
STALL_S = 30.0  # a peer that takes or sends nothing in the middle of a body


class NodeServer:
    """Serves the blocks of `arena` at `url` to whoever knows `token`, and fetches into it, until close().

    address: "host:port"; port 0 takes a free one. tls: a server-side context, or None. client: how it reaches others.
    """

    def __init__(
        self,
        arena: Arena,
        token: str,
        address: str = "127.0.0.1:0",
        *,
        tls: ssl.SSLContext | None = None,
        client: Client | None = None,
    ) -> None:
        self._copies = Copies(arena, client or Client(token))
        self.service = Service(arena, self._copies)
        self._expected = f"Bearer {token}".encode()
        self._files = moving.DataFiles(arena)
        self._tls = tls
        self._threads: dict[threading.Thread, Stream | None] = {}
        self._changing = threading.Lock()
        self._closing = threading.Event()
        self._listener = self._bound(address)
        host, port = self._listener.getsockname()[:2]
        self.url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        self._acceptor = threading.Thread(target=self._accept, name="shmrl-node-accept", daemon=True)
        self._acceptor.start()
        log.info("serving blocks of %s at %s", arena.address, self.url)

    def _bound(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, int(port)), family=family, backlog=128)
        except OSError as error:
            self._files.close()
            self._copies.close()
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(int(port), "the node server") from None
            raise RunError(f"the node server cannot bind {address}: {error}") from None

    @property
    def counters(self) -> dict[str, int]:
        """What it did so far; see `Service.counters`."""
        return self.service.counters

    def close(self) -> None:
        """Ends every connection and transfer; blocks that were fetched stay in the arena. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self._copies.close()
        with self._changing:
            threads = list(self._threads.items())
        for thread, stream in threads:
            if stream is not None:
                stream.shutdown()
            thread.join()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- connections

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(0.1):  # out of descriptors, or a connection that is gone already
                    log.warning("the node server cannot accept a connection: %s", error)
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._talk, args=(sock,), name="shmrl-node", daemon=True)
        with self._changing:
            full = len(self._threads) >= MAX_CONNECTIONS
            if not full:
                self._threads[thread] = None
        if full:
            log.warning("the node server has %d connections: one more was refused", MAX_CONNECTIONS)
            sock.close()
            return
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads for us
            log.warning("the node server cannot serve a connection: %s", error)
            with self._changing:
                del self._threads[thread]
            sock.close()

    def _talk(self, sock: socket.socket) -> None:
        me = threading.current_thread()
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            stream = Stream(sock)
            with self._changing:
                self._threads[me] = stream
            if isinstance(sock, ssl.SSLSocket):
                stream.patience(HEAD_S)
                sock.do_handshake()
            idle_s = HEAD_S
            while not self._closing.is_set() and self._exchange(stream, idle_s):
                idle_s = IDLE_S
        except OSError as error:
            log.debug("a connection ended: %s", error)
        finally:
            with self._changing:
                del self._threads[me]
            sock.close()

    def _exchange(self, stream: Stream, idle_s: float) -> bool:
        """One request, begun within idle_s, and its answer -> whether another may follow: never without the token."""
        head, keep = None, False
        try:
            head = stream.head(idle_s, HEAD_S)
            if head is None:
                return False
            reply, keep = self._answered(stream, head)
        except BadMessage as error:
            reply = Reply(error.status, str(error).encode())
        except OSError:
            raise
        except Exception as error:
            log.exception("a request could not be answered")
            reply = Reply(500, type(error).__name__.encode())
        stream.patience(STALL_S)
        self._send(stream, reply, body=head is None or head.start[0] != "HEAD", keep=keep)
        if not keep:
            stream.drain(DRAIN_S)
        return keep

    def _answered(self, stream: Stream, head: Head) -> tuple[Reply, bool]:
        method, target, version = head.start
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise BadMessage(505, "HTTP/1.1 is spoken here")
        self.service.count("requests")
        if not hmac.compare_digest(head.fields.get("authorization", "").encode("latin-1"), self._expected):
            self.service.count("refused")
            return Reply(401, b"a token is needed", {"WWW-Authenticate": "Bearer"}), False
        if head.length > MAX_BODY:
            raise BadMessage(413, f"a body of {head.length} bytes; {MAX_BODY} at most")
        stream.patience(STALL_S)
        reply = self.service.answer(method, target, head.fields, stream.body(head.length))
        log.debug("%s %s: %d, %d bytes", method, target, reply.status, reply.nbytes)
        return reply, version == "HTTP/1.1" and head.fields.get("connection", "").lower() != "close"

    # --------------------------------------------------------------------------------------------------------- sending

    def _send(self, stream: Stream, reply: Reply, *, body: bool, keep: bool) -> None:
        fields = reply.fields | ({} if keep else {"Connection": "close"})
        if reply.status != HTTPStatus.NO_CONTENT:
            fields["Content-Length"] = reply.nbytes
        head = message(f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", fields)
        if reply.view is None:
            stream.send(head + reply.body if body else head)
            return
        with reply.view:
            stream.send(head, more=body and reply.nbytes > 0)
            if body and reply.nbytes:
                self.service.count("sent_bytes", reply.nbytes)  # first: who has them all finds them counted
                self._send_block(stream, reply)

    def _send_block(self, stream: Stream, reply: Reply) -> None:
        view = reply.view
        assert view is not None
        if stream.copies or not reply.fields["Shmrl-Checked"]:
            with memoryview(view) as payload, payload[reply.start : reply.stop] as part:
                stream.send(part)
            return
        fd, offset, ours = self._files.opened(view)
        try:
            stream.send_file(fd, offset + reply.start, reply.nbytes)
        finally:
            if ours:
                os.close(fd)


# ---------------------------------------------------------------------------------------------------------- the process


def run(tree: RunTree) -> int:
    """`shmrl node` on an arena that is hosted already: serve it until a signal (128 + its number), or until whoever
    started this process is gone (0)."""
    address, token, where = require_arena(tree.arena), read_token(tree.arena), tree.node.address
    if where is None or token is None:
        raise ConfigError("a node server needs node.address and the run's token (arena.token_file, or SHMRL_TOKEN)")
    received: list[int] = []
    stop = threading.Event()

    def on_signal(number: int, _: object) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    parent = os.getppid()
    tls, client = context(tree.node), Client(token, ca=tree.node.ca)
    published = None if tree.job is None else Addresses(tree.job)
    if published is not None:
        where = f"{where.rpartition(':')[0]}:{published.port('node', 'node')}"
    with Arena.attach(address) as arena, NodeServer(arena, token, where, tls=tls, client=client) as server:
        if published is not None:
            published.publish("node", "node", server.url, origin=arena.origin)
        while not stop.wait(WATCH_S) and os.getppid() == parent:
            pass
        log.info("what it did: %s", ", ".join(f"{name} {count:,}" for name, count in server.counters.items()))
    return 128 + received[0] if received else 0


def context(node: NodeConfig) -> ssl.SSLContext | None:
    """The server's side of TLS; None without a certificate. ConfigError names files that are none."""
    if node.certificate is None:
        return None
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        made.load_cert_chain(node.certificate, node.key)
    except OSError as error:
        raise ConfigError(f"node.certificate = {str(node.certificate)!r}, node.key: {error}") from None
    return made
