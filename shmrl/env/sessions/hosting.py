"""`resolve_env`: an environment behind a URL, from a script: a `shmrl env-server` process for as long as it is wanted.

Runs in the caller's process and blocks only while the server starts. The server is a process of its own, so a script
needs no `__main__` guard, and it stops when the script is gone, however it went.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import sysconfig
from typing import Any, Self

from shmrl.config import EnvServerConfig, ServeConfig
from shmrl.config.addresses import is_loopback
from shmrl.config.load import validated
from shmrl.config.sources import REMOTE
from shmrl.env.child import EnvServerChild

START_S = 600.0
_SERVING = re.compile(r"Serving (http\S+) \(up to")


def resolve_env(
    spec: str,
    env_config: dict[str, Any] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_concurrent_envs: int | None = None,
    advertise_host: str | None = None,
    **serve: Any,
) -> tuple[str, SessionHost | None]:
    """(URL, server) of an environment. A spec that is a URL is somebody else's server: (spec, None).

    Args:
        spec: "module:attribute", a bundled name or a URL; modules are found as the calling script finds them.
        env_config: the environment's arguments. `system_prompt` becomes an attribute of it instead, and goes into the
            metadata of every first observation.
        host, port: where to listen; port 0 takes a free one. Beyond loopback the URL has a token as its path: it runs
            whatever the environment runs, for whoever has it. `token=` or SHMRL_TOKEN chooses it.
        max_concurrent_envs: sessions at once (64); further ones are refused.
        advertise_host: the host in the URL, if clients know this machine by another name.
        serve: more of `[serve]`: request_timeout_s, idle_timeout_s, token, sandbox.
    Raises ConfigError, and ProcessFailed with the server's last lines if it cannot serve.

    Example:
        url, server = resolve_env("guess-number", {"high": 99}, port=8000, max_concurrent_envs=16)
        with server: input(f"serving {url}, enter stops it")
    """
    if spec.removeprefix(REMOTE).startswith(("http://", "https://", "ws://", "wss://")):
        return spec.removeprefix(REMOTE), None
    if not is_loopback(host):
        serve.setdefault("token", os.environ.get("SHMRL_TOKEN") or secrets.token_hex(16))
    serve |= {"http": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "protocols": ["openenv"]}
    if max_concurrent_envs is not None:
        serve["max_concurrent_envs"] = max_concurrent_envs
    config = validated(EnvServerConfig, {"env": {"id": spec, "args": env_config or {}}, "serve": serve})
    server = SessionHost(config, advertise_host)
    return server.url, server


class SessionHost:
    """A running `shmrl env-server` that serves sessions at `url`, until `stop()` or the end of its `with` block."""

    def __init__(self, config: EnvServerConfig, advertise_host: str | None = None) -> None:
        self._child = EnvServerChild(config, _SERVING, _python_path())
        self.url = self._wait(config.serve, advertise_host)

    def _wait(self, serve: ServeConfig, advertise_host: str | None) -> str:
        try:
            self._address = address = self._child.serving(START_S)[1]
        except BaseException:
            self.stop()
            raise
        if advertise_host is not None:
            address = f"http://{advertise_host}:{address.rpartition(':')[2]}"
        return f"{address}/{serve.token}" if serve.token else address

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._address.rpartition(":")[2])

    def stop(self) -> None:
        """End the server and its sessions; returns when nothing is left of them."""
        self._child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _python_path() -> dict[str, str]:
    """What the caller can import, the server can: a script's own directory is on its path and nobody else's."""
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    own = [path or os.getcwd() for path in sys.path if not path.startswith(installed)]
    return {"PYTHONPATH": os.pathsep.join(own)}
