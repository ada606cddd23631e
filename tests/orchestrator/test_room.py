"""The dispatcher in a small arena: groups wait, a wrong estimate is made good, what cannot fit ends the run."""

import asyncio
import threading

import pytest

from shmrl.arena import Arena
from shmrl.arena.waiting import giving_up
from shmrl.errors import RunError
from shmrl.orchestrator import dispatcher
from shmrl.types import EpisodeResult
from tests.orchestrator.conftest import collect, finish, until
from tests.orchestrator.fakes import Client, sample, tree

MIB = 1 << 20
T = 60_000  # tokens of an episode that takes half a MiB
HALF = MIB // 2


@pytest.fixture
def arena():
    """Eight episodes fill it."""
    made = Arena.create(capacity=4 * MIB, run_id="t")
    attached = Arena.attach(made.address)
    yield attached
    attached.close()
    made.close()
    made.unlink()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(dispatcher, "STANDSTILL_S", 0.3)


class Writer(Client):
    """Writes in a thread, where it may wait for space, like an env worker; a cancelled one gives its place up."""

    async def run_rollout(self, task, *, model, group_id, seed, keep, tag, shares=False):
        self.asked.append((task.id, model, group_id, seed, keep, tag))
        reward = self.play(next(self.calls))
        if asyncio.iscoroutine(reward):
            reward = await reward
        wanted = threading.Event()
        wanted.set()
        writing = asyncio.get_running_loop().run_in_executor(None, self._write, tag, model["version"], wanted)
        try:
            made = await asyncio.shield(writing)
        except asyncio.CancelledError:
            wanted.clear()
            await asyncio.wait([writing])
            if writing.exception() is None:
                self.arena.free(writing.result().handles)
            raise
        return EpisodeResult(
            success=True, task_id=task.id, reward=reward, samples=(made,), num_turns=1, num_tokens=self.T,
            version_start=model["version"], version_end=model["version"], wire_bytes=200,
        )  # fmt: skip

    def _write(self, tag, version, wanted):
        with giving_up(wanted):
            return sample(self.arena, tag, T=self.T, S=8, version=version)


def roomy(tmp_path, **settings):
    """A run that would start far more than fits: as many as the lag lets it."""
    given = {"batch_size": 4, "group_size": 2, "max_inflight": 64, "max_off_policy_steps": 7, "seq_len": T}
    return tree(tmp_path, **given | settings, filters={"zero_advantage": False})


def test_an_episode_takes_half_a_mebibyte(arena, worker):
    made = sample(worker, T=T, S=8)
    assert arena.stats()["used_bytes"] == HALF
    worker.free(made.handles)


async def test_groups_start_while_all_of_them_fit_and_the_others_wait(tmp_path, arena, worker, parts, caplog):
    """Nothing under way is ever short of space, whatever is offered; a step's blocks are room for the next group."""
    caplog.set_level("INFO")
    p = parts(roomy(tmp_path), [Writer(worker, T=T)], longest_bytes=HALF)
    running = asyncio.create_task(p.dispatcher.run())
    await until(lambda: p.sink.pending == 6)
    assert (len(p.clients[0].asked), arena.stats()["used_bytes"]) == (6, 3 * MIB)  # the next group would pass 90%
    assert "groups wait for room in the arena" in caplog.text
    batch = p.sink.cut(1)
    p.dispatcher.collecting(2)
    p.dispatcher.steps_out += 1
    p.dispatcher.wake()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(p.clients[0].asked) == 6
    p.ledger.release(batch.samples)  # what the ranks' last done() does
    p.dispatcher.steps_out -= 1
    p.dispatcher.wake()
    await until(lambda: p.sink.pending == 6)
    assert len(p.clients[0].asked) == 10
    assert "groups start again: 1.0 MiB of 4.0 MiB used" in caplog.text
    running.cancel()
    await finish(p)
    stats = arena.stats()
    assert (stats["waits"], stats["blocks"], p.episodes.requeued) == (0, 0, 0)


