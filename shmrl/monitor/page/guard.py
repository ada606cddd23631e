"""Who may ask the page, and what a browser may do with its answers.

Three doors. The Host header must be an IP address, localhost or this machine's name: a name that an attacker's DNS
points here (rebinding) is refused. On loopback the other end's socket must belong to this user or to root, as
/proc/net/tcp says: other users of the machine cannot read the rollouts, and no password is needed. And only GET and
HEAD exist. A strict Content-Security-Policy keeps the browser from asking anybody else.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_TO_ALL_USERS = ("/metrics",)  # numbers alone, for a Prometheus that runs as somebody else
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def guarded(private: bool, handler_error: Callable[[Exception], None]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The middleware. private: the socket is on loopback, so that its other ends can be looked up.

    handler_error: told of what a handler raised; the browser gets a line of JSON then.
    """
    owners: WeakKeyDictionary[object, bool] = WeakKeyDictionary()  # once per connection: the kernel lists all to answer

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request)
        if refusal is None and private and request.path not in OPEN_TO_ALL_USERS:
            transport = request.transport
            if transport is not None and transport not in owners:
                owners[transport] = _is_ours(transport)
            if transport is None or not owners[transport]:
                refusal = "this page is of another user of this machine"
        if refusal is not None:
            return web.Response(status=403, text=f"{refusal}\n", headers=HEADERS)
        response: web.StreamResponse
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.reason}\n")
        except Exception as error:
            handler_error(error)
            response = web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
        response.headers.update(HEADERS)
        return response

    return guard


def _refusal(request: web.Request) -> str | None:
    if request.method not in ("GET", "HEAD"):
        return f"{request.method}: this page only shows"
    host = request.host
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return None
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return None
    return f"Host: {name[:80]!r} is no address and not this machine's name"


def _is_ours(transport: object) -> bool:
    """Whether the other end of a loopback connection is a socket of this user or root."""
    there, here = (transport.get_extra_info(name) for name in ("peername", "sockname"))  # type: ignore[attr-defined]
    return peer_uid(there[:2], here[:2]) in (os.getuid(), 0)


def peer_uid(there: tuple[str, int], here: tuple[str, int]) -> int | None:
    """The uid that owns the socket at `there` which is connected to `here`, or None if there is none.

    By both ends: one port can be the beginning of many connections, of several users.
    """
    version = ipaddress.ip_address(there[0]).version
    table = Path("/proc/net/tcp6" if version == 6 else "/proc/net/tcp")
    wanted = [_in_table(there), _in_table(here)]
    for line in table.read_text().splitlines()[1:]:
        parts = line.split()
        if parts[1:3] == wanted:
            return int(parts[7])
    return None


def _in_table(end: tuple[str, int]) -> str:
    packed = ipaddress.ip_address(end[0]).packed
    words = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))  # little-endian, word by word
    return f"{words.hex().upper()}:{end[1]:04X}"
