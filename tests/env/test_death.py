"""Ends of processes: what a killed parent leaves is removed whole, whichever thread of its child begins."""

import os
import subprocess
import threading

from shmrl.env.death import inherit, tidy_after_the_dead


def test_the_second_thread_waits_until_the_first_has_tidied(monkeypatch):
    """The thread that ends the process must not do so while the main thread has removed the half."""
    parent = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(os, "getppid", lambda: parent.pid)
    begun, go_on, done = threading.Event(), threading.Event(), []

    def tidy():
        begun.set()
        go_on.wait(30)
        done.append("first")

    inherit(tidy)
    parent.kill()
    parent.wait(15)
    first = threading.Thread(target=tidy_after_the_dead)
    second = threading.Thread(target=lambda: (tidy_after_the_dead(), done.append("second")))
    first.start()
    assert begun.wait(30)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go_on.set()
    first.join(30)
    second.join(30)
    assert done == ["first", "second"]


def test_of_a_parent_that_lives_nothing_is_removed():
    done = []
    inherit(lambda: done.append(True))
    tidy_after_the_dead()
    assert not done
