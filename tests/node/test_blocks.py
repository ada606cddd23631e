"""`StepBlocks`: what a rank lets go of reaches each node, whatever the others do."""

import socket

from shmrl.arena import Arena
from shmrl.config import ArenaConfig, NodeConfig
from shmrl.node.blocks import StepBlocks
from shmrl.node.server import NodeServer
from shmrl.payload import encode, pack
from tests.node.conftest import TOKEN
from tests.payload import branches
from tests.support.clock import wait_until


def micro_batches(arena):
    sample = encode(arena, branches.make(40, 10), tag="run/source/group/0")
    arena.ship(sample.handles, readers=2, step=1)
    return pack([sample], seq_len=64, num_ranks=1)[0]


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
