"""Work that does not end: said, with where it stands, and ended; work that takes long elsewhere is left alone."""

import subprocess
import sys

HEAD = """
import logging, os, sys, time
logging.basicConfig(format="%(message)s")
from shmrl.monitor.watchdog import progress
"""


def run(code, *arguments):
    command = [sys.executable, "-c", HEAD + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_blocks_is_said_and_ended(tmp_path):
    fifo = tmp_path / "blocks"
    subprocess.run(["mkfifo", fifo], check=True)
    done = run(
        "def read(path):\n    with open(path) as file:\n        return file.read()\n"
        "with progress('rank 0', 'reading step 7', 0.2):\n    read(sys.argv[1])",
        fifo,
    )
    assert done.returncode == 1
    assert "rank 0 stalled: reading step 7 has taken longer than 0.2 s" in done.stderr
    assert "in read" in done.stderr  # the stack


def test_one_that_holds_the_interpreter_is_ended_too():
    done = run(
        "import ctypes; from shmrl.monitor import watchdog; watchdog.HELD_S = 0.1\n"
        "with progress('rank 0', 'reading step 7', 0.1):\n    ctypes.PyDLL(None).sleep(50)"
    )
    assert done.returncode == 1
    assert "Timeout (0:00:00.2" in done.stderr


def test_a_long_step_is_no_false_alarm():
    done = run(
        "for step in range(3):\n    with progress('rank 0', 'reading', 0.5): pass\n"
        "time.sleep(1)\n"
        "with progress('rank 0', 'reading', 0): time.sleep(0.6)\n"
        "print('trained')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
