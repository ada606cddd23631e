"""`shmrl env-server`: one environment behind one address. This process routes; its workers (`pool.py`) run episodes.

A ROUTER socket takes requests (`protocol.py`) of any number of clients, each of which says hello with the run's token
first. Request payloads are decoded once, to check them and to know their tag; replies pass through as bytes. Without
`arena.address` in its configuration the server makes an arena of its own and removes it at the end. `serve.http` serves
sessions beside (`sessions/`), where `serve.protocols` names them, and else the blocks of an own arena to other hosts.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from functools import partial
from importlib import import_module
from typing import Any

import psutil
import zmq
import zmq.asyncio

from shmrl.arena import Arena
from shmrl.config import ArenaConfig, EnvServerConfig, ServeConfig
from shmrl.config.addresses import is_loopback, redacted
from shmrl.config.sources import EnvSpec
from shmrl.env import foreign
from shmrl.env.clients import Clients
from shmrl.env.evaluation import Evaluation
from shmrl.env.pool import Pool, Request
from shmrl.env.protocol import (
    FIELDS,
    MAX_HELLO,
    check_tag,
    episodes_tag,
    error_reply,
    expect,
    method_of,
    notice_silence,
    payload_of,
    shares,
)
from shmrl.env.sandbox import Sandbox
from shmrl.env.sessions.server import SessionServer
from shmrl.env.starting import cannot_bind, environment_settings, needs_sandbox, needs_token
from shmrl.errors import ConfigError, ProtocolError, ServerDied
from shmrl.monitor.metrics import LoopLag
from shmrl.node.host import create_arena, read_token
from shmrl.node.published import Addresses
from shmrl.node.server import NodeServer
from shmrl.wire import MAX_MESSAGE, pack

log = logging.getLogger(__name__)
PYTHON_S = 60.0
"""How long another interpreter may take to say what it has, on a machine that starts everything at once."""
LINGER_MS = 2000
"""How long replies may still travel after the server has stopped."""
REMIND_S = 5.0
"""How often the log says which episodes a takeover waits for."""
LAG_TICK_S = 0.05


class EnvServer:
    """Serves one environment until `close`, or until it cannot.

    Args:
        env_id, env_args: which environment, as in `env.id` and `env.args`.
        address: tcp://host:port or ipc://path; port 0 takes a free one, and `self.address` says which after `bind`.
        config: everything else (workers, split, arena, limits); its own env and address are not used.

    Example:
        server = EnvServer("reverse-text", {"seed": 1}, "tcp://127.0.0.1:0")
        running = asyncio.create_task(server.run()); ...; await server.close(); await running
    """

    def __init__(
        self,
        env_id: str,
        env_args: dict[str, Any] | None = None,
        address: str = "tcp://127.0.0.1:0",
        *,
        config: EnvServerConfig | None = None,
    ) -> None:
        spec = EnvSpec(id=env_id, args=env_args or {}, max_turns=config.env.max_turns if config else None)
        self.config = (config or EnvServerConfig(env=spec, serve=ServeConfig())).model_copy(update={"env": spec})
        self.address = address
        self.bound = asyncio.Event()
        self.sessions = SessionServer(self.config) if self.config.serve.protocols else None
        self._stop = asyncio.Event()
        self._stopped = asyncio.Event()
        self._clients = Clients(self._send)
        self._requests: dict[tuple[bytes, bytes], Request] = {}
        self._episodes: dict[asyncio.Task[Any], tuple[bytes, str]] = {}  # handler of an open one -> its client, its tag
        self._handlers: set[asyncio.Task[None]] = set()
        self._evaluations: dict[tuple[bytes, bytes], Evaluation] = {}
        self._lag = LoopLag(LAG_TICK_S)
        self._node: NodeServer | None = None

    async def run(self) -> None:
        """Serve until `close`. Raises PortInUse, TasksetError, WorkerDied (restart budget exhausted), ConfigError."""
        self._token = read_token(self.config.arena)
        if not _is_local(self.address):
            needs_token(self.address, self._token, "arena.token_file")
        await self._check_sandbox()
        await self._check_environment()
        socket = self._bind()
        arena, own = None, False
        try:
            arena, own = self._open_arena(self.config.arena)
            self._node = self._open_node(arena)
            await self._serve(socket, arena)
        finally:
            if self._node is not None:
                self._node.close()
            socket.close(linger=LINGER_MS)
            self._context.destroy(linger=LINGER_MS)
            if arena is not None:
                arena.close()
                if own:
                    arena.unlink()
            self._stopped.set()

    def stop(self) -> None:
        """Make `run` return; it ends the workers first."""
        self._stop.set()

    async def close(self) -> None:
        """Stop serving and wait until nothing of the server is left."""
        self.stop()
        if self.bound.is_set():
            await self._stopped.wait()

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def _check_sandbox(self) -> None:
        """Before anything listens: the sandbox is there where it must be and works; the log says which limits hold."""
        needs_sandbox(self.config)
        if self.config.serve.sandbox is not None:
            sandbox = await asyncio.to_thread(Sandbox)
            await asyncio.to_thread(sandbox.check)
            log.info("sandbox: %s", sandbox.active())

    async def _check_environment(self) -> None:
        """Before anything listens: the workers' interpreter has what they need, and finds the environment."""
        python, env = self.config.serve.python, self.config.env
        if python is not None:
            ((*found,),) = await asyncio.to_thread(foreign.problems, [(python, env.id, env.args)], PYTHON_S)
        else:
            problem = import_module("shmrl.envs.registry").find(env.id)  # environments stand above this room
            found = [problem] if problem is not None else []
        if found:
            raise ConfigError(found)

    def _bind(self) -> zmq.asyncio.Socket:
        context = self._context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a client that is gone is an error, not silence
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        notice_silence(socket)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            context.term()
            raise cannot_bind(f"env server {self.config.name}", self.address, error, "serve.address") from None
        self.address = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return socket

    def _open_arena(self, config: ArenaConfig) -> tuple[Arena, bool]:
        if config.address is not None:
            return Arena.attach(config.address), False
        return create_arena(config, self.config.name), True

    def _open_node(self, arena: Arena) -> NodeServer | None:
        where = self.config.serve.http
        if where is None or not self.config.serve.serves_blocks:
            return None
        if self._token is None:
            raise ConfigError("serve.http needs a token: set arena.token_file or SHMRL_TOKEN")
        return NodeServer(arena, self._token, where)

    async def _serve(self, socket: zmq.asyncio.Socket, arena: Arena) -> None:
        config = self.config
        self._socket, self._arena = socket, arena
        self._pool = Pool(
            self._settings(arena.address),
            config.serve.pool,
            max_concurrent=config.serve.max_concurrent,
            restart_budget=config.serve.restart_budget,
            hang_s=config.serve.request_timeout_s,
            cleanup_s=config.serve.cleanup_timeout_s,
            arena=arena,
        )
        self._pool.start()
        self.bound.set()
        if config.job is not None:
            source = f"{config.split}/{config.name}"
            Addresses(config.job).publish("env", source, self.address, origin=arena.origin)
        log.info("Serving %s (up to %d concurrent sessions)", self.address, config.serve.max_concurrent)
        receiving = asyncio.create_task(self._receive())
        measuring = asyncio.create_task(self._lag.run())
        stopping = asyncio.create_task(self._stop.wait())
        sessions = stopping if self.sessions is None else asyncio.create_task(self.sessions.run())
        try:
            await _first(stopping, self._pool.failed, receiving, sessions)
        finally:
            self._stop.set()
            if self.sessions is not None:
                self.sessions.stop()
            measuring.cancel()
            await self._pool.close()
            await asyncio.wait([sessions])
            while self._handlers:  # their replies are there; they only have to be handed to the socket
                await asyncio.wait(self._handlers)
            receiving.cancel()
            await asyncio.gather(stopping, measuring, receiving, return_exceptions=True)
        for ended in (self._pool.failed, receiving, sessions):
            if ended.done() and not ended.cancelled():
                ended.result()

    def _settings(self, arena_address: str) -> dict[str, Any]:
        config = self.config
        return {
            **environment_settings(config),
            "max_turns": config.env.max_turns,
            "split": config.split,
            "python": config.serve.python and str(config.serve.python),
            "arena": arena_address,
            "own_arena": config.arena.address is None,
            "timeout_s": config.arena.timeout_s,
            "on_full": config.arena.on_full,
        }

    # -------------------------------------------------------------------------------------------------------- requests

    async def _receive(self) -> None:
        while True:
            await self._socket.poll()
            identity, *frames = await self._socket.recv_multipart()
            asked = await self._asked(identity, frames)
            handling = self._handle(identity, frames, asked)
            if frames[1:2] == [b"hello"]:  # whoever says it need not wait for the answer before it goes on
                await handling
                continue
            handler = asyncio.create_task(handling)
            self._handlers.add(handler)
            handler.add_done_callback(self._handlers.discard)

    async def _asked(self, identity: bytes, frames: list[bytes]) -> tuple[str, dict[str, Any]] | ProtocolError:
        """(method, payload) of a request, or what is wrong with it. Decoded one after the other: a cancel must not
        overtake the long request that it is about."""
        try:
            method = method_of(frames)
            if method != "hello" and identity not in self._clients:
                raise ProtocolError(f"{method}: say hello with the run's token first")
            if method == "hello" and len(frames[2]) > MAX_HELLO:
                raise ProtocolError(f"hello: {len(frames[2])} bytes; {MAX_HELLO} at most")
            return method, await payload_of(method, frames)
        except ProtocolError as error:
            return error

    async def _handle(
        self, identity: bytes, frames: list[bytes], asked: tuple[str, dict[str, Any]] | ProtocolError
    ) -> None:
        """One request, one reply; whatever a client sends, the next request works."""
        number, me = frames[0] if frames else b"", asyncio.current_task()
        assert me is not None
        tag = ""
        try:
            if isinstance(asked, ProtocolError):
                raise asked
            method, payload = asked
            tag = episodes_tag(method, payload)
            if tag:
                self._episodes[me] = identity, tag
            reply = await self._reply(identity, number, method, payload, frames[2])
        except Exception as error:
            reply = error_reply(error)
        try:
            if not await self._send(identity, number, reply) and tag:
                log.warning("the client of %s is gone: its episode is dropped", tag)
                self._pool.unclaimed(tag)
        finally:
            self._episodes.pop(me, None)

    async def _reply(self, identity: bytes, number: bytes, method: str, payload: dict[str, Any], raw: bytes) -> bytes:
        if method == "hello":
            return await self._hello(identity, payload)
        if method == "health":
            return await self._health(payload)
        if method == "info":
            await self._ready()
            return pack({"success": True, **self._info()})
        if method == "cancel":
            return self._cancel(identity, payload)
        if method == "take_over":
            return await self._take_over(identity, payload)
        tag = episodes_tag(method, payload)
        if tag and self._clients.is_superseded(identity, tag):
            raise ProtocolError(f"{method}: another client has taken over the run of {tag}")
        if method == "evaluate":
            return await self._evaluate(identity, number, payload)
        return await self._run(identity, number, method, payload, raw)

    async def _hello(self, identity: bytes, payload: dict[str, Any]) -> bytes:
        given = payload.get("token")
        if self._token is not None and not hmac.compare_digest(str(given).encode(), self._token.encode()):
            log.warning("a client with a wrong token was refused")
            raise ProtocolError("hello: wrong token (it is in the file named by arena.token_file, or in SHMRL_TOKEN)")
        await self._clients.welcome(identity)
        return pack({"success": True})

    async def _run(self, identity: bytes, number: bytes, method: str, payload: dict[str, Any], raw: bytes) -> bytes:
        deltas = partial(self._send_delta, identity, number) if payload.get("deltas") else None
        tag = episodes_tag(method, payload)
        request = self._pool.submit(method, raw, tag, on_delta=deltas, shares=shares(method, payload))
        self._requests[identity, number] = request
        try:
            return await request.reply
        finally:
            del self._requests[identity, number]

    async def _evaluate(self, identity: bytes, number: bytes, payload: dict[str, Any]) -> bytes:
        deltas = partial(self._send_delta, identity, number)
        evaluation = self._evaluations[identity, number] = Evaluation(self._pool, payload, deltas)
        try:
            return await evaluation.run()
        finally:
            del self._evaluations[identity, number]

    def _cancel(self, identity: bytes, payload: dict[str, Any]) -> bytes:
        """Idempotent. A request whose reply is on its way is claimed by nobody any more: its blocks are freed."""
        expect(payload, "cancel", request_id=bytes)
        request = self._requests.get((identity, payload["request_id"]))
        evaluation = self._evaluations.get((identity, payload["request_id"]))
        if evaluation is not None:
            return pack({"success": True, "cancelled": evaluation.cancel()})
        cancelled = request is not None and self._pool.cancel(request)
        if (request is None or request.reply.done()) and "tag" in payload:
            self._pool.unclaimed(check_tag(payload["tag"], "cancel"))
        return pack({"success": True, "cancelled": cancelled})

    async def _take_over(self, identity: bytes, payload: dict[str, Any]) -> bytes:
        """Waits for the last word on every episode of the run that another client had asked for, which comes within
        `serve.cleanup_timeout_s`: the pool sees to that. What those clients had sent and nobody has read is refused."""
        expect(payload, "take_over", run=str)
        prefix = payload["run"] + "/"
        await self._clients.take_over(prefix, identity)
        for evaluation in [one for (who, _), one in self._evaluations.items() if who != identity]:
            if evaluation.tag.startswith(prefix):
                evaluation.cancel()
        for (client, _), request in list(self._requests.items()):
            if client != identity and request.tag.startswith(prefix):
                self._pool.cancel(request)
        theirs = {
            task: tag for task, (who, tag) in self._episodes.items() if who != identity and tag.startswith(prefix)
        }
        if theirs:
            log.info("ending %d episodes of a client before this one", len(theirs))
        waiting = set(theirs)
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=REMIND_S)
            if waiting:
                tags = ", ".join(sorted(theirs[task] for task in waiting)[:5])
                log.warning("%d episodes that were cancelled have not ended yet: %s", len(waiting), tags)
        return pack({"success": True, "ended": len(theirs)})

    def _send_delta(self, identity: bytes, number: bytes, delta: bytes) -> None:
        """A client that is gone is noticed when its reply cannot be sent."""
        sent = asyncio.ensure_future(self._socket.send_multipart([identity, number, b"delta", delta]))
        sent.add_done_callback(asyncio.Future.exception)

    async def _send(self, identity: bytes, *frames: bytes) -> bool:
        """False when the client is gone."""
        try:
            await self._socket.send_multipart([identity, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._clients.gone(identity)
            return False
        return True

    # ----------------------------------------------------------------------------------------------------------- facts

    async def _ready(self) -> None:
        """Wait for the first worker that has loaded its environment; raises what keeps it from doing so."""
        ready = asyncio.create_task(self._pool.ready.wait())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await _first(ready, stop, self._pool.failed)
        finally:
            ready.cancel()
            stop.cancel()
        if self._pool.failed.done():
            self._pool.failed.result()
        if not self._pool.ready.is_set():
            raise ServerDied("the env server is shutting down")

    async def _health(self, payload: dict[str, Any]) -> bytes:
        if payload.get("wait"):
            await self._ready()
        facts = self._pool.health()
        facts["rss_bytes"] += psutil.Process().memory_info().rss
        stats = self._arena.stats()
        arena = {key: stats[key] for key in ("blocks", "used_bytes", "capacity_bytes")}
        lag = self._lag.quantiles_ms()
        return pack({"success": True, "alive": True, "loop_lag_ms": lag, "arena": arena, **facts})

    def counts(self) -> dict[str, Any]:
        """What the pool does and uses, for Prometheus; empty until it starts."""
        if not self.bound.is_set():
            return {}
        return {f"env_server/{name}": value for name, value in self._pool.health().items()}

    def _info(self) -> dict[str, Any]:
        config = self.config
        return {
            "name": config.name,
            "env_id": redacted(config.env.id),
            "split": config.split,
            "arena": self._arena.address,
            "origin": self._arena.origin,
            "node": self._node and self._node.url,
            "fields": list(FIELDS),
            "demonstrates": bool(self._pool.facts.get("demonstrates")),
            "scores_groups": bool(self._pool.facts.get("scores_groups")),
            "max_concurrent": config.serve.max_concurrent,
            "workers": config.serve.pool.most,
        }


def _is_local(address: str) -> bool:
    """Whether only this host can connect."""
    scheme, _, rest = address.partition("://")
    return scheme != "tcp" or is_loopback(rest.rpartition(":")[0].strip("[]"))


async def _first(*awaited: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; none is cancelled."""
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
