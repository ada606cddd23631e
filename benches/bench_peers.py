"""A step of put, get, read and comparison between two processes, through shmrl and the peers that need no installation.

`pytest benches/bench_peers.py --benchmark-only`. The full comparison, with its tables, is `python -m benches.peers`.
"""

from __future__ import annotations

import pytest

from benches.peers import peers, runner

SIZE, LAG = 6_291_456, 8


@pytest.mark.parametrize("name", ["shmrl", "shmrl, checksums", "SharedMemory", "HTTP, http.client"])
def test_step(benchmark, name):
    """The consumer LAG blobs behind; the two pipe hops are in the figure."""
    with runner.pair(peers.find(name)) as two:
        two.open(SIZE, LAG)
        for _ in range(2 * LAG + runner.WARM):
            two.step()
        benchmark.group = f"step of {SIZE:,} bytes"
        put_s, get_s, _ = benchmark.pedantic(two.step, rounds=20)
        assert put_s > 0 < get_s
        two.close()
