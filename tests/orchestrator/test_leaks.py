"""A drained run that leaves blocks behind: they are named, by tag and by who has them, and the run has failed."""

import os

import pytest

from shmrl.errors import RunError
from shmrl.orchestrator import loop
from shmrl.orchestrator.replicas import Place
from tests.orchestrator.fakes import sample, tree


async def test_blocks_that_nobody_released_fail_the_run_and_are_named(tmp_path, arena, worker, monkeypatch):
    monkeypatch.setattr(loop, "SETTLE_S", 0.0)
    run = tree(tmp_path)
    run = run.model_copy(update={"arena": run.arena.model_copy(update={"address": arena.address})})
    orchestrator = loop.Orchestrator(run, False, [[Place("tcp://127.0.0.1:1")]])
    held, read = sample(worker, "t/a/a-0/0"), sample(worker, "t/a/a-0/1")
    other = worker.put(b"another run's", tag="u/a/a-0/0")
    await orchestrator.ledger.adopt([held], "t/a/a-0/0")
    worker.ship(read.handles, readers=3, step=7)
    worker.done(read.handles, reader=1)
    orchestrator.drained = True
    with arena.get(read.handles[0]), pytest.raises(RunError) as caught:
        await orchestrator.close()
    first, ledger, block = str(caught.value).splitlines()
    me = f"({os.getpid()})"
    assert first == "1 blocks in the ledger and 1 in the arena were never released:"
    assert ledger == "  t/a/a-0/0: held by the ledger for 1 samples"
    assert block.startswith("  t/a/a-0/1: ")
    assert block.endswith("step 7: done 1 of 3 readers")
    assert block.count(me) == 2  # owner and reader
    assert arena.stats()["blocks"] == 2
    worker.free([*read.handles, other])
