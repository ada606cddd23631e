"""Helper processes, as the arena's tests start them."""

from tests.arena.conftest import helper  # noqa: F401 (a fixture)
