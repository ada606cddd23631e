"""Waiters behind a dead holder of the allocator's lock: how soon they go on after the kernel released its byte.

`python -m benches.bench_takeover [rounds] [blocks]`; as root under `chrt -r 10` where other work would be measured too.
Every figure is an upper bound: from the waiter's last look that found the holder alive. Waiters look every 1 to 4 ms.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def takeovers(rounds: int, blocks: int) -> list[float]:
    """Milliseconds of each takeover, sorted, in an arena of so many blocks."""
    with tempfile.TemporaryDirectory() as directory:
        driver = Path(directory, "takeover")
        sources = [ROOT / "tests/arena/takeover_driver.c", *sorted((ROOT / "csrc").glob("arena_*.c"))]
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", f"-I{ROOT / 'csrc'}"]
        subprocess.run(["gcc", *flags, "-o", driver, *sources, "-lpthread"], check=True)
        said = subprocess.check_output([driver, str(rounds), str(blocks)], text=True)
    return sorted(int(line) / 1000 for line in said.split())


def main(rounds: str = "300", blocks: str = "20000") -> None:
    """Prints p50, p99 and the maximum."""
    ms = takeovers(int(rounds), int(blocks))
    p99 = ms[min(len(ms) - 1, len(ms) * 99 // 100)]
    told = f"p50 {statistics.median(ms):.1f}, p99 {p99:.1f}, max {ms[-1]:.1f} ms"
    print(f"{len(ms)} takeovers over {blocks} blocks: {told}")


if __name__ == "__main__":
    main(*sys.argv[1:])
