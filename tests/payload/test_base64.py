"""base64 in C, as this machine decodes it and as machines with fewer instructions would."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    Path(__file__).with_name("base64_driver.c"),
    *(ROOT / "csrc" / f"payload_{of}.c" for of in ("ids", "vector")),
]


@pytest.mark.parametrize(
    "flags", [["-O3"], ["-O3", "-DSRL_NO_AVX512"], ["-O3", "-DSRL_PORTABLE"], ["-O1", "-fsanitize=address,undefined"]]
)
def test_every_length_and_every_bad_character(tmp_path, flags):
    driver = tmp_path / "driver"
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", *warnings, *flags, f"-I{ROOT / 'csrc'}", "-o", driver, *SOURCES]
    subprocess.run(command, check=True)
    done = subprocess.run([driver], capture_output=True, text=True, timeout=60)
    assert (done.stdout + done.stderr, done.returncode) == ("ok\n", 0)
