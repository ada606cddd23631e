"""A child that says where it serves: whatever it says, it is read."""

import re
import sys

import pytest

from shmrl.env.child import Child
from shmrl.errors import ProcessFailed

SERVING = re.compile(r"Serving (\d+)")


def child(program):
    return Child("one", [sys.executable, "-c", f"import sys\n{program}"], SERVING, {}, stdout=-1)


def test_a_line_of_any_length_is_passed_on_and_the_child_goes_on(capsys):
    one = child(
        "sys.stderr.write('x' * 300_000 + '\\nServing 7\\n')\nsys.stderr.write('y' * 300_000)\n"
        "sys.stderr.flush()\nprint('done', flush=True)"
    )
    try:
        assert one.serving()[1] == "7"
        assert one.process.stdout.readline() == "done\n"
    finally:
        one.stop()
        one.process.stdout.close()
    said = capsys.readouterr().err
    assert (said.count("x"), said.count("y")) == (300_000, 300_000)


def test_a_stderr_of_ours_that_is_closed_does_not_stop_the_child(monkeypatch):
    with open("/dev/null", "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    one = child("sys.stderr.write('x\\n' * 200_000 + 'Serving 7\\n')")
    try:
        assert one.serving()[1] == "7"
    finally:
        one.stop()
        one.process.stdout.close()


def test_one_that_never_serves_is_told_with_its_last_lines():
    one = child("print('so it ends', file=sys.stderr)\nsys.exit(3)")
    with pytest.raises(ProcessFailed, match="one exited with code 3") as failed:
        one.serving()
    assert failed.value.tail == "so it ends\n"
    one.stop()
    one.process.stdout.close()
