"""Workers that die, hang, never start or are cancelled; requests always end, blocks are always freed."""

import asyncio
import errno
import os
import re
import signal
import time

import psutil
import pytest

from shmrl.config import WorkerPool
from shmrl.env.client import EnvClient
from shmrl.env.pool import Pool
from shmrl.env.process import WorkerProcess
from shmrl.errors import ConfigError, ServerDied, TasksetError, WorkerDied
from shmrl.types import Task
from tests.env.conftest import EnvServer, rollout, server_config, until

ENVS = "tests.env.environments:"


async def test_a_killed_worker_fails_its_requests_and_is_replaced(hosted, spec, arena, engine):
    async with hosted(ENVS + "Echo") as (client, _):
        task = Task("0", {"text": "a"})
        finished = await rollout(client, task, spec(), 9)  # replied before the death: stays
        engine.open.clear()
        flying = [asyncio.create_task(rollout(client, task, spec(), i)) for i in range(3)]
        await until(lambda: engine.running == 3)
        (pid,) = (await client.health())["pids"]
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*flying)
        assert [result.error.type for result in results] == ["WorkerDied"] * 3
        assert f"(pid {pid}) was killed by SIGKILL" in results[0].error.message
        health = await client.health()
        assert (health["sessions"], health["restarts"]) == (0, 1)
        arena.adopt(finished.samples[0].handles)
        engine.open.set()
        fourth = await rollout(client, task, spec(), 4)
        assert fourth.success, fourth.error
        arena.adopt(fourth.samples[0].handles)
        arena.free([*finished.samples[0].handles, *fourth.samples[0].handles])
        assert arena.stats()["blocks"] == 0


async def test_a_worker_that_speaks_no_frames_is_killed_and_replaced(hosted):
    async with hosted(ENVS + "Echo") as (client, server):
        (worker,) = server._pool._workers.values()
        worker.link._reader.feed_data(b"\xff" * 4)
        await until(lambda: server._pool.restarts == 1)
        assert worker.process.returncode == -signal.SIGKILL
        assert (await client.health())["alive"]


async def test_a_worker_that_dies_at_start_ends_the_server_with_its_words(arena):
    config = server_config(arena.address, ENVS + "DyingAtStart", serve={"restart_budget": 2})
    server = EnvServer(config.env.id, config=config)
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    client = EnvClient(server.address)
    with pytest.raises(
        WorkerDied, match=r"died 3 times, restart_budget is 2[\s\S]*exited with code 3[\s\S]*no more paper"
    ):
        await client.connect(60)
    with pytest.raises(WorkerDied, match="no more paper"):
        await running
    await client.close()


async def test_a_worker_that_cannot_be_started_is_tried_again(hosted, spec, monkeypatch):
    """Clients may have taken every descriptor."""
    launch, failures = WorkerProcess.launch, [OSError(errno.EMFILE, "Too many open files")] * 2

    def launched(*args):
        if failures:
            raise failures.pop()
        return launch(*args)

    async with hosted(ENVS + "Dying") as (client, _):
        monkeypatch.setattr(WorkerProcess, "launch", launched)
        assert (await rollout(client, Task("0", {"die": True}), spec(), 0)).error.type == "WorkerDied"
        assert (await rollout(client, Task("1", {}), spec(), 1, keep="eval")).success
        assert (await client.health())["restarts"] == 3


