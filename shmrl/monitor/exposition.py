"""Prometheus: a process of a run answers at a unix socket of its own, and the page's /metrics is all of them together.

One port per run to scrape, however many processes: each puts `<pid>.sock` into the run's private socket directory
(`curl --unix-socket FILE http://x/metrics` asks one alone). A thread sleeps in accept() until somebody asks; only then
is prometheus_client imported and a number read. What a process has to say beyond its memory, CPU and descriptors it
registers with `also`.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

Values = Mapping[str, object]
TIMEOUT_S = 5.0
_HEAD = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\r\n"
_BY = {"env": "source", "eval": "source", "node": "node"}  # what the second part of a pinned name is
_sources: list[Callable[[], Values]] = []


def also(collect: Callable[[], Values]) -> None:
    """Values by pinned name ("train/loss") that this process answers with; called in another thread, per request."""
    _sources.append(collect)


@contextmanager
def exposed(process: str, directory: Path | None) -> Iterator[None]:
    """Answer as `process` at a socket in `directory` while entered. Nothing without one, or where its run is not hosted
    (there is nobody who would remove it), or where no socket can be made: no process fails for its metrics."""
    listener = _listen(directory) if directory is not None and directory.parent.is_dir() else None
    if listener is None:
        yield
        return
    path = Path(listener.getsockname())
    threading.Thread(target=_serve, args=(listener, process), name="metrics", daemon=True).start()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()


def _listen(directory: Path) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        path = directory / f"{os.getpid()}.sock"
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(8)
    except OSError as error:
        log.warning("no metrics of this process: %s: %s", directory, error)
        listener.close()
        return None
    return listener


def _serve(listener: socket.socket, process: str) -> None:
    while True:
        try:
            asking, _ = listener.accept()
        except OSError:  # closed
            return
        with asking:
            try:
                asking.settimeout(TIMEOUT_S)
                asking.recv(4096)
                body = text(process)
                asking.sendall(_HEAD.format(len(body)).encode() + body)
            except Exception as error:
                log.debug("a request for metrics failed: %s", error)


def text(process: str) -> bytes:
    """What this process says now, in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Gauge("shmrl_process_info", "Which process of the run this is.", ["role"], registry=registry).labels(process).set(1)
    registry.register(_Registered())
    return generate_latest(registry)


class _Registered:
    """A collector over what was registered with `also`."""

    def collect(self) -> Iterator[Metric]:
        found: dict[str, object] = {}
        for source in list(_sources):
            found.update(source())
        yield from families(found)


def families(values: Values) -> Iterator[Metric]:
    """Gauges of the numbers among `values`, by `family` of their pinned names."""
    from prometheus_client.core import GaugeMetricFamily

    made: dict[str, GaugeMetricFamily] = {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        called, labels = family(name)
        if called not in made:
            made[called] = GaugeMetricFamily(
                called, f"{name.partition('/')[0]}: as in metrics.jsonl", labels=list(labels)
            )
        made[called].add_metric(list(labels.values()), float(value))
    yield from made.values()


def family(name: str) -> tuple[str, dict[str, str]]:
    """A pinned name as a metric and its labels.

    Examples: "train/loss" -> ("shmrl_train_loss", {}); "train/reward/maths" -> ("shmrl_train_reward_by_source",
    {"source": "maths"}); "eval/maths/pass@4" -> ("shmrl_eval_pass_at_4", {"source": "maths"})
    """
    parts = name.split("/")
    labels: dict[str, str] = {}
    if len(parts) == 3 and parts[:2] == ["train", "reward"]:
        parts, labels = ["train", "reward", "by", "source"], {"source": parts[2]}
    elif len(parts) == 3 and parts[0] in _BY:
        parts, labels = [parts[0], parts[2]], {_BY[parts[0]]: parts[1]}
    return re.sub(r"[^a-z0-9_]", "_", "_".join(["shmrl", *parts]).lower().replace("@", "_at_")), labels
