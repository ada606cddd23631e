"""Ray's object store: the roles are two actors of a cluster that is started for the turn."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benches.peers.hosts import Host
from benches.peers.interface import Blob, Consumer, Peer, Producer

STORE_NBYTES = 4 << 30
PATIENCE_S = 240  # for one call, and for each part of a start: a cluster that hangs fails its turn


class RayHost:
    """A role as an actor."""

    def __init__(self, role: type, *args: Any) -> None:
        import ray

        self.ray = ray
        self.actor = ray.remote(num_cpus=0)(role).remote(*args)
        ray.get(self.actor.__ray_ready__.remote(), timeout=PATIENCE_S)

    def call(self, method: str, *args: Any) -> Any:
        return self.ray.get(getattr(self.actor, method).remote(*args), timeout=PATIENCE_S)

    def end(self) -> None:
        self.ray.kill(self.actor)


class RayProducer(Producer):
    def put(self, data: Blob) -> Any:
        import ray

        return ray.put(data)


class RayConsumer(Consumer):
    def get(self, ref: Any) -> Blob:
        import ray

        return ray.get(ref)


@contextmanager
def patience(what: str) -> Iterator[None]:
    """TimeoutError in the main thread if what is inside takes longer than PATIENCE_S. Ray's waits let signals in."""

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError(f"{what} took over {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def cluster() -> Iterator[type[Host]]:
    """A cluster of this machine, for one turn; its workers import this package from here."""
    import ray

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it has socket paths
    try:
        with patience("ray.init"):
            ray.init(
                num_cpus=8,
                object_store_memory=STORE_NBYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
            )
        yield RayHost
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


PEER = Peer("Ray", RayProducer, RayConsumer, packages=("ray",), session=cluster)
