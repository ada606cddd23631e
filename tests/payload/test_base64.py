"""base64 in C, as this machine decodes it and as machines with fewer instructions would."""

from pathlib import Path

import pytest

from tests.support.drivers import MACHINES, check


@pytest.mark.parametrize("flags", MACHINES)
def test_every_length_and_every_bad_character(tmp_path, flags):
    check(Path(__file__).with_name("base64_driver.c"), ["payload_ids.c", "payload_vector.c"], flags, tmp_path)
