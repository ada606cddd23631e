"""`EpisodeHost`: the environment servers of a plan, each behind a port of its own (`front`), and the head.

    GET /global_config_dict_yaml    the whole nesting with the ports that were taken: a JSON string of YAML, as Gym's
    GET /server_instances           what there is and where; `gym env status` asks each whether it answers
    GET /, /livez                   alive; /health, /healthz, /readyz: 503 until every server here is ready

All of it runs in the env-server process, on one event loop. Ports are bound before anything is loaded. Where a token is
asked for it is a bearer token: Gym's own collector has none, and reaches servers on loopback, or through a tunnel.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import yaml
from aiohttp import web

from shmrl.config.addresses import is_loopback
from shmrl.config.gym import SERVER_TYPES
from shmrl.config.nesting import Instance, Nesting
from shmrl.env.episodes.front import Front, add_health, guard, json_response
from shmrl.env.episodes.plan import Hosted, Plan
from shmrl.env.episodes.servers import Servers
from shmrl.env.episodes.telemetry import Telemetry
from shmrl.env.running import until_signal
from shmrl.env.starting import cannot_bind, needs_token
from shmrl.node.web import Door, url_of

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 2.0
HEAD_READY = ("/health", "/healthz", "/readyz")


class EpisodeHost:
    """Everything of a plan, from `run` to `stop`. `bound` is set when every port is taken (`head_url`, and the fronts'
    `url`), `ready` when episodes can run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.bound, self.ready = asyncio.Event(), asyncio.Event()
        self.head_url = ""
        self.nesting = Nesting(dict(plan.nesting.instances), plan.nesting.rest)
        self._telemetry = Telemetry()
        self._servers = Servers(self.nesting, self._telemetry)
        self._stop = asyncio.Event()
        self._started = time.time()
        self.fronts = {one.instance.name: self._front(one) for one in plan.hosted}

    def _front(self, hosted: Hosted) -> Front:
        token = _token(hosted.table.host, hosted.token, hosted.instance.path)
        return Front(hosted, self._servers, self._telemetry, token)

    async def run(self) -> None:
        """Serve until `stop`. Raises PortInUse, ConfigError, and what keeps an environment from loading or going on."""
        runners: list[web.AppRunner] = []
        await self._servers.open()
        try:
            await self._bind(runners)
            await self._unless_stopped(asyncio.gather(*(front.start() for front in self.fronts.values())))
            if not self._stop.is_set():
                self._say()
                self.ready.set()
                await self._unless_stopped(_first([front.protocol.ended() for front in self.fronts.values()]))
        finally:
            self._stop.set()
            await asyncio.gather(*(front.close() for front in self.fronts.values()))
            for runner in runners:
                await runner.cleanup()
            await self._servers.close()

    def stop(self) -> None:
        """Make `run` return; it ends the episodes first."""
        self._stop.set()

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def _bind(self, runners: list[web.AppRunner]) -> None:
        """Take every port. What is listed from here on has the ports that were taken for 0."""
        for name, front in self.fronts.items():
            table = front.hosted.table
            front.url, port = await _listen(front.app(), table.host, table.port, name, runners)
            instance = self.nesting.instances[name]
            block = {**instance.block, "entrypoint": table.entrypoint, "host": table.host, "port": port}
            self.nesting.instances[name] = replace(instance, block=block)
        if self.plan.head is not None:
            host, port = self.plan.head
            tokens = [one.token for one in self.plan.hosted if one.token]
            app = self._head(_token(host, tokens[0] if tokens and not is_loopback(host) else None, "the head"))
            self.head_url, port = await _listen(app, host, port, "the head", runners)
            self.nesting.rest = {**self.nesting.rest, "head_server": {"host": host, "port": port}}
        self.bound.set()

    async def _unless_stopped(self, awaited: Awaitable[Any]) -> None:
        """Wait for it, or for `stop`; it is cancelled then. Raises what it raises."""
        running = asyncio.ensure_future(awaited)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not running.done():
                running.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
        if not running.cancelled():
            running.result()

    def _say(self) -> None:
        for name, front in self.fronts.items():
            most = front.hosted.table.max_concurrent_episodes or "any number of"
            kind = f"{front.hosted.instance.type}/{front.hosted.instance.implementation}"
            log.info("Serving %s (up to %s concurrent episodes): %s, %s", front.url, most, name, kind)
        if self.head_url:
            log.info("the head is at %s", self.head_url)

    # ----------------------------------------------------------------------------------------------------------- head

    def _head(self, token: str | None) -> web.Application:
        app = web.Application(middlewares=[guard(token)])
        app.router.add_get("/global_config_dict_yaml", self._config)
        app.router.add_get("/server_instances", self._instances)
        add_health(app, self.ready.is_set, on=HEAD_READY)
        return app

    async def _config(self, _: web.Request) -> web.Response:
        return json_response(yaml.safe_dump(self.nesting.as_dict(), sort_keys=False, allow_unicode=True))

    async def _instances(self, _: web.Request) -> web.Response:
        return json_response([self.status(one) for one in self.nesting.instances.values()])

    def status(self, instance: Instance) -> dict[str, Any]:
        """What the head says of one server, started here or elsewhere, in Gym's keys. KeyError for a type that is
        none."""
        kind, block = SERVER_TYPES[instance.type], instance.block
        front = self.fronts.get(instance.name)
        host, port = block.get("host"), block.get("port")
        return {
            "process_name": instance.name,
            "server_type": kind.name,
            "name": instance.implementation,
            "host": host,
            "port": port,
            "url": front.url if front else (f"http://{host}:{port}" if host and port else None),
            "entrypoint": block.get("entrypoint"),
            "pid": os.getpid() if front else None,
            "start_time": self._started,
            "status": None,
            "uptime_seconds": time.time() - self._started,
            "config_path": instance.name,
            "dir_path": os.getcwd() if front else None,
        }


def _token(host: str, given: str | None, who: str) -> str | None:
    """What a server on `host` asks for. ConfigError if others can reach it and there is none."""
    if is_loopback(host):
        return given
    return needs_token(f"{who}: host = {host!r}", given or os.environ.get("SHMRL_TOKEN"), "serve.token")


async def _listen(
    app: web.Application, host: str, port: int, who: str, runners: list[web.AppRunner]
) -> tuple[str, int]:
    """(URL, port) of an app that listens from here on. PortInUse, RunError."""
    door = Door(app, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    runner = door.runner(access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    runners.append(runner)
    try:
        bound, taken = await door.listen(runner, (host, port))
    except OSError as error:
        raise cannot_bind(who, f"{host}:{port}", error) from None
    return url_of(bound, taken), taken


async def _first(awaited: list[Awaitable[Any]]) -> None:
    """Wait for the first to end; raises what it raises. The others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _hosted(plan: Plan) -> int:
    return await until_signal(EpisodeHost(plan))


def main(plan: Plan) -> int:
    """What `shmrl env-server` runs for Gym: 128 + the signal that stopped it; its errors leave as they are."""
    number = asyncio.run(_hosted(plan))
    return 128 + number if number else 0
