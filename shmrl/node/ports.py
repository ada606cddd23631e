"""Is a port free, and who has it: asked by the launcher before anything starts, and by servers whose bind failed."""

from __future__ import annotations

import errno
import socket

import psutil

from shmrl.errors import PortInUse

LOOKED_AT = 1000  # ports above a taken one


def require_free(host: str, port: int, what: str) -> None:
    """Return if `host:port` can be bound now; PortInUse naming `what` wanted it and the holder otherwise."""
    error = _refusal(host, port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise PortInUse(f"{what}: cannot bind {host}:{port}: {error.strerror}")
    raise port_in_use(port, what)


def is_free(host: str, port: int) -> bool:
    """Whether `host:port` can be bound now."""
    return _refusal(host, port) is None


def free_after(host: str, port: int, count: int = 1) -> int | None:
    """The first port above `port` that is free together with the count - 1 above it; None where there is none near."""
    run = 0
    for candidate in range(port + 1, min(port + LOOKED_AT, 65535) + 1):
        run = 0 if _refusal(host, candidate) else run + 1
        if run == count:
            return candidate - count + 1
    return None


def _refusal(host: str, port: int) -> OSError | None:
    """Why `host:port` cannot be bound now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def free(host: str) -> int:
    """A port of `host` that nobody has now, for a server that cannot say which one it took."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def port_in_use(port: int, what: str, remedy: str = "choose another port") -> PortInUse:
    """The error for a taken port, with the holder's name and pid where the system lets us read them."""
    return PortInUse(f"{what}: port {port} is in use by {holder(port)}; {remedy}, or stop that process")


def holder(port: int) -> str:
    """Who listens on a TCP port, as `name (pid 123)`."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process of another user"
    listening = [c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port]
    pids = {connection.pid for connection in listening if connection.pid}
    return ", ".join(sorted(_name(pid) for pid in pids)) or "a process that cannot be named from here"


def _name(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"
