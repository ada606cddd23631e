"""What the orchestrator costs when a thousand episodes end together: its memory stays flat, and so do its messages. How
late its loop turns is in benches/bench_replies.py."""

import asyncio
import time

from shmrl import wire
from shmrl.arena import Arena
from shmrl.monitor.metrics import rss_bytes
from shmrl.payload import micro_batches_to_wire, pack, sample_from_wire, sample_to_wire
from shmrl.types import EpisodeResult
from tests.orchestrator.conftest import finish, until
from tests.orchestrator.fakes import Client, sample, tree

N = 1024


class Replaying(Client):
    """Answers with samples that were stored before, spread over one second from `start` on."""

    def __init__(self, arena, replies):
        super().__init__(arena)
        self.replies, self.start = replies, float("inf")

    async def run_rollout(self, task, *, model, group_id, seed, keep, tag, shares=False):
        number = next(self.calls)
        await until(lambda: self.start < float("inf"), poll_s=0.1)
        await asyncio.sleep(max(self.start + number / N - time.monotonic(), 0))
        samples = (sample_from_wire(wire.unpack(self.replies[number])),)
        return EpisodeResult(True, task.id, reward=float(number % 3), samples=samples, wire_bytes=300)


async def test_a_thousand_replies_in_a_second(tmp_path, arena, worker, parts):
    replies = [wire.pack(sample_to_wire(sample(worker, f"t/a/a-{i // 8}/{i % 8}", T=2000))) for i in range(N)]
    payload_bytes = arena.stats()["used_bytes"]
    client = Replaying(worker, replies)
    p = parts(tree(tmp_path, ranks=2, batch_size=N, group_size=8, max_inflight=N, seq_len=4096), [client])
    running = asyncio.create_task(p.dispatcher.run())
    await until(lambda: len(p.episodes.open()) == N)
    anonymous, client.start = rss_bytes()[1], time.monotonic() + 0.2
    await until(lambda: p.sink.pending == N)
    batch = p.sink.cut(1)
    ranks = pack(batch.samples, seq_len=4096, num_ranks=2)
    p.ledger.ship(ranks, 1)
    sizes = [len(wire.pack(micro_batches_to_wire(micros))) for micros in ranks]
    assert rss_bytes()[1] - anonymous < 2 << 20 < payload_bytes
    assert sum(sizes) / len(batch.samples) <= 512
    running.cancel()
    for rank, micros in enumerate(ranks):
        with Arena.attach(arena.address, reader=rank) as reader:
            reader.done([handle for micro in micros for handle in micro.handles])
    p.ledger.let_go(1)
    await finish(p)
    assert arena.stats()["blocks"] == 0
