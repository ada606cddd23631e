"""HTTP ports and clients that do not go on: silent ones, half requests, half bodies, and very many of all."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSMsgType, web

import shmrl.node.web as doors
from shmrl.node.web import Door, url_of

ASKED = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
BODY = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n"


class Served:
    """An application whose answers wait for `go_on`, and what became of its requests."""

    def __init__(self):
        self.go_on, self.entered, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Queue()
        self.peers, self.asked, self.reading = [], 0, 0
        self.go_on.set()
        self.app = web.Application()
        self.app.router.add_get("/", self.get)
        self.app.router.add_post("/", self.post)
        self.app.router.add_get("/ws", self.ws)

    async def peer(self):
        self.peers.append(Peer(*await asyncio.open_connection(*self.at)))
        return self.peers[-1]

    async def get(self, _):
        self.entered.set()
        self.asked += 1
        await self.go_on.wait()
        return web.Response(text="got")

    async def post(self, request):
        self.reading += 1
        try:
            body = await request.read()
        except Exception as error:
            self.ended.put_nowait(error)
            raise
        self.ended.put_nowait(body)
        return web.Response(text="posted")

    async def ws(self, request):
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            if message.type == WSMsgType.TEXT:
                await ws.send_str(message.data)
        return ws


@asynccontextmanager
async def served(most_waiting=8, most_busy=None):
    it = Served()
    door = Door(it.app, most_waiting, most_busy)
    runner = door.runner(shutdown_timeout=1)
    await runner.setup()
    try:
        it.at = await door.listen(runner, ("127.0.0.1", 0))
        yield it
    finally:
        it.go_on.set()
        for peer in it.peers:
            peer.writer.close()
        await asyncio.gather(*(peer.writer.wait_closed() for peer in it.peers), return_exceptions=True)
        await runner.cleanup()


class Peer:
    """A connection that says what it is told to."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def say(self, data=ASKED):
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def hears(self, text=b"got"):
        """One answer that ends with `text`."""
        async with asyncio.timeout(10):
            await self.reader.readuntil(text)
        return self

    async def is_closed(self):
        """The other side hangs up, and has said nothing."""
        async with asyncio.timeout(10):
            try:
                assert await self.reader.read() == b""
            except ConnectionResetError:
                pass


async def test_whoever_sends_no_whole_request_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(doors, "REQUEST_S", 0.1)
    async with served() as it:
        for began in (b"", b"GET", ASKED[:-2]):
            await (await (await it.peer()).say(began)).is_closed()
        await (await (await it.peer()).say()).hears()


async def test_whoever_sends_no_whole_body_is_hung_up_on_and_the_handler_learns_of_it(monkeypatch):
    monkeypatch.setattr(doors, "REQUEST_S", 0.1)
    async with served() as it:
        for began in (b"", b"12345"):
            await (await (await it.peer()).say(BODY + began)).is_closed()
            assert isinstance(await it.ended.get(), (ConnectionError, web.RequestPayloadError))
        await (await (await it.peer()).say(BODY + b"1234567890")).hears(b"posted")
        assert await it.ended.get() == b"1234567890"


async def test_an_answer_may_take_longer_than_a_request(monkeypatch):
    """So may a WebSocket that is open, and silent."""
    monkeypatch.setattr(doors, "REQUEST_S", 0.05)
    monkeypatch.setattr(doors, "IDLE_S", 0.05)
    async with served() as it:
        it.go_on.clear()
        slow = await (await it.peer()).say()
        headers = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        ws = await (await it.peer()).say(
            b"GET /ws HTTP/1.1\r\nHost: here\r\n" + headers + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await ws.hears(b"\r\n\r\n")
        await (await it.peer()).is_closed()  # came later than both
        it.go_on.set()
        await slow.hears()
        await slow.is_closed()  # idle from now on
        await ws.say(b"\x81\x82\0\0\0\0ab")
        await ws.hears(b"\x81\x02ab")


async def test_the_next_request_of_a_connection_has_its_time_too(monkeypatch):
    monkeypatch.setattr(doors, "IDLE_S", 0.1)
    async with served() as it:
        peer = await it.peer()
        for _ in range(3):
            await (await peer.say()).hears()
        await peer.say(ASKED[:-2])
        await peer.is_closed()


async def test_of_too_many_that_wait_the_oldest_goes_first_those_that_never_asked(monkeypatch):
    monkeypatch.setattr(doors, "FRESH_S", 0)
    async with served(most_waiting=4) as it:
        asked = await (await (await it.peer()).say()).hears()
        silent = [await it.peer() for _ in range(3)]
        more = [await (await (await it.peer()).say()).hears() for _ in range(3)]
        for peer in silent:
            await peer.is_closed()
        await (await asked.say()).hears()
        last = await (await (await it.peer()).say()).hears()
        await more[0].is_closed()  # now the one whose last request is longest ago
        for peer in (asked, *more[1:], last):
            await (await peer.say()).hears()


async def test_those_that_left_take_nobodys_place():
    """Whoever has just come to ask is not closed for them, nor for those between two requests."""
    async with served(most_waiting=4) as it:
        for stays in [False] * 6 + [True] * 3:
            peer = await (await (await it.peer()).say()).hears()
            if not stays:
                peer.writer.close()
                await peer.writer.wait_closed()
        new = [await it.peer() for _ in range(3)]
        for peer in new:
            await (await peer.say()).hears()


async def test_half_bodies_are_bounded(monkeypatch):
    monkeypatch.setattr(doors, "FRESH_S", 0)
    async with served(most_waiting=4) as it:
        half = [await (await it.peer()).say(BODY + b"123") for _ in range(4)]
        await asyncio.wait_for(until(lambda: it.reading == 4), 10)
        await (await (await it.peer()).say()).hears()
        await half[0].is_closed()
        assert isinstance(await it.ended.get(), doors.GONE)
        await (await half[-1].say(b"4567890")).hears(b"posted")
        await (await half[-1].say(BODY + b"1234567890")).hears(b"posted")


async def test_more_requests_than_can_be_under_way_are_told_so():
    async with served(most_busy=2) as it:
        it.go_on.clear()
        first = [await (await it.peer()).say() for _ in range(2)]
        await asyncio.wait_for(until(lambda: it.asked == 2), 10)
        refused = await (await it.peer()).say()
        await refused.hears(b"HTTP/1.1 503 Service Unavailable")
        await refused.hears(b"2 requests are under way, and no more can be")
        it.go_on.set()
        for peer in first:
            await peer.hears()
        await (await (await it.peer()).say()).hears()


async def test_what_a_client_sends_is_no_traceback(caplog):
    caplog.set_level("INFO")
    async with served() as it:
        await (await (await it.peer()).say(b"\x16\x03\x01 no HTTP\r\n\r\n")).hears(b"400 Bad Request")
        packed = BODY.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
        await (await (await it.peer()).say(packed + b"1234567890")).hears(b"HTTP/1.1 ")
        assert isinstance(await it.ended.get(), doors.GONE)
    assert "Traceback" not in caplog.text


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_hundreds_that_wait_keep_nobody_out():
    async with served(most_waiting=16) as it:
        it.go_on.clear()
        under_way = await (await it.peer()).say()
        await it.entered.wait()
        for _ in range(300):
            await it.peer()
        it.go_on.set()
        await under_way.hears()
        await (await (await it.peer()).say()).hears()


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")])
def test_urls(host, url):
    assert url_of(host, 80) == url
