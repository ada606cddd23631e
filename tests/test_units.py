"""One reading of sizes, wherever they are written: "GB" is the decimal unit, "GiB" the binary one."""

import pytest

from shmrl.arena import Arena
from shmrl.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("64MiB", 64 << 20),
        ("1.5KiB", 1536),
        ("500 MB", 500_000_000),
        ("2g", 2_000_000_000),
        ("2kb", 2000),
        ("1T", 10**12),
        ("64", 64),
        (4096, 4096),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "4 parsecs", "-1", True, None])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_an_arena_reads_its_capacity_the_same_way():
    with Arena.create(capacity="1MB") as arena:
        assert arena.stats()["capacity_bytes"] == 16 * 65_536  # 1,000,000 rounded up to whole pages
        arena.unlink()
