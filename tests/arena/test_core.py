"""The C core alone, in threads under ThreadSanitizer and in forked children that are killed inside the lock."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.arena.test_crashes import build

ENV = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the driver ends with its memory
ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "csrc").glob("arena_*.c"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """driver(flags) -> the compiled tests/arena/core_driver.c."""
    directory = tmp_path_factory.mktemp("core")

    def build(name, *flags):
        out = directory / name
        common = [
            "gcc",
            "-std=c11",
            "-D_GNU_SOURCE",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Werror",
        ]
        sources = [Path(__file__).with_name("core_driver.c"), *CORE]
        subprocess.run([*common, *flags, f"-I{ROOT / 'csrc'}", "-o", out, *sources, "-lpthread"], check=True)
        return out

    return build


def run(binary, mode):
    done = subprocess.run([binary, mode], capture_output=True, text=True, timeout=120, env=ENV)
    assert (done.stdout + done.stderr, done.returncode) == ("ok\n", 0)


def test_threads_under_thread_sanitizer(built):
    binary = built("tsan", "-fsanitize=thread")
    run(binary, "threads")
    run(binary, "duel")
    run(binary, "publish")


def test_threads_and_wrap_under_address_and_undefined_sanitizers(built):
    binary = built("asan", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    run(binary, "threads")
    run(binary, "wrap")


def test_the_lock_of_a_dead_process_is_taken_over_and_of_a_stopped_one_is_not(built):
    binary = built("plain")
    run(binary, "duel")
    run(binary, "takeover")
    run(binary, "stopped")


def test_every_waiter_behind_a_dead_holder_goes_on(tmp_path):
    """Over real byte locks; how soon is benches/bench_takeover.py's."""
    driver = build(tmp_path, "takeover_driver", ["-O1"])
    done = subprocess.run([driver, "20", "1000"], capture_output=True, text=True, timeout=120, check=True)
    assert len(done.stdout.split()) == 20
