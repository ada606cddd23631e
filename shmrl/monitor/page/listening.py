"""The page's socket: bound by the launcher, which hands it on, or by `shmrl page`. Imports no server."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from shmrl.config.addresses import is_loopback

PORTS = 20  # that are tried from the configured one on, before any free one will do
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and where a browser finds it. Example: Listener(sock, "http://127.0.0.1:8470/")"""

    socket: socket.socket
    url: str


def plotly_js() -> Path | None:
    """plotly.min.js of the installed package, which is not imported for it; None without the package."""
    found = importlib.util.find_spec("plotly")
    for directory in (found.submodule_search_locations or ()) if found is not None else ():
        script = Path(directory) / "package_data" / "plotly.min.js"
        if script.exists():
            return script
    return None


def missing() -> str | None:
    """Why there can be no page here, with the remedy; None where there can."""
    if plotly_js() is not None:
        return None
    return "plotly, whose JavaScript draws the charts, is not installed (pip install -c constraints.txt -e '.[page]')"


def listen(host: str, port: int) -> Listener:
    """Listens on `host`, at `port` or the next that is free. OSError where the host is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for candidate in [*range(port, min(port + PORTS, 65536)), 0]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            listener.listen(BACKLOG)
            return Listener(listener, url_of(listener))
        except OSError as refused:
            listener.close()
            error = refused
            if isinstance(refused, socket.gaierror):
                break
    assert error is not None
    raise error


def url_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds a listening socket."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def is_private(listener: socket.socket) -> bool:
    """Whether only processes of this machine reach it."""
    return is_loopback(listener.getsockname()[0])
