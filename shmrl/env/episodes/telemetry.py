"""What is counted of episodes and of calls to other servers, in Prometheus' format at `GET /metrics`.

Every count has the labels `server_type` and `server`, an instance's name: of the server that ran an episode, or of the
one that was called.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shmrl.config.gym import SERVER_TYPES
from shmrl.config.nesting import Instance
from shmrl.env.episodes.wire import Failure

_LABELS = ("server_type", "server")
_SECONDS = (0.01, 0.1, 1, 10, 60, 600, 3600)


class Telemetry:
    """The counts of one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry}
        self.ended = Counter("shmrl_episodes", "Episodes that ended.", (*_LABELS, "outcome", "stage"), **made)
        self.running = Gauge("shmrl_episodes_running", "Episodes between request and answer.", _LABELS, **made)
        self.seconds = Histogram("shmrl_episode_seconds", "From request to answer.", _LABELS, buckets=_SECONDS, **made)
        self.unclosed = Counter("shmrl_sessions_unclosed", "Sessions that could not be closed.", _LABELS, **made)
        self.calls = Counter("shmrl_server_calls", "Calls of a server.", (*_LABELS, "route", "outcome"), **made)
        self.leased = Gauge("shmrl_leased_blocks", "Blocks kept for collectors.", _LABELS, **made)

    def of(self, instance: Instance) -> Counted:
        """The counts of one server. KeyError for a type that is none: a label nobody could ask for."""
        return Counted(self, {"server_type": SERVER_TYPES[instance.type].name, "server": instance.name})

    def page(self) -> bytes:
        """All of it, as Prometheus scrapes it."""
        return generate_latest(self._registry)


class Counted:
    """What one server counts."""

    def __init__(self, telemetry: Telemetry, labels: dict[str, str]) -> None:
        self._all, self.labels = telemetry, labels

    @contextmanager
    def episode(self) -> Iterator[EpisodeCount]:
        running, count = self._all.running.labels(**self.labels), EpisodeCount()
        running.inc()
        started = time.monotonic()
        try:
            yield count
        finally:
            running.dec()
            self._all.seconds.labels(**self.labels).observe(time.monotonic() - started)
            self._all.ended.labels(**self.labels, outcome=count.outcome, stage=count.stage).inc()

    def unclosed(self, count: int) -> None:
        self._all.unclosed.labels(**self.labels).inc(count)

    def called(self, route: str, outcome: str) -> None:
        self._all.calls.labels(**self.labels, route=route, outcome=outcome).inc()

    def leased(self, count: int) -> None:
        self._all.leased.labels(**self.labels).inc(count)


class EpisodeCount:
    """How one episode ended, told before its count is taken."""

    outcome, stage = "lost", ""

    def ended(self, failure: Failure | None) -> None:
        self.outcome = "result" if failure is None else failure.failure_kind or "failure"
        self.stage = "" if failure is None else failure.stage or ""
