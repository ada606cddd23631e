"""`StepBlocks`: what a rank lets go of reaches each node, whatever the others do."""

import socket

import numpy as np

from shmrl.arena import Arena
from shmrl.config import ArenaConfig, NodeConfig
from shmrl.node.blocks import StepBlocks
from shmrl.node.server import NodeServer
from shmrl.payload import assemble, encode, pack, zigzag
from tests.node.conftest import TOKEN
from tests.payload import branches
from tests.support.clock import wait_until


def micro_batches(arena):
    sample = encode(arena, branches.make(40, 10), tag="run/source/group/0")
    arena.ship(sample.handles, readers=2, step=1)
    return pack([sample], seq_len=64, num_ranks=1)[0]


def test_blocks_of_a_node_that_is_lost_are_not_waited_for(there, here, server):
    blocks, mine = StepBlocks(here, 0, ArenaConfig(), NodeConfig(), TOKEN), micro_batches(there)
    assert blocks.here(mine, {there.origin: ""}) == mine
    blocks.done(mine)
    blocks.close()
    assert server.counters["requests"] == 0


def test_an_origin_that_is_silent_delays_no_later_done_of_another(there, here, server, tmp_path):
    with Arena.create("8MiB", backing="file", base=str(tmp_path)) as third:
        blocks = StepBlocks(here, 0, ArenaConfig(), NodeConfig(), TOKEN)
        first, second = micro_batches(third), micro_batches(there)
        with NodeServer(third, TOKEN) as dying:
            blocks.here([*first, *second], {third.origin: dying.url, there.origin: server.url})
        with socket.create_server(("127.0.0.1", 0)) as silent:
            blocks._nodes[third.origin] = f"http://127.0.0.1:{silent.getsockname()[1]}"
            blocks.done(first)
            with silent.accept()[0] as held:
                assert held.recv(1) == b"P"
                blocks.done(second)
                wait_until(lambda: server.counters["requests"] == 3, what="the other node to be told")
                assert here.stats()["blocks"] == 0
                blocks._copies.close()
        blocks.close()
        third.unlink()


STAGES, CONTEXT, LAYERS, TOKENS = 4, 2, 8, 32


def test_ranks_that_read_their_layers_and_tokens_share_one_transfer(there, here, server):
    """Four stages and two context ranks: they read each row once among them, and it is sent once."""
    sample = encode(there, branches.make(TOKENS, 10, L=LAYERS, rows=TOKENS), tag="run/source/group/0")
    there.ship(sample.handles, readers=STAGES * CONTEXT + 1, step=1)
    ((micro,),) = pack([sample], seq_len=TOKENS, num_ranks=1)
    whole = assemble(there, micro)
    routing = np.zeros_like(whole.routing)
    with NodeServer(here, TOKEN) as own:
        node = NodeConfig(address=own.url.removeprefix("http://"))
        ranks = [StepBlocks(here, rank, ArenaConfig(), node, TOKEN) for rank in range(STAGES * CONTEXT)]
        for rank, blocks in enumerate(ranks):
            stage, context = divmod(rank, CONTEXT)
            layers = range(stage * LAYERS // STAGES, (stage + 1) * LAYERS // STAGES)
            (copy,) = blocks.here([micro], {there.origin: server.url})
            ranges = zigzag([TOKENS], CONTEXT, context)
            share = assemble(here, copy, tokens=ranges, layers=layers, verify=True)
            assert share.routing.nbytes * STAGES * CONTEXT == whole.routing.nbytes
            rows = [row for _, start, stop in ranges for row in range(start, stop)]
            assert share.tokens.tolist() == whole.tokens[rows].tolist()
            routing[rows, layers.start : layers.stop] = share.routing
        assert np.array_equal(routing, whole.routing)
        assert server.counters["sent_bytes"] == sum(handle.nbytes for handle in sample.handles)
        assert (own.counters["fetched"], here.stats()["blocks"]) == (1, 1)
        for blocks in ranks:
            blocks.done([micro])
            blocks.close()
    there.done(sample.handles, reader=STAGES * CONTEXT)
    assert (here.stats()["blocks"], there.stats()["blocks"]) == (0, 0)
    assert there.stats()["freed"] == there.stats()["created"] == 1
