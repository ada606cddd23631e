"""Reaching the peers of a run: all at once, and the log says who is missing."""

import asyncio
import logging

import pytest

from shmrl.errors import RunError
from shmrl.orchestrator.episodes import reach
from tests.orchestrator.conftest import until


async def test_who_is_missing_is_said_until_everybody_is_there(caplog):
    caplog.set_level(logging.INFO)
    late = asyncio.Event()
    peers = {"env server a": asyncio.sleep(0), "inference": late.wait(), "trainer": late.wait()}
    reaching = asyncio.create_task(reach(peers, remind_s=0.01))
    await until(lambda: "waiting for inference, trainer" in caplog.messages)
    late.set()
    await reaching


async def test_one_that_cannot_be_reached_ends_the_wait_for_all():
    async def refuse():
        raise RunError("no hello")

    with pytest.raises(RunError, match="no hello"):
        await reach({"trainer": refuse(), "inference": asyncio.Event().wait()})
