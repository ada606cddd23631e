"""Logging of every process: stdlib records to stderr, as text (coloured on a terminal) or as JSON lines.

The CLI calls `setup` once per process with the role's name, which stands in every line. Under `shmrl run` the
launcher has pointed stderr at the role's file. Nothing here knows the run's token, and nobody logs it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

from shmrl.config.tables import Log
from shmrl.errors import ConfigError
from shmrl.monitor.progress import CLEAR_LINE, redraws

_TEXT = "%(asctime)s %(levelname).1s %(role)s %(name)s: %(message)s"
TAIL_LINES = 20
_TRACEBACK = "Traceback (most recent call last)"
_TRACEBACK_LINES = 80
_ELASTIC = re.compile(r"torch.distributed.elastic.*failed \(exitcode")  # after it, torch's launcher reports on itself
_QUIET = ("aiohttp.access", "asyncio", "httpx", "urllib3", "filelock")


def setup(role: str, log: Log) -> None:
    """Send this process's log to stderr under `role`, and to the file that `log` names. `SHMRL_LOG_LEVEL` wins over the
    configured level. ConfigError if the file cannot be written."""
    level = os.environ.get("SHMRL_LOG_LEVEL", log.level).upper()
    if sys.stderr.isatty() and not log.json_lines:
        handler = _rich_handler(role)
    else:
        handler = _plain(logging.StreamHandler(), role, log)
    handlers = [handler] if log.file is None else [handler, to_file(log.file, role, log)]
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.captureWarnings(True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("aiohttp.server").addFilter(_in_a_line)


def to_file(path: Path, role: str, log: Log) -> logging.Handler:
    """A handler that appends this process's log to a file too; the caller adds it to the root logger and closes it."""
    try:
        return _plain(logging.FileHandler(path), role, log)
    except OSError as error:
        raise ConfigError(f"log.file = {str(path)!r} cannot be written: {error.strerror}") from None


def _plain(handler: logging.Handler, role: str, log: Log) -> logging.Handler:
    handler.setFormatter(JsonFormatter() if log.json_lines else logging.Formatter(_TEXT, datefmt="%H:%M:%S"))
    handler.addFilter(_Role(role))
    return handler


class _Role(logging.Filter):
    """Gives every record the role of its process."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self.role
        return True


def _in_a_line(record: logging.LogRecord) -> bool:
    """What a client did wrong, or that it left, is a line: nobody is to fill a server's log with tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ConnectionError) or type(error).__module__ == "aiohttp.http_exceptions":
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = "%s: %s", (record.getMessage(), " ".join(f"{type(error).__name__}: {error}".split()))
        record.exc_info = record.exc_text = None
    return True


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (seconds), level, role, pid, logger, message, and traceback when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "role": getattr(record, "role", ""),
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _rich_handler(role: str) -> logging.Handler:
    from rich.console import Console
    from rich.logging import RichHandler

    class Over(RichHandler):
        """Begins with a clear line: the orchestrator may have drawn what it waits for there (`progress.py`)."""

        def emit(self, record: logging.LogRecord) -> None:
            if redraws(sys.stderr):
                sys.stderr.write(CLEAR_LINE)
            super().emit(record)

    handler = Over(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S", markup=False)
    handler.setFormatter(logging.Formatter(f"{role}: %(message)s"))
    return handler


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, from the start of a late traceback on, without the report of torch's launcher."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65_536))
        text = file.read().decode(errors="replace").splitlines()
    died = next((index for index, line in enumerate(text) if _ELASTIC.search(line)), len(text))
    text = text[: died + 1]
    start = max(0, len(text) - lines)
    for index in range(len(text) - 1, max(-1, len(text) - _TRACEBACK_LINES), -1):
        if _TRACEBACK in text[index]:
            start = min(start, index)
            break
    return text[start:]
