"""What of an address may be shown, and whom it is open to; what this node is called."""

from __future__ import annotations

import ipaddress
import os
import re
import socket

_URL = re.compile(r"\b((?!ipc:)\w+://)(?:[^\s/@,'\"]*@)?([^\s/?#,'\")]*)([/?#][^\s,'\")]+)?")


def redacted(text: str) -> str:
    """The text with every URL in it cut after its host, for messages, names and files: a session server's token is the
    path of its URL. Example: "openenv:http://a:8000/TOKEN" -> "openenv:http://a:8000/..." """
    return _URL.sub(lambda url: f"{url[1]}{url[2]}{'/...' if url[3] else ''}", text)


def node_name() -> str:
    """What this node is called in file names and logs: SLURM's name for it, else the host's, without its domain."""
    return (os.environ.get("SLURMD_NODENAME") or socket.gethostname()).partition(".")[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a socket bound to `host`, a name or an IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
