"""Between nodes: node server + fetch beside the threaded HTTP server of the standard library read by http.client.

`python -m benches.bench_node [rounds]`. On loopback, in interleaved rounds; what is fetched is verified and lies in an
arena, what http.client reads is a bytes object. Two ways to be 40 blobs behind:

    steps    40 blobs are put, then all fetched, then all let go, as a training step does. The bar is for this one: the
             HTTP design takes fresh memory for every step, on both sides, and an arena takes what it had.
    one by one   each blob is let go before the next is put: a heap of equal blobs is recycled as an arena is, and what
             is left is the same two copies through the kernel on both ways.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

from benches.peers import bars, peers, runner

SIZES = (6_291_456, 16_777_216)
LAG, STEPS, BURSTS, WARM = 40, 40, 5, 2
NODES, HTTP, BAR = "shmrl, two nodes", bars.HTTP, 2.3


@dataclass
class Turn:
    """Seconds per blob: put + get in steps, CPU of both sides with one pass over the bytes, put + get one by one."""

    step_s: float
    cpu_s: float
    one_s: float


def turn(name: str, size: int) -> Turn:
    """One peer's turn, in fresh processes."""
    with runner.pair(peers.find(name)) as two:
        two.open(size, LAG)
        for _ in range(WARM):
            two.burst(LAG)
        cpu = runner._cpu()
        steps = [two.burst(LAG)[0] for _ in range(BURSTS)]
        cpu_s = (runner._cpu() - cpu) / (BURSTS * LAG)
        two.close()
        return Turn(statistics.median(steps), cpu_s, runner.turn(two, size, LAG, STEPS).behind.hand_over)


def main(rounds: str = "5") -> None:
    """Prints a line per size and round, then the median over rounds of the ratios within one."""
    for size in SIZES:
        found = []
        for number in range(int(rounds)):
            nodes, http = turn(NODES, size), turn(HTTP, size)
            found.append((http.step_s / nodes.step_s, http.cpu_s / nodes.cpu_s, http.one_s / nodes.one_s))
            steps, cpu, one = found[-1]
            print(f"{size / 1e6:.1f} MB, round {number + 1}: steps {steps:.2f}x, CPU {cpu:.2f}x, one by one {one:.2f}x")
        steps, cpu, one = map(statistics.median, zip(*found, strict=True))
        held = "held" if steps >= BAR else "NOT held"
        told = f"put + get in steps {steps:.2f}x (bar {BAR}: {held}), CPU {cpu:.2f}x; one by one {one:.2f}x"
        print(f"{size / 1e6:.1f} MB, {HTTP} / {NODES}: {told}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
