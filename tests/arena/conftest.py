"""An arena per test, and helper processes that attach to it, run one function of a test module, and can be killed."""

import os
import signal
import subprocess
import sys

import pytest

from shmrl.arena import Arena

UNSHARE = ["unshare"] if os.geteuid() == 0 else ["unshare", "-r"]


class Helper:
    """A fresh interpreter that runs `module.function(*args)` and speaks lines; `kill()` is SIGKILL."""

    def __init__(self, function, *args):
        call = f"getattr(importlib.import_module({function.__module__!r}), {function.__name__!r})(*sys.argv[1:])"
        code = f"import importlib, sys; {call}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self):
        """The next line it prints."""
        text = self.process.stdout.readline().strip()
        assert text, f"the helper ended with {self.process.wait()}"
        return text

    def say(self, text="go"):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait()

    def wait(self):
        """Exit code of a helper that ends on its own."""
        self.process.stdin.close()
        return self.process.wait(60)

    def close(self):
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture
def helper():
    """start(function, *args) -> Helper; all of them are gone after the test."""
    started = []

    def start(function, *args):
        started.append(Helper(function, *args))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def arena():
    """A created arena of 64 MiB."""
    with Arena.create("64MiB", run_id="test") as made:
        yield made
        made.unlink()
