"""`progress`: a stretch of work that only reads and copies has a time to end in; else this process says where it
stands, and ends. What may block for ever - a file system that is gone, a node that says nothing - would keep every
other rank waiting in its next collective, in silence.

Used around such stretches alone: a training step may take as long as it takes. Runs a thread, and behind it the
interpreter's own watchdog, for a process whose interpreter is held as well.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
HELD_S = 5.0
"""How much later the interpreter's watchdog comes, which needs nobody's lock."""
_end = os._exit


@contextmanager
def progress(who: str, what: str, limit_s: float) -> Iterator[None]:
    """The block ends within `limit_s` (0: whenever it does), or the process with code 1: a log line `WHO stalled`, and
    the stacks of all its threads on stderr.

    Example: with progress("rank 0", "reading step 7", 1800): ...
    """
    if not limit_s:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        if not ended.wait(limit_s):
            log.critical("%s stalled: %s has taken longer than %g s; where it stands:", who, what, limit_s)
            faulthandler.dump_traceback(all_threads=True)
            _end(1)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    faulthandler.dump_traceback_later(limit_s + HELD_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        ended.set()
        thread.join()
