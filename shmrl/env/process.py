"""One life of one worker process, as the env server sees it: started, heard, ended.

Owned by `pool.py`, in the env-server process; `worker.py` is the other side. A worker's death is noticed by its pidfd.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shmrl.env.foreign import command
from shmrl.env.link import Link
from shmrl.wire import pack

if TYPE_CHECKING:
    from shmrl.env.pool import Request

TAIL_BYTES = 8192
ABORT_S = 2.0
"""How long a worker that is aborted has to say where it stands."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A running worker. `requests`: those that it has and has not replied to; `beat`: when it was last heard."""

    slot: int
    process: subprocess.Popen[bytes]
    link: Link
    pidfd: int
    reading: asyncio.Task[None] | None = None
    ready: bool = False
    leaving: float | None = None  # when it was told to end, being idle: its end is no death
    requests: dict[int, Request] = field(default_factory=dict)
    tail: bytes = b""
    beat: float = field(default_factory=time.monotonic)
    busy: float = field(default_factory=time.monotonic)  # when it last had a request
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def launch(
        cls,
        slot: int,
        link: Link,
        theirs: socket.socket,
        settings: Mapping[str, Any],
        on_exit: Callable[[WorkerProcess], None],
    ) -> WorkerProcess:
        """`shmrl.env.worker`, in the interpreter of `settings` and a process group of its own, with `theirs` as its end
        of the link. `on_exit` is called once, when it is gone."""
        with theirs:
            process = subprocess.Popen(
                [*command(settings["python"], "shmrl.env.worker"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that its children end with it
            )
        worker = cls(slot, process, link, os.pidfd_open(process.pid))
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.stdout.fileno(), worker.relay)

        def gone() -> None:
            loop.remove_reader(worker.pidfd)
            on_exit(worker)

        loop.add_reader(worker.pidfd, gone)
        link.send(0, "start", pack({**settings, "slot": slot}))
        return worker

    @property
    def name(self) -> str:
        """Example: "env worker 0 (pid 4711)" """
        return f"env worker {self.slot} (pid {self.process.pid})"

    @property
    def log_tail(self) -> str:
        return self.tail.decode(errors="replace")

    def relay(self) -> bool:
        """Its output goes to our log, and its end is remembered for error messages. False when there is none."""
        assert self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self.process.stdout.fileno())
            return False
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()
        return True

    async def abort(self) -> None:
        """End it with a dump of its stacks; one that cannot even do that (it is stopped) is killed."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)
            await asyncio.sleep(ABORT_S)
            self.process.kill()  # does nothing to one that was reaped

    async def reap(self) -> int:
        """The exit code, once everything it said has been read and its children are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.reading is not None:
            await asyncio.wait([self.reading], timeout=1.0)
            self.reading.cancel()
        while self.relay():
            pass
        assert self.process.stdout is not None
        asyncio.get_running_loop().remove_reader(self.process.stdout.fileno())
        self.process.stdout.close()
        os.close(self.pidfd)
        await self.link.close()
        return self.process.wait()
