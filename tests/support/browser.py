"""A headless Chromium over its DevTools protocol: open a page, wait, evaluate, take a picture, list what it asked for.

Chromium itself asks for nothing here (its background services are off), and the names of other machines resolve to
nothing; what the page asks for is recorded all the same.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

from tests.support.clock import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--no-proxy-server", "--disable-features=Translate,OptimizationHints,MediaRouter"),
    *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0", "about:blank"),
]
START_S = 60.0


def executable():
    """Where Chromium is, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """`async with Browser() as browser: await browser.open(url, width=1280)`.

    console: messages of level error or warning and uncaught exceptions. requests: every URL that was asked for.
    """

    def __init__(self):
        self.console, self.requests = [], []
        self._numbers, self._answers = itertools.count(1), {}

        self._profile = tempfile.mkdtemp(prefix="shmrl-chromium-")
        command = [executable(), f"--user-data-dir={self._profile}", *FLAGS]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def __aenter__(self):
        self._http = aiohttp.ClientSession()
        port = await self._port()
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as reply:
            (target,) = [one for one in await reply.json() if one["type"] == "page"]
        self._socket = await self._http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(self, *_):
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5):
                await self.send("Browser.close")
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()
        await self._http.close()
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def _port(self):
        file = Path(self._profile) / "DevToolsActivePort"

        def told():
            assert self._process.poll() is None, "chromium ended"
            return file.exists() and file.read_text().count("\n")

        await asyncio.to_thread(wait_until, told, START_S, "chromium's port")
        return int(file.read_text().splitlines()[0])

    async def _read(self):
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
                continue
            method, params = told["method"], told["params"]
            if method == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.console.append(details.get("exception", {}).get("description", details["text"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                self.console.append(str([one.get("value", one.get("description")) for one in params["args"]]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.console.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))

    async def send(self, method, **params):
        """One command of the protocol; its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await answer
        assert "error" not in told, (method, told)
        return told["result"]

    async def open(self, url, width=1280, height=900, dark=False):
        mobile = width < 600
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=features)
        await self.send("Page.navigate", url=url)

    async def evaluate(self, expression):
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    async def until(self, expression, timeout_s=30.0):
        """Wait until a JavaScript expression is true; its value."""
        deadline = time.monotonic() + timeout_s
        while True:
            if value := await self.evaluate(expression):
                return value
            assert time.monotonic() < deadline, f"not true: {expression}; console {self.console}"
            await asyncio.sleep(0.05)

    async def picture(self, selector=None):
        """The PNG of the whole page, or of one element."""
        size = (await self.send("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        if selector is not None:
            box = await self.evaluate(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); "
                "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height, scale: 1}; })()"
            )
            clip = box
        shot = await self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])
