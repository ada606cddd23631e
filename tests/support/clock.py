"""Waiting for a condition with a deadline, where the thing waited for is another process and cannot call back."""

import time


def wait_until(condition, timeout_s=30.0, what="the condition"):
    """The first true value of `condition()`; AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return value
