"""A run in an arena that is far too small for what it is offered: nothing fails, nothing hangs, nothing is left."""

import asyncio
import signal

import pytest

from shmrl.types import Handle
from tests.orchestrator.conftest import until
from tests.orchestrator.test_run import CONFIG, Site, said
from tests.orchestrator.wide import ROW_NBYTES, Repeating, wide_model

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
TOKENS, STEPS, BATCH, AHEAD = 1000, 10, 16, 8
EPISODE = 7 * 65536  # what one takes: 384 B of routing per token, and the rest


def site(directory, model_dir, engine, capacity, *, batch=BATCH, group=4, **flags):
    """Episodes of 448 KiB; as many may be under way as nine batches have."""
    text = CONFIG.replace("batch_size = 8", f"batch_size = {batch}").replace("group_size = 4", f"group_size = {group}")
    text = text.replace("top_p = 0.95, top_k = 32, max_tokens = 8", f"max_tokens = {TOKENS - 1}")
    text = text.replace("max_model_len = 256", "max_model_len = 2000").replace("seq_len = 256", f"seq_len = {TOKENS}")
    given = {
        "run__max_steps": str(STEPS), "trainer__head": "0", "orchestrator__max_off_policy_steps": str(AHEAD),
        "orchestrator__max_inflight": str(batch * (AHEAD + 1)),
    }  # fmt: skip
    return Site(directory, wide_model(directory, model_dir), engine, text, capacity, **given | flags)


async def test_fr_05_four_times_the_capacity_with_a_stopped_trainer(tmp_path, model_dir):
    """Bounded memory, backpressure: new groups wait while the ranks are stopped, open ones finish, all are trained."""
    capacity = 16 * MIB
    assert 3.9 * capacity < (AHEAD + 1) * BATCH * EPISODE
    async with Repeating(TOKENS) as engine, site(tmp_path, model_dir, engine, capacity) as one:
        ranks = await one.ranks()
        process = await one.spawn("-m", "shmrl", "orchestrator", one.file)
        await said(process, "step 1/")
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        await until(lambda: one.arena.stats()["used_bytes"] >= 10 * MIB)
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        output, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, output.decode()
        assert "groups start again" in output.decode()
        for rank in ranks:
            await asyncio.wait_for(rank.communicate(), 20)
        lines, stats = one.lines("metrics.jsonl"), one.arena.stats()
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert [line["episodes/shipped"] for line in lines] == [BATCH] * STEPS
        assert sum(line["episodes/failed"] + line["episodes/timed_out"] for line in lines) == 0
        assert stats["created"] * EPISODE >= 4 * capacity
        assert 0.5 * capacity < stats["peak_bytes"] <= capacity
        assert (stats["blocks"], stats["used_bytes"]) == (0, 0)


async def test_fr_05_four_times_the_capacity_in_one_batch_spills(tmp_path, model_dir):
    """A batch of four times the arena, and ranks that are stopped before they read it: what finds no room goes to
    files, comes back with the bytes it was written with, and leaves nothing there."""
    capacity, batch, steps = 16 * MIB, 144, 2
    assert 3.9 * capacity < batch * EPISODE
    spill_dir = tmp_path / "disk"
    spill_dir.mkdir()
    flags = {"run__max_steps": str(steps), "arena__on_full": "spill", "arena__spill_dir": str(spill_dir)}
    async with (
        Repeating(TOKENS) as engine,
        site(tmp_path, model_dir, engine, capacity, batch=batch, arena__verify="true", **flags) as one,
    ):
        (directory,) = spill_dir.iterdir()
        ranks = await one.ranks()
        process = await one.spawn("-m", "shmrl", "orchestrator", one.file)
        await until(lambda: one.arena.stats()["blocks"], 60)  # version 0 is published
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        await until(lambda: shipped(one.arena) == batch, 120, poll_s=0.1)
        spilled, held = compared(one.arena)
        assert spilled * EPISODE > 2.9 * capacity
        assert spilled + held >= batch  # some of the next one, too
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        output, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, output.decode()
        for rank in ranks:  # they assemble with verify
            assert (await asyncio.wait_for(rank.communicate(), 20), rank.returncode)[1] == 0
        lines, stats = one.lines("metrics.jsonl"), one.arena.stats()
        assert [line["episodes/shipped"] for line in lines] == [batch] * steps
        assert sum(line["episodes/failed"] + line["episodes/timed_out"] for line in lines) == 0
        assert sum(line["orchestrator/requeued_groups"] for line in lines) == 0
        assert spilled >= lines[0]["arena/spilled"] > 0
        assert lines[0]["arena/spilled_bytes"] > 2.5 * capacity  # files have no rounding to 64 KiB
        assert stats["peak_bytes"] <= capacity
        assert (stats["blocks"], stats["created"] - stats["freed"], list(directory.iterdir())) == (0, 0, [])
    assert list(spill_dir.iterdir()) == []


def shipped(arena):
    return sum("shipped" in row["flags"] for row in arena.ls())


def compared(arena):
    """(spilled, not spilled) blocks, after a comparison: the engine says the same to all, so their routing differs by
    the length of the prompt alone; every checksum is the one that was taken as the block was written."""
    counts, seen = [0, 0], {}
    for row in arena.ls():
        spilled, handle = "spilled" in row["flags"], Handle.parse(row["handle"])
        counts[not spilled] += 1
        arena.get(handle, verify=True).release()
        with arena.get(handle, field="routing") as view, memoryview(view) as rows:
            seen.setdefault(bytes(rows[-ROW_NBYTES * 900 :]), set()).add(spilled)
    assert any(kinds == {True, False} for kinds in seen.values()), "no spilled block had a twin in memory"
    assert len(seen) <= 4, f"{len(seen)} different answers to prompts of 2 to 4 letters"
    return counts


async def test_a_group_that_is_larger_than_the_arena_is_refused(tmp_path, model_dir):
    async with (
        Repeating(TOKENS) as engine,
        site(tmp_path, model_dir, engine, 2 * MIB, batch=8, group=8) as one,
    ):
        ranks = await one.ranks()
        process = await one.spawn("-m", "shmrl", "orchestrator", one.file)
        await said(process, "ready: ")
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        text = output.decode()
        assert "shmrl: error: the arena is too small: group" in text
        assert "of source 'words' cannot be finished. Its 8 episodes take about 3." in text
        assert "of 2.0 MiB are used, 0 finished groups wait for the rest of their batch" in text
        assert "Set arena.capacity to 3." in text
        for rank in ranks:
            rank.kill()
        assert one.arena.stats()["blocks"] == 0
