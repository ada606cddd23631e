"""The verdict over an orderly end: nothing may be left in the arena."""

import os
import re

from shmrl.arena import Arena
from shmrl.launcher.run import _without_leaks
from shmrl.launcher.supervisor import Outcome

FINISHED = Outcome(0, "finished", "", orderly=True)


def test_a_block_that_is_left_fails_the_run_and_is_named(caplog):
    with Arena.create("16MiB") as arena:
        try:
            assert _without_leaks(arena, FINISHED) == FINISHED
            handle = arena.put(b"x" * 100, tag="run/words/g7/3")
            outcome = _without_leaks(arena, FINISHED)
            assert (outcome.code, outcome.status) == (1, "failed")
            assert outcome.reason == "every role finished, but the arena leaks: 1 blocks left, 1 created, 0 freed"
            named = rf"left in the arena: run/words/g7/3: 100 B, ready, owner .* \({os.getpid()}\), read by nobody\n"
            assert re.search(named, caplog.text)
            arena.free([handle])
            assert _without_leaks(arena, FINISHED) == FINISHED
        finally:
            arena.unlink()
