"""Places are exact, whoever waits for one that is about to be free."""

import asyncio

from shmrl.env.sessions.slots import Slots


async def test_there_are_never_more_than_there_are():
    slots = Slots(2)
    assert [await slots.take() for _ in range(4)] == [True, True, False, False]
    assert slots.taken == 2


async def test_one_place_that_is_left_goes_to_one_of_those_who_wait():
    slots = Slots(1)
    await slots.take()
    slots.leave()
    waiting = [asyncio.create_task(slots.take()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    slots.free()
    assert sorted([await task for task in waiting]) == [False, False, True]
    assert slots.taken == 1