async def test_a_server_that_can_start_no_worker_ends(arena, monkeypatch):
    def launched(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(WorkerProcess, "launch", launched)
    config = server_config(arena.address, ENVS + "Echo", serve={"restart_budget": 1})
    with pytest.raises(WorkerDied, match=r"died 2 times.*env worker 0 cannot be started: Too many open files"):
        await EnvServer(config.env.id, config=config).run()


async def test_good_replies_restore_the_restart_budget(hosted, spec):
    async with hosted(ENVS + "Dying", serve={"restart_budget": 1}) as (client, _):
        for death in range(3):
            result = await rollout(client, Task("0", {"die": True}), spec(), death)
            assert result.error.type == "WorkerDied"
            for i in range(10):
                assert (await rollout(client, Task("1", {}), spec(), 100 + i)).success
        assert (await client.health())["restarts"] == 3


async def test_workers_are_loaded_a_few_at_a_time(hosted, tmp_path, monkeypatch):
    """As many as there are cores: all at once, they would starve each other past every deadline."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "open").touch()
    async with hosted(ENVS + "Gated", {"directory": str(tmp_path)}) as (_, first):
        (tmp_path / "open").unlink()
        limits = {"max_concurrent": 1, "restart_budget": 0, "hang_s": 0, "cleanup_s": 60}
        pool = Pool({**first._pool.settings}, WorkerPool(workers=5), **limits, arena=first._arena)
        pool.start()
        try:
            await until(lambda: len(list(tmp_path.glob("loading-*"))) == 3)
            assert len(pool._workers) == 2
            (tmp_path / "open").touch()
            await until(lambda: pool.health()["ready"] == 5)
            assert pool.health()["restarts"] == 0
        finally:
            await pool.close()


async def test_without_a_worker_the_server_is_alive_and_not_ready(hosted, tmp_path, spec):
    (tmp_path / "open").touch()
    async with hosted(ENVS + "Gated", {"directory": str(tmp_path)}) as (client, _):
        (tmp_path / "open").unlink()
        (pid,) = (await client.health())["pids"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(list(tmp_path.glob("loading-*"))) == 2)
        health = await client.health()
        assert (health["alive"], health["ready"], health["workers"], health["pids"]) == (True, 0, 1, [])
        waiting = asyncio.create_task(rollout(client, Task("0", {"text": "a"}), spec(fields=[]), keep="eval"))
        (tmp_path / "open").touch()
        assert (await waiting).success


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("RaisingTasks", TasksetError, r"the data set moved to the moon \(.*environments\.py:\d+, in "),
        ("Nothing", ConfigError, "has no callable 'Nothing'"),
    ],
)
async def test_an_environment_that_cannot_load_ends_the_server_with_one_line(arena, name, kind, said):
    """It says where; the traceback is in the log."""
    config = server_config(arena.address, ENVS + name)
    server = EnvServer(config.env.id, config=config)
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    clients = [EnvClient(server.address) for _ in range(2)]
    for outcome in await asyncio.gather(*(client.connect(60) for client in clients), return_exceptions=True):
        assert isinstance(outcome, kind)
        assert re.search(said, str(outcome))
        assert "\n" not in str(outcome)
    with pytest.raises(kind, match=said):
        await running
    for client in clients:
        await client.close()


async def test_a_task_set_that_raises_later_ends_the_server_too(arena):
    config = server_config(arena.address, ENVS + "RaisingLater")
    server = EnvServer(config.env.id, config=config)
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    client = EnvClient(server.address)
    await client.connect(60)
    assert len(await client.tasks("train", 0, 1)) == 1
    with pytest.raises(TasksetError, match="row 1 is rotten"):
        await client.tasks("train", 0, 2)
    with pytest.raises(TasksetError, match="row 1 is rotten"):
        await running
    await client.close()


async def test_cancelled_episodes_end_and_the_others_finish(hosted, spec, arena, engine):
    engine.open.clear()
    async with hosted(ENVS + "Echo", workers=2) as (client, server):
        task = Task("0", {"text": "a"})
        flying = [asyncio.create_task(rollout(client, task, spec(), i)) for i in range(20)]
        await until(lambda: engine.running == 20)
        numbers = list(client._open)
        for one in flying[:10]:
            one.cancel()
        await until(lambda: engine.running == 10)  # the engine's requests are dropped too
        await until(lambda: len(server._requests) == 10)
        request = {"request_id": numbers[15], "tag": "run/test/g/15"}
        assert (await client._call("cancel", request))["cancelled"] is True
        assert (await client._call("cancel", request))["cancelled"] is False
        assert (await client._call("cancel", {"request_id": b"unknown"}))["cancelled"] is False
        assert (await flying[15]).error.type == "Cancelled"
        engine.open.set()
        results = await asyncio.gather(*flying[10:15], *flying[16:])
        assert all(result.success for result in results)
        assert arena.stats()["blocks"] == len(results) == 9
        arena.discard("run")


async def test_an_episode_that_is_cancelled_before_it_began_replies_too(hosted, spec, arena):
    """The worker reads the request and its cancel at once."""
    async with hosted(ENVS + "Echo") as (client, server):
        task = Task("0", {"text": "a"})
        for index in range(50):
            flying = asyncio.create_task(rollout(client, task, spec(), index))
            await asyncio.sleep(0)
            flying.cancel()
        await until(lambda: not client._cancels and not server._requests)
        assert (await client.health())["sessions"] == 0
        assert (await rollout(client, task, spec(), 50)).success
        arena.discard("run")


async def test_a_reply_that_nobody_claims_is_freed(hosted, spec, arena, engine):
    """The client cancels while the reply is on its way; and a client that vanishes never gets it."""
    async with hosted(ENVS + "Echo") as (client, server):
        task = Task("0", {"text": "a"})
        done = await rollout(client, task, spec(), 0)
        assert arena.stats()["blocks"] == 1
        assert (await client._call("cancel", {"request_id": b"late", "tag": "run/test/g/0"}))["cancelled"] is False
        assert (done.success, arena.stats()["blocks"]) == (True, 0)
        engine.open.clear()
        async with EnvClient(server.address) as other:
            flying = asyncio.create_task(rollout(other, task, spec(), 1))
            await until(lambda: engine.running == 1)
        with pytest.raises(ServerDied, match="the client was closed"):
            await flying
        engine.open.set()
        await until(lambda: not server._requests)
        await until(lambda: arena.stats()["blocks"] == 0)


async def test_whoever_takes_a_run_over_ends_what_others_asked_for_and_finds_what_was_finished(
    hosted, spec, arena, engine
):
    async with hosted(ENVS + "Echo") as (client, server), EnvClient(server.address) as before:
        task, model = Task("0", {"text": "a"}), spec()
        done = await rollout(before, task, model, 0)
        engine.open.clear()
        theirs = [asyncio.create_task(rollout(before, task, model, i)) for i in (1, 2)]
        elsewhere = before.run_rollout(task, model=model, group_id="g", seed=3, keep="train", tag="other/test/g/3")
        others = asyncio.create_task(elsewhere)
        mine = asyncio.create_task(rollout(client, task, model, 4))
        await until(lambda: engine.running == 4)
        assert await client.take_over("run") == 2
        assert [one.error.type for one in await asyncio.gather(*theirs)] == ["Cancelled"] * 2
        assert [one.done() for one in (others, mine)] == [False, False]
        assert await client.take_over("run") == 0
        assert [row["handle"] for row in arena.ls()] == [str(done.samples[0].handles[0])]
        engine.open.set()
        assert (await others).success
        assert (await mine).success
        arena.discard("run")
        arena.discard("other")


async def test_a_worker_that_does_not_let_go_of_a_run_that_is_taken_over_is_ended(
    hosted, spec, engine, arena, caplog, monkeypatch
):
    monkeypatch.setattr("shmrl.env.server.REMIND_S", 0.2)
    engine.open.clear()
    async with (
        hosted(ENVS + "Clinging", serve={"cleanup_timeout_s": 1.0}) as (client, server),
        EnvClient(server.address) as before,
    ):
        flying = [asyncio.create_task(rollout(before, Task("0", {"for_ever": i == 0}), spec(), i)) for i in (0, 1)]
        await until(lambda: engine.running == 2)
        assert await client.take_over("run") == 2
        assert [one.error.type for one in await asyncio.gather(*flying)] == ["WorkerDied", "Cancelled"]
        assert "1 episodes that were cancelled have not ended yet: run/test/g/0" in caplog.text
        assert "within serve.cleanup_timeout_s = 1 s (run/test/g/0): aborting it" in caplog.text
        engine.open.set()
        assert (await rollout(client, Task("0", {}), spec(), 2)).success  # by the replacement
        arena.discard("run")


async def test_a_worker_that_is_stopped_is_killed_for_what_was_cancelled(hosted, spec, engine, arena):
    engine.open.clear()
    async with hosted(ENVS + "Echo", serve={"cleanup_timeout_s": 0.5}) as (client, server):
        async with EnvClient(server.address) as before:
            flying = asyncio.create_task(rollout(before, Task("0", {"text": "a"}), spec(), 0))
            await until(lambda: engine.running == 1)
            (pid,) = (await client.health())["pids"]
            os.kill(pid, signal.SIGSTOP)
            assert await client.take_over("run") == 1
            error = (await flying).error
        assert (error.type, f"(pid {pid}) was killed by SIGKILL" in error.message) == ("WorkerDied", True)


async def test_what_an_earlier_client_had_sent_and_nobody_had_read_is_refused(hosted, spec, engine, arena):
    async with hosted(ENVS + "Echo") as (client, server), EnvClient(server.address) as before:
        task, model = Task("0", {"text": "a"}), spec()
        assert await client.take_over("run") == 0
        assert (
            "another client has taken over the run of run/test/g/0"
            in (await rollout(before, task, model, 0)).error.message
        )
        assert (await rollout(client, task, model, 1)).success
        async with EnvClient(server.address) as later:
            assert (await rollout(later, task, model, 2)).success
        arena.discard("run")


async def test_an_elastic_pool_grows_by_load_and_shrinks_when_idle(hosted, spec, engine, arena, monkeypatch):
    monkeypatch.setattr("shmrl.env.pool.IDLE_S", 0.3)
    engine.open.clear()
    pool = {"kind": "elastic", "max_workers": 3, "per_worker": 4}
    async with hosted(ENVS + "Echo", serve={"pool": pool}) as (client, server):

        async def sizes():
            health = await client.health()
            return health["workers"], health["ready"], health["max_workers"], health["loading"]

        def play(*numbers):
            return [asyncio.create_task(rollout(client, Task("0", {"text": "a"}), spec(), i)) for i in numbers]

        assert await sizes() == (1, 1, 3, 0)
        flying = play(0, 1, 2)
        await until(lambda: engine.running == 3)
        assert len(server._pool._slots) == 1  # three of four places
        flying += play(*range(3, 20))
        await until(lambda: engine.running == 12)
        health = await client.health()
        assert (health["sessions"], health["waiting"], health["workers"]) == (12, 8, 3)
        assert sorted(len(worker.requests) for worker in server._pool.workers) == [4, 4, 4]
        last = max(server._pool.workers, key=lambda worker: worker.slot)
        for request in [r for worker in server._pool.workers if worker is not last for r in worker.requests.values()]:
            server._pool.cancel(request)
        for request in list(server._pool._waiting):
            server._pool.cancel(request)
        await until(lambda: [worker.slot for worker in server._pool.workers] == [0, 2])
        engine.open.set()  # the worker with requests was not ended: they all reply
        results = await asyncio.gather(*flying)
        assert sorted(r.error.type if r.error else "" for r in results) == [""] * 4 + ["Cancelled"] * 16
        await until(lambda: len(server._pool._slots) == 1)
        health = await client.health()
        assert (health["restarts"], health["restarts_left"]) == (0, 5)
        assert health["stats"] == {"replied": 4, "failed": 0, "cancelled": 16}
        arena.discard("run")


async def test_a_busy_worker_is_lagging_and_keeps_its_requests(hosted, spec):
    async with hosted(ENVS + "Blocking") as (client, _):
        flying = asyncio.create_task(rollout(client, Task("0", {"seconds": 4}), spec()))
        lagging = False
        async with asyncio.timeout(30):
            while not lagging:
                health = await client.health()
                lagging = health["lagging"] == 1
                await asyncio.sleep(0.1)
        assert (health["ready"], health["sessions"]) == (1, 1)
        assert health["loop_lag_ms"]["max"] < 2000
        assert (await flying).success


async def test_a_worker_that_hangs_beyond_the_limit_is_aborted_where_it_stands(hosted, spec):
    async with hosted(ENVS + "Blocking", serve={"request_timeout_s": 2}) as (client, _):
        result = await rollout(client, Task("0", {"seconds": 600}), spec())
        assert result.error.type == "WorkerDied"
        assert "SIGABRT" in result.error.message
        assert "environments.py" in result.error.message  # faulthandler's dump


async def test_a_worker_that_hangs_takes_nobody_along_who_comes_later(hosted, spec, monkeypatch):
    """They wait until it is heard of again, or has a successor."""
    monkeypatch.setattr("shmrl.env.pool.SILENT_S", 1.0)
    async with hosted(ENVS + "Blocking", serve={"request_timeout_s": 3}) as (client, server):
        hanging = asyncio.create_task(rollout(client, Task("0", {"seconds": 600}), spec()))
        (worker,) = server._pool.workers
        await until(lambda: worker.requests and time.monotonic() - worker.beat > 1.0)
        later = [asyncio.create_task(rollout(client, Task("0", {"text": "a"}), spec(fields=[]), i)) for i in (1, 2)]
        assert (await hanging).error.type == "WorkerDied"
        assert all(result.success for result in await asyncio.gather(*later))


async def test_children_of_a_worker_end_with_it(hosted, spec):
    async with hosted(ENVS + "Forking") as (client, _):
        child = psutil.Process(int((await rollout(client, Task("0", {}), spec(fields=[]), keep="eval")).reward))
        (pid,) = (await client.health())["pids"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_more_requests_than_max_concurrent_wait(hosted, spec, engine, arena):
    engine.open.clear()
    async with hosted(ENVS + "Echo", workers=2, serve={"max_concurrent": 3}) as (client, _):
        flying = [asyncio.create_task(rollout(client, Task("0", {"text": "a"}), spec(fields=[]), i)) for i in range(5)]
        await until(lambda: engine.running == 3)
        health = await client.health()
        assert (health["sessions"], health["waiting"]) == (3, 2)
        engine.open.set()
        assert all(result.success for result in await asyncio.gather(*flying))
        arena.discard("run")
