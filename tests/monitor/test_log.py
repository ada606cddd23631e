"""Log lines carry the role of their process, as text or as JSON."""

import json
import subprocess
import sys

CODE = """
import logging
from shmrl.config.tables import Log
from shmrl.monitor.log import setup
setup("trainer:1", Log(level="info", json={json}))
log = logging.getLogger("shmrl.x")
log.debug("not shown")
log.info("step %d", 3)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("no luck")
"""


def lines(json_lines, **environment):
    command = [sys.executable, "-c", CODE.format(json=json_lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment or None)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_text_lines_name_level_role_and_logger():
    first, second, *rest = lines(False)
    assert first[8:] == " I trainer:1 shmrl.x: step 3"
    assert second[8:] == " E trainer:1 shmrl.x: no luck"
    assert rest[-1] == "ZeroDivisionError: division by zero"


def test_json_lines_are_one_object_each_with_the_traceback_inside():
    first, second = map(json.loads, lines(True))
    assert (first["level"], first["role"], first["logger"], first["message"]) == (
        "info",
        "trainer:1",
        "shmrl.x",
        "step 3",
    )
    assert second["traceback"].endswith("ZeroDivisionError: division by zero")


def test_the_environment_sets_the_level():
    assert lines(False, SHMRL_LOG_LEVEL="debug")[0].endswith("not shown")
    assert len(lines(False, SHMRL_LOG_LEVEL="critical")) == 0


VANISHED = """
import asyncio, logging, socket
from aiohttp import web
from shmrl.config.tables import Log
from shmrl.monitor.log import setup

async def main():
    setup("page", Log())
    failed = asyncio.Event()
    logging.getLogger("aiohttp.server").addFilter(lambda record: failed.set() or True)
    async def bug(request):
        raise KeyError("a bug of ours")
    app = web.Application()
    app.router.add_get("/bug", bug)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    for sent in (b"GET /bug HTTP/1.1\\r\\n\\r\\n", b"GET /bug HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"):
        failed.clear()
        reader, writer = await asyncio.open_connection(*site._server.sockets[0].getsockname())
        writer.write(sent)
        await asyncio.wait_for(failed.wait(), 30)
        writer.close()
    await runner.cleanup()

asyncio.run(main())
"""


def test_what_a_client_does_wrong_is_a_line_and_a_bug_a_traceback():
    done = subprocess.run([sys.executable, "-c", VANISHED], capture_output=True, text=True, timeout=60, check=True)
    first, second, *rest = done.stderr.splitlines()
    assert first[8:].startswith(
        " W page aiohttp.server: Error handling request from 127.0.0.1: BadHttpMessage: 400, message:"
    )
    assert second[8:].startswith(" E page aiohttp.server: Error handling request")
    assert (rest[0], rest[-1]) == ("Traceback (most recent call last):", "KeyError: 'a bug of ours'")
