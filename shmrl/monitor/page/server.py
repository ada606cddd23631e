"""The page's process: HTTP routes over what `files`, `arena` and `processes` read. `run` is its entry point.

It does something only while it is asked, and what takes time at its own pace, however many browsers look (`paced`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from shmrl.monitor.page import arena, guard, listening, scrape
from shmrl.monitor.page.files import RunFiles
from shmrl.monitor.page.paced import Paced
from shmrl.monitor.page.processes import ProcessTable
from shmrl.monitor.page.tokens import Words
from shmrl.monitor.processes import RUN_VARIABLE, environment
from shmrl.node.web import Door

log = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")
PERIOD_S = 1.0
GROUPS = 12  # rows of each table of the arena, unless more are asked for
MOST_GROUPS = 10_000
SHUTDOWN_S = 1.0
MOST_WAITING = 64  # connections without a request
LONGEST_NUMBER = 20  # digits that are looked at


class Page:
    """The routes. `now` is in every answer that has times: a browser's clock may be another."""

    def __init__(self, files: RunFiles) -> None:
        self.files, self.words, self.table = files, Words(), ProcessTable()
        self.arena = Paced(lambda: self._picture(GROUPS), PERIOD_S)
        self.processes = Paced(lambda: self.table.rows(self.arena.get().get("attached", ())), PERIOD_S)
        self._first_event = 0  # of those that were shown last
        self.asked = time.monotonic()  # last request

    def app(self, private: bool) -> web.Application:
        app = web.Application(middlewares=[self._clocked, guard.guarded(private, _report)])
        app.router.add_get("/", self._index)
        app.router.add_get("/static/plotly.min.js", self._plotly)
        app.router.add_static("/static", STATIC)
        app.router.add_get("/metrics", self._prometheus)
        app.router.add_get("/api/run", self._run)
        app.router.add_get("/api/metrics", self._metrics)
        app.router.add_get("/api/arena", self._arena)
        app.router.add_get("/api/processes", self._process_table)
        app.router.add_get("/api/logs/{name:.+}", self._log)
        app.router.add_get("/api/rollouts", self._rollout_steps)
        app.router.add_get(r"/api/rollouts/{step:\d{1,12}}", self._rollouts)
        app.router.add_get(r"/api/rollouts/{step:\d{1,12}}/{index:\d{1,6}}", self._rollout)
        return app

    @web.middleware
    async def _clocked(self, request: web.Request, handler: guard.Handler) -> web.StreamResponse:
        self.asked = time.monotonic()
        return await handler(request)

    # ----------------------------------------------------------------------------------------------------- static

    async def _index(self, _: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _plotly(self, _: web.Request) -> web.StreamResponse:
        script = listening.plotly_js()
        if script is None:
            raise web.HTTPNotFound
        return web.FileResponse(script)

    async def _prometheus(self, _: web.Request) -> web.Response:
        body = await scrape.everything(self.files.metrics_dir(), self.files.engines(), self.arena.get())
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # ------------------------------------------------------------------------------------------------------- data

    async def _run(self, _: web.Request) -> web.Response:
        return _json({"now": time.time(), **self.files.summary()})

    async def _metrics(self, request: web.Request) -> web.Response:
        start = _number(request, "from", 0, 1 << 48)
        return _json(self.files.metrics(start, request.query.get("file", "")))

    async def _arena(self, request: web.Request) -> web.Response:
        groups = _number(request, "groups", GROUPS, MOST_GROUPS)
        found = self.arena.get() if groups == GROUPS else self._picture(groups)
        return _json({"now": time.time(), **found})

    def _picture(self, groups: int) -> dict[str, Any]:
        found = arena.picture(self.files.arena_address(), groups, self.files.retained_steps(), self._first_event)
        events = found.get("events")
        self._first_event = events[0]["number"] if events else 0
        return found

    async def _process_table(self, _: web.Request) -> web.Response:
        self.table.scan(os.environ.get(RUN_VARIABLE) or self._tag())
        return _json({"now": time.time(), "processes": self.processes.get(), "logs": self.files.logs()})

    def _tag(self) -> str | None:
        """The run's id in the environment of who has its arena."""
        alive = (one["pid"] for one in self.arena.get().get("attached", ()) if one["alive"])
        return next(filter(None, (environment(pid).get(RUN_VARIABLE) for pid in alive)), None)

    async def _log(self, request: web.Request) -> web.Response:
        text = self.files.log_tail(request.match_info["name"])
        if text is None:
            raise web.HTTPNotFound
        return web.Response(text=text)

    async def _rollout_steps(self, _: web.Request) -> web.Response:
        return _json({"steps": self.files.rollout_steps()})

    async def _rollouts(self, request: web.Request) -> web.Response:
        return _json({"rollouts": self.files.rollouts(int(request.match_info["step"]))})

    async def _rollout(self, request: web.Request) -> web.Response:
        found = self.files.rollout(int(request.match_info["step"]), int(request.match_info["index"]))
        if found is None:
            raise web.HTTPNotFound
        if isinstance(facts := found.get("per_token"), dict):
            facts["text"] = self.words.of(facts.get("ids"), self.files.tokenizer_file())
        return _json(found)


def _json(value: Any) -> web.Response:
    return web.json_response(value)


def _number(request: web.Request, key: str, default: int, most: int) -> int:
    text = request.query.get(key, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > LONGEST_NUMBER or int(text) > most:
        raise web.HTTPBadRequest(reason=f"{key}: a number up to {most}")
    return int(text)


def _report(error: Exception) -> None:
    log.warning("an answer failed", exc_info=error)


# -------------------------------------------------------------------------------------------------------------- run


async def serve(files: RunFiles, listener: listening.Listener, stop: asyncio.Event, idle_s: float | None) -> None:
    """Answer until `stop` is set, or nobody has asked for `idle_s` seconds."""
    page = Page(files)
    app = page.app(listening.is_private(listener.socket))
    door = Door(app, MOST_WAITING)
    runner = door.runner(access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await door.listen(runner, listener.socket)
        while not stop.is_set():
            left = None if idle_s is None else page.asked + idle_s - time.monotonic()
            if left is not None and left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await stop.wait()
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()


def run(files: RunFiles, listener: listening.Listener, idle_s: float | None = None) -> int:
    """Serve until a signal; 130 or 143, or 0 when nobody has looked for `idle_s` seconds."""
    received: list[int] = []

    async def main() -> None:
        stop = asyncio.Event()

        def stopped(number: int) -> None:
            received.append(number)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped, number)
        await serve(files, listener, stop, idle_s)

    asyncio.run(main())
    return 128 + received[0] if received else 0
