"""`resolve_env`: an environment behind a URL, from a script: a `shmrl env-server` process for as long as it is wanted.

Runs in the caller's process and blocks only while the server starts. The server is a process of its own, so a script
needs no `__main__` guard, and it stops when the script is gone, however it went.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from shmrl.config import EnvServerConfig, ServeConfig, dump_toml
from shmrl.config.addresses import is_loopback
from shmrl.config.load import validated
from shmrl.config.tree import REMOTE
from shmrl.env.server import DEATH_PIPE
from shmrl.errors import ProcessFailed

START_S = 600.0
GRACE_S = 8.0
"""From SIGTERM to SIGKILL."""
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
        self._tail: deque[str] = deque(maxlen=20)
        self._address: str | None = None
        self._known = threading.Event()
        self._directory = tempfile.TemporaryDirectory(prefix="shmrl-")
        file = Path(self._directory.name) / "env.toml"
        file.touch(0o600)
        file.write_text(dump_toml(config))
        read_end, self._death = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shmrl", "env-server", str(file)],
            env={**os.environ, **_python_path(), DEATH_PIPE: str(read_end), "SHMRL_LOG_LEVEL": "info"},
            pass_fds=[read_end],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        os.close(read_end)
        assert self._process.stderr is not None
        self._relaying = threading.Thread(target=self._relay, args=(self._process.stderr,), daemon=True)
        self._relaying.start()
        self.url = self._wait(config.serve, advertise_host)

    def _relay(self, stderr: IO[str]) -> None:
        """The server's log goes on to ours; it says when it serves."""
        for line in stderr:
            self._tail.append(line)
            sys.stderr.write(line)
            if self._address is None and (found := _SERVING.search(line)):
                self._address = found[1]
                self._known.set()
        self._known.set()

    def _wait(self, serve: ServeConfig, advertise_host: str | None) -> str:
        try:
            self._known.wait(START_S)
        except BaseException:
            self.stop()
            raise
        if self._address is None:
            self.stop()
            raise ProcessFailed("env-server", self._process.returncode, tail="".join(self._tail))
        address = self._address
        if advertise_host is not None:
            address = f"http://{advertise_host}:{address.rpartition(':')[2]}"
        return f"{address}/{serve.token}" if serve.token else address

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(str(self._address).rpartition(":")[2])

    def stop(self) -> None:
        """End the server and its sessions; returns when nothing is left of them."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._relaying.join()
        if self._death >= 0:
            os.close(self._death)
            self._death = -1
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _python_path() -> dict[str, str]:
    """What the caller can import, the server can: a script's own directory is on its path and nobody else's."""
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    own = [path or os.getcwd() for path in sys.path if not path.startswith(installed)]
    return {"PYTHONPATH": os.pathsep.join(own)}
