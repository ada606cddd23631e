"""Copies and checksums in C, as this machine has them and as machines with fewer instructions would."""

from pathlib import Path

import pytest

from tests.support.drivers import MACHINES, PARTS, check


@pytest.mark.parametrize("flags", [*MACHINES, *PARTS])
def test_every_alignment_and_way(tmp_path, flags):
    """Bytes, bytes around them, and every checksum, against loops."""
    check(Path(__file__).with_name("copy_driver.c"), ["avx512.c", "copy.c", "crc32c.c", "parts.c"], flags, tmp_path)
