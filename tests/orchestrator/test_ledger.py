"""Exact counts over a real arena: every block leaves the ledger once, on whichever way."""

import pytest

from shmrl.arena import Arena
from shmrl.errors import LostPayload
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.ledger import Ledger
from shmrl.payload import assemble, read_header, read_tokens
from shmrl.types import Handle, MicroBatch
from tests.orchestrator.fakes import sample


def counts(arena):
    stats = arena.stats()
    return stats["blocks"], stats["created"], stats["freed"]


async def test_what_is_released_is_freed_at_once(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=2)
    samples = [sample(worker, f"t/a/g/{i}") for i in range(3)]
    for i, item in enumerate(samples):
        await ledger.adopt([item], f"t/a/g/{i}")
    assert len(ledger) == 3
    ledger.release(samples[:2])
    assert counts(arena) == (1, 3, 2)
    assert ledger.open()[samples[2].handles[0]].tag == "t/a/g/2"
    assert list(ledger.close()) == [samples[2].handles[0]]
    assert counts(arena) == (0, 3, 3)
    assert ledger.close() == {}


async def test_a_shipped_block_outlives_its_readers_until_the_step_is_durable(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=2)
    a = sample(worker)
    b = sample(worker, T=12, S=8, prefix=(a, 4))
    await ledger.adopt([a, b], "t/a/g/0")
    ledger.ship([[MicroBatch((a,))], [MicroBatch((b,))]], step=5)
    for rank, handles in ((0, a.handles), (1, b.handles)):
        with Arena.attach(arena.address, reader=rank) as reader:
            reader.done(handles)
    assert counts(arena)[0] == 2
    ledger.let_go(4)
    assert len(ledger) == 2
    ledger.let_go(5)
    assert counts(arena) == (0, 2, 2)
    assert ledger.close() == {}


async def test_a_context_parallel_group_reads_the_same_blocks(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=4)
    a, b = sample(worker), sample(worker)
    await ledger.adopt([a, b], "t/a/g/0")
    ledger.ship([[MicroBatch((a,))], [MicroBatch((b,))]], step=1, readers=2)
    ledger.let_go(1)
    for rank, handles, left in ((0, a.handles, 2), (1, a.handles, 1), (3, b.handles, 1), (2, b.handles, 0)):
        with Arena.attach(arena.address, reader=rank) as reader:
            reader.done(handles)
        assert counts(arena)[0] == left
    assert ledger.close() == {}


