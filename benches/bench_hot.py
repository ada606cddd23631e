"""What a get, and a reserve with its seal, cost: hot, over many blocks in random order, and whatever the size.

`python -m benches.bench_hot`. Reader and writer are two attachments of one process; another process's would read the
same words. A 1 GiB block is committed once. put beside memcpy is in `python -m benches.peers`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benches.figures import HEAD, row
from shmrl.arena import Arena, Handle

BLOCKS = 60_000
GIB = 1 << 30
CHUNK = 50  # gets between two looks at the clock


def gets(reader: Arena, handles: Sequence[Handle]) -> float:
    """Seconds per get + np.frombuffer + drop."""
    get, frombuffer, uint8 = reader.get, np.frombuffer, np.uint8
    began = time.perf_counter()
    for handle in handles:
        frombuffer(get(handle), uint8)
    return (time.perf_counter() - began) / len(handles)


def in_chunks(reader: Arena, handles: Sequence[Handle]) -> list[float]:
    """Seconds per get of every CHUNK in turn."""
    return [gets(reader, handles[at : at + CHUNK]) for at in range(0, len(handles), CHUNK)]


def seals(arena: Arena, nbytes: int, rounds: int) -> list[float]:
    """Seconds of each reserve + seal without checksums; each block is freed before the next one, outside the time."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        handle = arena.reserve(nbytes, tag="bench/source/group/episode").seal(checksum=False)
        times.append(time.perf_counter() - began)
        arena.free(handle)
    return times[rounds // 10 :]


def reading(arena: Arena, reader: Arena) -> None:
    """get + np.frombuffer."""
    small = arena.put(np.zeros(4096, np.uint8))
    print(row("get + frombuffer, one 4 KiB block", in_chunks(reader, [small] * 20_000), 1.2, 1e-6))
    many = [arena.put(np.zeros(4096, np.uint8), tag="bench/many") for _ in range(BLOCKS)]
    random.Random(0).shuffle(many)
    in_chunks(reader, many)
    print(row(f"get + frombuffer, {BLOCKS:,} blocks in random order", in_chunks(reader, many), 3, 1e-6))
    arena.free(many)
    large = arena.reserve(GIB).seal(checksum=False)
    pairs = [(gets(reader, [small] * CHUNK), gets(reader, [large] * CHUNK)) for _ in range(1000)]
    p10 = [statistics.quantiles(one, n=10)[0] for one in zip(*pairs, strict=True)]
    told = f"{p10[0] * 1e6:.3f} and {p10[1] * 1e6:.3f} us, ratio {p10[1] / p10[0]:.3f} (0.9 to 1.1)"
    print(f"get of 4 KiB and 1 GiB in turn, p10: {told}")
    arena.free([small, large])


def main() -> None:
    print(HEAD)
    with Arena.create("1536MiB") as arena, Arena.attach(arena.address) as reader:
        reading(arena, reader)
        for name, nbytes in (("0 B", 0), ("4 KiB", 4096), ("6.3 MB", 6_291_456), ("1 GiB", GIB)):
            print(row(f"reserve + seal(checksum=False), {name}", seals(arena, nbytes, 10_000), 2, 1e-6))
        arena.unlink()


if __name__ == "__main__":
    main()