async def test_the_youngest_group_is_given_up_when_the_estimate_was_too_low(tmp_path, arena, worker, parts, caplog):
    """Episodes are taken for nothing, and the first one of every group fills the arena: no group can finish until some
    give their place up. Those run again, and every group is trained."""
    second = asyncio.Event()

    async def rest():
        await second.wait()
        return 1.0

    client = Writer(worker, lambda call: rest() if call % 2 else 0.0, T=T)
    p = parts(roomy(tmp_path, max_inflight=32, batch_size=2, max_off_policy_steps=15), [client], longest_bytes=0)
    collecting = asyncio.create_task(collect(p, 1))
    await until(lambda: arena.stats()["blocks"] == 8 and arena.pressure()["waiting"])
    started = p.dispatcher.groups
    second.set()
    trained = set()
    for step in range(2, 40):
        batch = await collecting
        trained |= {episode.group_id for episode in batch.episodes}
        p.ledger.release(batch.samples)
        if {group.partition(".")[0] for group in trained} >= {f"a-{number}" for number in range(started)}:
            break
        p.dispatcher.serving(step - 1)
        collecting = asyncio.create_task(collect(p, step))
    assert started > 8
    assert p.episodes.requeued >= started - 8
    assert f"a-{started - 1}.1" in trained
    assert "a-0" in trained  # the oldest goes on
    assert f"group a-{started - 1} is given up with 0 of 2 episodes done, and starts again later" in caplog.text
    await finish(p)
    stats = arena.stats()
    assert (stats["peak_bytes"], stats["blocks"]) == (4 * MIB, 0)
    counts = p.episodes.take_counts()
    assert (counts["failed"], counts["timed_out"]) == (0, 0)


async def test_a_group_that_does_not_fit_alone_ends_the_run_with_numbers(tmp_path, arena, worker, parts):
    p = parts(roomy(tmp_path, batch_size=10, group_size=10), [Writer(worker, T=T)], longest_bytes=HALF)
    with pytest.raises(RunError, match=r"group a-0 of source 'a' cannot be finished") as caught:
        await collect(p, 1)
    said = str(caught.value)
    assert "Its 10 episodes take about 5.0 MiB, 4.0 MiB of 4.0 MiB are used, 0 finished groups wait" in said
    assert "(about 5.0 MiB in all)" in said
    assert "Set arena.capacity to 5.6 MiB or more, or lower orchestrator.batch_size" in said
    assert "or let what does not fit go to a disk: arena.on_full = 'spill' with arena.spill_dir" in said
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_finished_groups_that_fill_the_arena_before_a_batch_is_together_end_the_run(
    tmp_path, arena, worker, parts
):
    """A batch of twelve, of which eight fit: no group waits for ever, no episode fails sixty seconds later."""
    p = parts(roomy(tmp_path, batch_size=12), [Writer(worker, T=T)], longest_bytes=HALF)
    with pytest.raises(RunError, match=r"4 finished groups wait for the rest of their batch \(about 6\.0 MiB in all\)"):
        await collect(p, 1)
    await finish(p)
    assert arena.stats()["blocks"] == 0
    assert p.episodes.take_counts()["failed"] == 0


async def test_nothing_is_given_up_where_writers_may_spill(tmp_path, arena, worker, parts):
    """They wait for a moment, and then make their own room: a group would be given up for nothing."""
    filler = [sample(worker, f"t/a/old/{i}", T=T, S=8) for i in range(8)]
    p = parts(roomy(tmp_path), [Writer(worker, T=T)], longest_bytes=HALF, spills=True)
    collecting = asyncio.create_task(collect(p, 1))
    await until(lambda: arena.pressure()["waiting"])
    await asyncio.wait([collecting], timeout=1.0)  # three times what a standstill takes
    assert (collecting.done(), p.episodes.requeued) == (False, 0)
    for made in filler:
        worker.free(made.handles)
    p.ledger.release((await collecting).samples)
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_a_rank_that_lags_behind_is_waited_for(tmp_path, arena, worker, parts):
    """Blocks that a step still reads come back without our doing: nothing is given up for them."""
    held = [sample(worker, f"t/a/old/{i}", T=T, S=8) for i in range(7)]
    handles = [handle for made in held for handle in made.handles]
    worker.ship(handles, readers=1, step=1)
    p = parts(roomy(tmp_path), [Writer(worker, T=T)], longest_bytes=0)
    collecting = asyncio.create_task(collect(p, 1))
    await until(lambda: arena.pressure()["waiting"])
    await asyncio.wait([collecting], timeout=1.0)  # three times what a standstill takes
    assert not collecting.done()
    assert p.episodes.requeued == 0
    worker.done(handles, reader=0)
    p.ledger.release((await collecting).samples)
    await finish(p)
    assert arena.stats()["blocks"] == 0


async def test_retained_steps_are_not_waited_for(tmp_path, arena, worker, parts):
    """They stay whoever waits: an arena that they fill is too small, and says so in seconds."""
    held = [sample(worker, f"t/a/old/{i}", T=T, S=8) for i in range(7)]
    worker.ship([handle for made in held for handle in made.handles], readers=1, step=1)
    settings = roomy(tmp_path)
    retaining = settings.model_copy(update={"arena": settings.arena.model_copy(update={"retain_steps": 1})})
    p = parts(retaining, [Writer(worker, T=T)], longest_bytes=0)
    p.dispatcher.retained = [1]
    with pytest.raises(RunError, match=r"the arena is too small.*or lower .*, arena.retain_steps or orchestrator"):
        await collect(p, 2)
    await finish(p)
    arena.discard("t")
    assert arena.stats()["blocks"] == 0
