"""Two arenas of one machine that stand for those of two nodes, and a node server as a process."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

from shmrl.arena import Arena
from shmrl.node import http
from shmrl.node.server import NodeServer

TOKEN = "5ec2e7" * 5 + "ab"


@pytest.fixture
def there():
    """The arena of the node that has the blocks."""
    with Arena.create("96MiB") as arena:
        yield arena
        arena.unlink()


@pytest.fixture
def here(tmp_path):
    """The arena of the node that fetches them."""
    with Arena.create("96MiB", backing="file", base=str(tmp_path)) as arena:
        yield arena
        arena.unlink()


@pytest.fixture
def server(there):
    with NodeServer(there, TOKEN) as server:
        yield server


@pytest.fixture
def by_sendfile(monkeypatch):
    """Peers on this very host are served by sendfile, as those on others are."""
    monkeypatch.setattr(http.Stream, "copies", False)


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def held(arena, handle):
    """The bytes of a block."""
    with arena.get(handle) as view:
        return bytes(memoryview(view))


@contextlib.contextmanager
def process(arena, port, *, dies_after=None):
    """A node server of `arena` in a process of its own, up when this is entered.

    dies_after: it kills itself with SIGKILL when it has sent so many bytes of a block.
    """
    command = [sys.executable, "-m", "tests.node.serving", arena.address, str(port), str(dies_after or "")]
    environment = {**os.environ, "SHMRL_TOKEN": TOKEN}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout.readline() == "up\n"
            yield child
        finally:
            child.kill()
