"""Where the two roles of a peer run: a spawned process each, driven over a pipe. Used by the runner."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Host(Protocol):
    """A role object in another process."""

    def __init__(self, role: type, *args: Any) -> None: ...

    def call(self, method: str, *args: Any) -> Any:
        """Runs a method of the role there -> its result."""

    def end(self) -> None:
        """Ends the process."""


class ProcessHost:
    """A role in a process of its own."""

    def __init__(self, role: type, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, role, args), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def call(self, method: str, *args: Any) -> Any:
        self.pipe.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        good, result = self.pipe.recv()
        if not good:
            raise RuntimeError(f"in the other process:\n{result}")
        return result

    def end(self) -> None:
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe: Connection, role: type, args: tuple[Any, ...]) -> None:
    """Answers calls until the runner closes its end."""
    try:
        one = role(*args)
        pipe.send((True, None))
        while True:
            method, arguments = pipe.recv()
            pipe.send((True, getattr(one, method)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))


@contextmanager
def processes() -> Iterator[type[Host]]:
    """The session of a peer that needs nothing but its two processes."""
    yield ProcessHost
