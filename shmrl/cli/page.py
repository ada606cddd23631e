"""`shmrl page`: a run in a browser."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from shmrl.cli.common import Flags, begin
from shmrl.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shmrl.monitor.page import Listener

IDLE_S = 600.0  # a page that a run started ends when nobody has looked for so long; the next look starts another


@dataclass
class Page:
    """Show a run in a browser, while it goes on or when it is over. Reads its directory, and changes nothing.

    `shmrl run` has a page of its own (`[monitor.page]`) and prints where; it ends with the run, this one with Ctrl-C.
    """

    directory: Annotated[Positional[Path], arg(metavar="RUN_DIR")]
    """The run's output directory."""
    host: str = "127.0.0.1"
    """Where to listen. On loopback only your own processes are answered, elsewhere everybody who reaches it."""
    port: int = 8470
    """The next one that is free is taken where this one is not."""
    fd: int | None = None
    """A listening socket that this process inherited, instead of host and port; it ends when nobody looks."""

    def __call__(self, _: Flags) -> int:
        from shmrl.config.tables import Log
        from shmrl.monitor import page
        from shmrl.monitor.page.files import RunFiles

        if why := page.missing():
            raise ConfigError(f"no page: {why}")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port {self.port}: 1 to 65535")
        files = RunFiles(self.directory)
        begin("page", Log())
        listener = self._listener()
        from shmrl.monitor.page import server

        if self.fd is not None:
            return server.run(files, listener, IDLE_S)
        print(f"{files.root}: {listener.url}  (Ctrl-C ends it)", flush=True)
        return server.run(files, listener)

    def _listener(self) -> Listener:
        from shmrl.monitor import page

        if self.fd is not None:
            given = socket.socket(fileno=self.fd)
            return page.Listener(given, "")
        try:
            return page.listen(self.host, self.port)
        except OSError as error:
            raise RunError(f"the page cannot listen on {self.host}: {error.strerror or error}") from None