async def test_a_shared_prefix_is_freed_with_its_last_sample(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    first = sample(worker, T=10, S=6)
    second = sample(worker, T=12, S=8, prefix=(first, 4))
    third = sample(worker, T=14, S=10, prefix=(first, 4))
    await ledger.adopt([first, second, third], "t/a/g/0")
    assert counts(arena)[0] == 3
    ledger.release([first])
    assert counts(arena)[0] == 3
    with Arena.attach(arena.address, reader=0) as reader:
        ledger.ship([[MicroBatch((second,))]], step=1)
        reader.done(second.handles)
        ledger.let_go(1)
        assert counts(arena)[0] == 2  # the prefix and the third sample's own rows
        ledger.ship([[MicroBatch((third,))]], step=2)
        reader.done(third.handles)
        ledger.let_go(2)
    assert counts(arena) == (0, 3, 3)
    assert ledger.close() == {}


async def test_a_block_of_two_retained_steps_is_freed_when_the_last_is_let_go(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    first = sample(worker, T=10, S=6)
    second = sample(worker, T=12, S=8, prefix=(first, 4))
    await ledger.adopt([first, second], "t/a/g/0")
    with Arena.attach(arena.address, reader=0) as reader:
        ledger.ship([[MicroBatch((first,))]], step=1)
        reader.done(first.handles)
        ledger.ship([[MicroBatch((second,))]], step=2)
        reader.done(second.handles)
    ledger.let_go(1)
    assert counts(arena) == (2, 2, 0)
    ledger.let_go(2)
    assert counts(arena) == (0, 2, 2)
    assert ledger.close() == {}


async def test_a_group_of_16_with_a_prompt_of_30_000_stores_46_000_rows_and_frees_it_with_the_last(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    prompt = sample(worker, "t/a/g/0", T=30_000, S=0)
    group = [sample(worker, f"t/a/g/{i}", T=31_000, S=1000, prefix=(prompt, 30_000)) for i in range(16)]
    handles = {handle for one in group for handle in one.handles}
    assert sum(read_header(arena, handle).tokens_here for handle in handles) == 46_000
    for i, one in enumerate(group):
        await ledger.adopt([one], f"t/a/g/{i}")
    ledger.release(group[:15])
    assert (list(ledger.open()), counts(arena)) == (list(group[15].handles), (2, 17, 15))
    assert len(read_tokens(arena, group[15])) == 31_000
    ledger.release(group[15:])
    assert counts(arena) == (0, 17, 17)


async def test_truncation_gives_back_what_only_the_rest_used(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    first = sample(worker, T=10, S=6)
    second = sample(worker, T=12, S=8, prefix=(first, 4))
    await ledger.adopt([first, second], "t/a/g/0")
    cut = ledger.cut(second, 3)
    assert (cut.T, cut.handles) == (3, first.handles)
    assert counts(arena)[0] == 1
    ledger.release([first, cut])
    assert counts(arena) == (0, 2, 2)


async def test_an_episode_that_lost_a_block_keeps_none(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    kept, lost, other = (sample(worker) for _ in range(3))
    worker.free(lost.handles)
    with pytest.raises(LostPayload, match=r"t/a/g/7: block Handle\(slot"):
        await ledger.adopt([kept, lost, other], "t/a/g/7")
    assert counts(arena) == (0, 3, 3)
    assert len(ledger) == 0


async def test_what_others_share_outlives_an_episode_that_lost_a_block(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    first = sample(worker, "t/a/g/0")
    second, third = (sample(worker, f"t/a/g/{i}", T=12, S=8, prefix=(first, 4)) for i in (1, 2))
    await ledger.adopt([first], "t/a/g/0")
    worker.free([second.handles[-1]])
    with pytest.raises(LostPayload, match="t/a/g/1"):  # with what is shared before the lost block, and behind it
        await ledger.adopt([second, third], "t/a/g/1")
    assert list(ledger.open()) == list(first.handles)
    assert counts(arena) == (1, 3, 2)
    ledger.release([first])
    assert counts(arena) == (0, 3, 3)


async def test_siblings_of_one_reply_keep_what_they_share_with_one_that_lost_a_block(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    prompt = sample(worker, "t/a/g", T=4, S=0)
    group = {f"t/a/g/{i}": [sample(worker, f"t/a/g/{i}", T=12, S=8, prefix=(prompt, 4))] for i in range(3)}
    worker.free([group["t/a/g/0"][0].handles[1]])
    lost = await ledger.adopt_all(group)
    assert list(lost) == ["t/a/g/0"]
    assert "t/a/g/0: block Handle(slot" in str(lost["t/a/g/0"])
    assert counts(arena) == (3, 4, 1)
    ledger.release(group["t/a/g/1"])
    assert len(read_tokens(arena, group["t/a/g/2"][0])) == 12
    ledger.release(group["t/a/g/2"])
    assert counts(arena) == (0, 4, 4)


async def test_a_prompt_whose_siblings_all_lost_a_block_is_freed(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    prompt = sample(worker, "t/a/g", T=4, S=0)
    group = {f"t/a/g/{i}": [sample(worker, f"t/a/g/{i}", T=12, S=8, prefix=(prompt, 4))] for i in range(2)}
    worker.free([samples[0].handles[1] for samples in group.values()])
    assert list(await ledger.adopt_all(group)) == list(group)
    assert (counts(arena), len(ledger)) == ((0, 3, 3), 0)


async def test_a_block_that_was_lost_before_it_ships_is_the_ranks_to_drop(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    lost, kept = sample(worker), sample(worker)
    await ledger.adopt([lost, kept], "t/a/g/0")
    arena.free(lost.handles)
    ledger.ship([[MicroBatch((lost,)), MicroBatch((kept,))]], step=1)
    with Arena.attach(arena.address, reader=0) as reader:
        with pytest.raises(LostPayload):
            assemble(reader, MicroBatch((lost,)))
        assert len(assemble(reader, MicroBatch((kept,))).tokens) == kept.T
        reader.done([*lost.handles, *kept.handles])
    assert counts(arena) == (1, 2, 1)
    ledger.let_go(1)
    assert counts(arena) == (0, 2, 2)
    assert ledger.close() == {}


async def test_a_block_an_operator_discarded_is_no_error(arena, worker):
    ledger = Ledger(Arenas(arena), num_ranks=1)
    item = sample(worker, "t/a/g/0")
    await ledger.adopt([item], "t/a/g/0")
    arena.discard("t/a")
    ledger.release([item])
    assert counts(arena) == (0, 1, 1)


async def test_foreign_handles_are_refused(arena):
    foreign = Handle.pack(node=1, arena=2, slot=0, generation=0, nbytes=8, nonce=b"12345678")
    ledger = Ledger(Arenas(arena), num_ranks=1)
    with pytest.raises(LostPayload):
        await ledger.adopt([sample_of(foreign)], "old-run/a/g/0")


def sample_of(handle):
    from shmrl.types import Sample

    return Sample(segments=((handle, 0, 4),), T=4, S=2, R=3)
