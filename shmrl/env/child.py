"""A child process that says on its stderr where it serves: started, its stderr passed on to ours, ended.

Owned by whoever needs a server for a while: a script (`resolve_env`), an embedder (`serve_sidecar`), `shmrl eval`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from shmrl.config import EnvServerConfig, dump_toml
from shmrl.env.running import DEATH_PIPE
from shmrl.errors import COMPLAINT, ProcessFailed
from shmrl.monitor.progress import CLEAR_LINE, redraws

GRACE_S = 8.0
"""From SIGTERM to SIGKILL: an env server itself gives its workers 5 s."""
LINE = 1 << 16
"""Characters of a longer line that are passed on at a time."""


class Child:
    """A running process; `stop()` ends it. pattern: of the words that say where it serves.

    The thread that makes it must outlive it where `preexec_fn` asks for the parent's death as a signal.
    """

    def __init__(
        self, name: str, command: Sequence[str], pattern: re.Pattern[str], environment: Mapping[str, str], **popen: Any
    ) -> None:
        self.name, self._pattern = name, pattern
        self._tail: deque[str] = deque(maxlen=20)
        self._last_words: list[str] = []
        self._found: re.Match[str] | None = None
        self._known = threading.Event()
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            **popen,
        )
        assert self.process.stderr is not None
        self._relaying = threading.Thread(target=self._relay, args=(self.process.stderr,), daemon=True)
        self._relaying.start()

    def serving(self, timeout_s: float | None = None) -> re.Match[str]:
        """Wait for where it serves; ProcessFailed with its last lines if it never does (it is then ended)."""
        self._known.wait(timeout_s)
        if self._found is None:
            self._end()
            raise ProcessFailed(self.name, self.process.returncode, tail="".join(self._tail))
        return self._found

    def stop(self, known: str = "") -> None:
        """SIGTERM, after GRACE_S SIGKILL; returns when it is gone and all it said is passed on.

        known: an error's message; a child that ends with the same one is not heard a second time.
        """
        self._end()
        self._relaying.join()
        words = "".join(self._last_words)
        if words.replace(COMPLAINT, "").strip() != known.strip():
            _pass_on(words)
        self._last_words.clear()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _relay(self, stderr: IO[str]) -> None:
        """Whatever becomes of our own stderr, the child's is read: a full pipe would stop it."""
        while line := stderr.readline(LINE):
            self._tail.append(line)
            if self._last_words or line.startswith(COMPLAINT):  # it ends: `stop` passes them on
                self._last_words.append(line)
            else:
                _pass_on(line)
            if self._found is None and (found := self._pattern.search(line)):
                self._found = found
                self._known.set()
        self._known.set()

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _pass_on(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(CLEAR_LINE + text if redraws(sys.stderr) else text)


class EnvServerChild(Child):
    """`shmrl env-server` with this configuration. It also stops when this process is gone, however it went: it holds
    the other end of a pipe."""

    def __init__(self, config: EnvServerConfig, pattern: re.Pattern[str], environment: Mapping[str, str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="shmrl-")
        file = Path(self._directory.name) / "env.toml"
        file.touch(0o600)
        file.write_text(dump_toml(config))
        read_end, self._death = os.pipe()
        command = [sys.executable, "-m", "shmrl", "env-server", str(file)]
        environment = {**environment, DEATH_PIPE: str(read_end), "SHMRL_LOG_LEVEL": "info"}
        try:
            super().__init__("env-server", command, pattern, environment, pass_fds=[read_end])
        finally:
            os.close(read_end)

    def stop(self, known: str = "") -> None:
        super().stop(known)
        if self._death >= 0:
            os.close(self._death)
            self._death = -1
        self._directory.cleanup()
