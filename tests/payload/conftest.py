"""An arena per test, and fields registered by a test forgotten after it."""

import pytest

from shmrl.arena import Arena
from shmrl.payload import registry


@pytest.fixture
def arena():
    arena = Arena.create(capacity="24MiB")
    yield arena
    arena.close()
    arena.unlink()


@pytest.fixture(autouse=True)
def _same_registry():
    before = dict(registry._FIELDS)
    yield
    registry._FIELDS.clear()
    registry._FIELDS.update(before)
