"""A run over several nodes: replicas, blocks in arenas that the orchestrator cannot map, and who is lost with whom.

A run costs seconds to start, so each of the two here goes through several failures, one after the other, and drains.
"""

import asyncio
import signal

import psutil

from tests.orchestrator.cluster import Cluster
from tests.orchestrator.test_run import CONFIG, said
from tests.support.fake_engine import FakeEngine

SLOW = CONFIG.replace('"reverse-text", args = {', '"tests.support.slow_env:SlowReverseText", args = { delay_s = 0.05,')


def summed(metrics, name):
    return sum(line[name] for line in metrics)


async def steps(site, process, more):
    """So many more of them."""
    await said(process, f"step {len(site.lines('metrics.jsonl')) + more}/")


async def drained(site, process, ranks):
    """The metrics of a run that is asked to end, and does so in order."""
    process.send_signal(signal.SIGTERM)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 128 + signal.SIGTERM, output.decode()
    for rank in ranks:
        await asyncio.wait_for(rank.communicate(), 60)
        assert rank.returncode == 0
    return site.lines("metrics.jsonl")


async def test_a_server_that_is_started_again_and_a_node_that_is_away_lose_nothing(tmp_path, model_dir):
    async with FakeEngine() as engine, Cluster(tmp_path, model_dir, engine, SLOW, run__max_steps="500") as site:
        ranks, process = await site.ranks(), await site.orchestrator()
        await said(process, "2 replicas on node1, node2, in all 2 workers and 2048 episodes at once")
        await said(process, "step 2/")
        one, two = site.nodes
        site.kill(one, "server")
        await one.server.wait()
        await site.serve(one)
        await said(process, "the server of node node1 was started again")
        await steps(site, process, 2)
        replica = psutil.Process(two.replicas[0].pid)
        whole = [psutil.Process(two.server.pid), replica, *replica.children(recursive=True)]
        for each in whole:
            each.send_signal(signal.SIGSTOP)
        await said(process, "node node2 has not answered for 3 s")
        for each in whole:
            each.send_signal(signal.SIGCONT)
        await said(process, "node node2 answers again")
        await steps(site, process, 2)
        metrics = await drained(site, process, ranks)

        assert summed(metrics, "payload/dropped_micro_batches") == summed(metrics, "episodes/failed") == 0
        assert site.counts() == [(0, 0)] * 3
        created = [node.arena.stats()["created"] for node in site.nodes]
        assert min(created) >= 0.2 * sum(created)  # though one was away
        assert metrics[-1]["node/node1/rss_bytes"] > 1 << 20
        a, b = (site.lines(f"rank_{rank}.jsonl") for rank in range(2))
        assert {origin for line in a + b for origin in line["nodes"]} == {node.arena.origin for node in site.nodes}
        for left, right in zip(a, b, strict=True):
            assert left["assembled_loss_tokens"] + right["assembled_loss_tokens"] == left["loss_tokens"]


async def test_a_lost_node_takes_its_engine_with_it(tmp_path, model_dir):
    async with FakeEngine() as left, FakeEngine() as engine:
        settings = {"run__max_steps": "500", "patience_s": 2, "inference__urls": f'["{engine.url}", "{left.url}"]'}
        async with Cluster(tmp_path, model_dir, engine, SLOW, **settings) as site:
            ranks, process = await site.ranks(), await site.orchestrator()
            await said(process, "step 2/")
            site.kill(site.nodes[0], "server", "replicas")
            await engine.stop()
            await said(process, "node node1 is lost, and with it")
            await said(process, f"the engine at {engine.url} drops out, 1 go on: node node1 is lost")
            await steps(site, process, 3)
            metrics = await drained(site, process, ranks)
        assert left.version == metrics[-1]["step"]


async def test_a_replica_and_a_node_that_are_lost_take_only_themselves(tmp_path, model_dir):
    settings = {"run__max_steps": "500", "nodes": 3, "patience_s": 2}
    async with FakeEngine() as engine, Cluster(tmp_path, model_dir, engine, SLOW, **settings) as site:
        ranks, process = await site.ranks(), await site.orchestrator()
        one, two, three = site.nodes
        await said(process, "step 1/")
        site.kill(one, "replicas")
        await said(process, "source 'words' goes on without its replica at tcp://127.0.0.1:")
        await steps(site, process, 2)
        before = site.lines("metrics.jsonl")
        assert summed(before, "payload/dropped_micro_batches") == 0
        assert 0 < summed(before, "episodes/failed") <= site.tree.orchestrator.inflight
        site.kill(two, "server", "replicas")
        await said(process, "node node2 is lost, and with it")
        await steps(site, process, 3)
        metrics = await drained(site, process, ranks)
        assert site.counts()[:2] + site.counts()[3:] == [(0, 0)] * 3
        last = site.lines("rank_0.jsonl")[-1]
        assert set(last["nodes"]) <= {three.arena.origin}
        read = summed(site.lines("rank_0.jsonl"), "micro_batches")
        assert read + summed(metrics, "payload/dropped_micro_batches") >= len(metrics)
