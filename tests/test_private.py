"""Two sessions of tests on one machine: what one has is not there for the other; where only root may, one at a time."""

import errno
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTER = "import os, socket; from tests.support.private import enter; own = enter(); "


def other(code):
    """What `code` prints in a session of its own."""
    return subprocess.check_output([sys.executable, "-c", ENTER + code], text=True, cwd=ROOT)


def test_another_session_sees_no_shared_memory_of_ours():
    ours = Path("/dev/shm/shmrl-test-private")
    ours.touch()
    said = other("print(own, os.path.exists('/dev/shm/shmrl-test-private'))")
    ours.unlink()
    assert said in ("True False\n", "False True\n")


def test_another_session_has_ports_of_its_own():
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        said = other(f"print(own, socket.socket().connect_ex(('127.0.0.1', {port})))")
    assert said in (f"True {errno.ECONNREFUSED}\n", "False 0\n")
