"""A cancelled task that waits for a thread waits for its end, however often it is told."""

import asyncio
import threading

import pytest

from shmrl.env.threads import to_the_end


async def begun(work):
    """(task, told, end): a task that awaits `work` in a thread, which goes on until `end` is set."""
    end, told = threading.Event(), []

    def run():
        end.wait(60)
        return work()

    running = asyncio.get_running_loop().run_in_executor(None, run)
    task = asyncio.create_task(to_the_end(running, lambda: told.append(True)))
    await asyncio.sleep(0)
    return task, told, end


async def test_the_result_of_one_that_nobody_cancels():
    task, told, end = await begun(lambda: 3)
    end.set()
    assert await task == 3
    assert told == []


@pytest.mark.parametrize("work", [lambda: 3, lambda: 1 / 0])
async def test_one_that_is_cancelled_again_and_again_ends_with_its_thread(work, caplog):
    task, told, end = await begun(work)
    for _ in range(3):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == [True]
    del task
    assert "never retrieved" not in caplog.text


async def test_a_failure_reaches_who_awaits_it():
    task, told, end = await begun(lambda: 1 / 0)
    end.set()
    with pytest.raises(ZeroDivisionError):
        await task
    assert told == []
