"""Programs in C that check a part of the core against plain loops, built as this machine and as lesser ones have it."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MACHINES = [["-O3"], ["-O3", "-DSRL_NO_AVX512"], ["-O3", "-DSRL_PORTABLE"], ["-O1", "-fsanitize=address,undefined"]]

SHARED = ["-DSRL_PART=16384", "-DSRL_CORES=4"]
PARTS = [
    ["-O3", *SHARED],
    ["-O1", "-fsanitize=address,undefined", *SHARED],
    ["-O3", "-fsanitize=thread", "-DSTEP=3", *SHARED],  # which is slow: every third type
    ["-O3", *SHARED, "-Wl,--wrap=pthread_create", ROOT / "tests/support/no_threads.c"],
]
"""With work that is shared between threads from 32 KiB on: as it is, checked for memory, for races, without threads."""


def check(driver, parts, flags, tmp_path):
    """Builds `driver` with files of csrc and flags of MACHINES, runs it, and expects its "ok"."""
    sources = [driver, *(ROOT / "csrc" / part for part in parts)]
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", *warnings, *flags, f"-I{ROOT / 'csrc'}", "-o", tmp_path / "driver"]
    subprocess.run([*command, *sources], check=True)
    environment = {
        name: value for name, value in os.environ.items() if name != "LD_PRELOAD"
    }  # it has its own sanitizer
    done = subprocess.run([tmp_path / "driver"], capture_output=True, text=True, timeout=150, env=environment)
    assert (done.stdout + done.stderr, done.returncode) == ("ok\n", 0)
