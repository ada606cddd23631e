"""Is a port free, and who has it: asked by the launcher before anything starts, and by servers whose bind failed."""

from __future__ import annotations

import errno
import socket

import psutil

from shmrl.errors import PortInUse


def require_free(host: str, port: int, what: str) -> None:
    """Return if `host:port` can be bound now; PortInUse naming `what` wanted it and the holder otherwise."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PortInUse(f"{what}: cannot bind {host}:{port}: {error.strerror}") from None
            raise port_in_use(port, what) from None


def port_in_use(port: int, what: str) -> PortInUse:
    """The error for a taken port, with the holder's name and pid where the system lets us read them."""
    return PortInUse(f"{what}: port {port} is in use by {holder(port)}; choose another port, or stop that process")


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
