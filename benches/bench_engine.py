"""The embedded engine over HTTP: 16 requests at once against the same 16 one after another, in one server process.

`pytest benches/bench_engine.py --benchmark-only`; extra_info holds tokens per second and the ratio of the two times.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shmrl.config import TinyModel
from shmrl.inference.client import EngineClient
from shmrl.inference.embedded.tiny import write_tiny

REQUESTS, TOKENS = 16, 64
KINDS = {"plain": {}, "heads and masks": {"logprobs": 16, "top_k": 64, "top_p": 0.95}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny(TinyModel(vocab=512, initializer_range=0.2), tmp_path_factory.mktemp("model") / "step_0", seed=0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "shmrl.inference.embedded.server", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen([*command, "--max-logprobs", "64"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


@pytest.mark.parametrize("kind", list(KINDS))
def test_16_at_once_and_one_by_one(benchmark: Any, url: str, kind: str) -> None:
    times = asyncio.run(measure(url, KINDS[kind], at_once=False))
    benchmark.pedantic(lambda: asyncio.run(measure(url, KINDS[kind], at_once=True)), rounds=3)
    best = benchmark.stats.stats.min
    benchmark.extra_info.update(ratio=times / best, tokens_per_s=REQUESTS * TOKENS / best)
    assert times / best >= 3


async def measure(url: str, sampling: dict[str, Any], *, at_once: bool) -> float:
    async with EngineClient([url]) as client:
        await client.health(60)

        async def ask(i: int) -> None:
            prompt = [1 + (i * 7 + j) % 250 for j in range(32)]
            await client.generate(prompt, {"max_tokens": TOKENS, "seed": i, "ignore_eos": True, **sampling})

        start = time.perf_counter()
        if at_once:
            await asyncio.gather(*(ask(i) for i in range(REQUESTS)))
        else:
            for i in range(REQUESTS):
                await ask(i)
        return time.perf_counter() - start
