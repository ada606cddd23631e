"""A thousand rollouts that end within one second, 6 MiB of payload each: how late the event loops turn meanwhile.

`python -m benches.bench_replies [rollouts]`, in its own processes: an env server with two workers, whose environment
ends its episodes on the clock with an answer that the engine gave before (all share one, so that the workers hold
little), a warm arena of 7 GiB, and the orchestrator's own parts in this process. What is told is the lateness of a task
that asks for 10 ms, from the first end to the last adopted reply: a worker and the orchestrator have bars, the server
in between is shown beside them, and a process that does nothing else: what is late there is the machine's. So is most
of what is late of a loop whose turns took little CPU.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from shmrl.arena import Arena
from shmrl.config import EnvServerConfig, RunTree
from shmrl.env import Environment, Episode, Generated, serve_sidecar
from shmrl.env.client import EnvClient
from shmrl.env.model import Conversation, Model
from shmrl.env.threads import in_turn
from shmrl.inference.answers import Generation
from shmrl.monitor.metrics import LAG_TICK_S, LoopLag
from shmrl.orchestrator.admission import Admission
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.dispatcher import Dispatcher
from shmrl.orchestrator.episodes import Episodes
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.replicas import Place, Replica
from shmrl.orchestrator.sinks import TrainSink
from shmrl.orchestrator.sources import Source
from shmrl.types import Task
from tests.support.model_dir import write_model_dir

ROLLOUTS, WORKERS, CAPACITY = 1024, 2, 7 << 30
LAYERS, EXPERTS, TOP_K, TOKENS = 94, 128, 8, 8368  # 8,367 rows x 94 x 8 ids: 6 MiB
SPREAD_S = 1.0
WAITS = {"cpu": "a turn's CPU", "queued": "waiting for a core", "held": "late beyond that"}
BARS_MS = {"orchestrator": 50.0, "worker": 200.0}


class Turns(LoopLag):
    """Lateness, and what the loop's thread did between two looks: seconds on a CPU, and seconds that it could have run
    but another thread of the machine had it (schedstat). What is late beyond both waited for the interpreter's lock, or
    in the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self._late = deque()
        self.cpu: list[float] = []
        self.queued: list[float] = []
        self.worst = (0.0, 0.0, 0.0)

    async def run(self) -> None:
        while True:
            asked, before = time.monotonic(), _scheduled()
            await asyncio.sleep(LAG_TICK_S)
            late = time.monotonic() - asked - LAG_TICK_S
            cpu, queued = (now - then for now, then in zip(_scheduled(), before, strict=True))
            self._late.append(late)
            self.cpu.append(cpu)
            self.queued.append(queued)
            self.worst = max(self.worst, (late, cpu, queued))

    def quantiles_ms(self) -> dict[str, float]:
        found = super().quantiles_ms()
        held = [late - queued for late, queued in zip(self._late, self.queued, strict=True)]
        for name, values in (("cpu", self.cpu), ("queued", self.queued), ("held", held)):
            seconds = sorted(values) or [0.0]
            found |= {f"{name}_p99": 1000 * seconds[int(len(seconds) * 0.99)], f"{name}_max": 1000 * seconds[-1]}
        return found | dict(zip(("worst", "worst_cpu", "worst_queued"), (1000 * s for s in self.worst), strict=True))


def _scheduled() -> tuple[float, float]:
    """Seconds that this thread has run, and waited for a CPU."""
    run_ns, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(run_ns) / 1e9, int(queued_ns) / 1e9


async def idle() -> None:
    """Says how late a loop without work is, when its standard input ends."""
    lag = Turns()
    measuring = asyncio.create_task(lag.run())
    await asyncio.to_thread(sys.stdin.read)
    measuring.cancel()
    print(json.dumps(lag.quantiles_ms()))


class Ending(Environment):
    """Every rollout ends when its turn has come, after the file `directory/start` has said when the first one does."""

    def __init__(self, directory: str, share: int) -> None:
        self.directory, self.share = Path(directory), share  # share: rollouts of this worker
        self.answer = answer()
        self.lag = Turns()
        self.begun: asyncio.Task[None] | None = None
        self.start: asyncio.Future[float] | None = None
        self.waiting = 0

    def tasks(self, split: str) -> Generated:
        return Generated(lambda index: Task(str(index), {}, index))

    async def rollout(self, task: Task, model: Model) -> Episode:
        number, self.waiting = self.waiting, self.waiting + 1
        if self.start is None:
            self.start = asyncio.ensure_future(self._start())
        await asyncio.sleep(max(0.0, await self.start + SPREAD_S * number / self.share - time.monotonic()))
        if self.begun is None:
            self.begun = asyncio.create_task(self.lag.run())
        conversation = Conversation(model._builder())
        await in_turn(conversation.builder.add_turn, [1], self.answer)  # as the model does
        model._record(conversation, [{"role": "assistant", "content": "x"}], TOKENS, TOKENS - 1)
        return Episode(float(number % 3))

    async def _start(self) -> float:
        while not (self.directory / "start").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return float((self.directory / "start").read_text())

    async def teardown(self) -> None:
        (self.directory / f"lag-{os.getpid()}").write_text(json.dumps(self.lag.quantiles_ms()))


def answer() -> Generation:
    """One answer of an engine, with its routing as the engine sends it."""
    drawn = np.random.default_rng(0)
    first = drawn.integers(0, EXPERTS, (TOKENS - 1, LAYERS, 1))
    routing = ((first + np.arange(TOP_K) * (EXPERTS // TOP_K)) % EXPERTS).astype(np.uint8)
    packed = io.BytesIO()
    np.save(packed, routing)
    ids = [int(token) for token in drawn.integers(0, 256, TOKENS - 1)]
    coded = base64.b64encode(packed.getvalue()).decode()
    return Generation(ids, "stop", None, [-0.5] * len(ids), None, coded, None, [("0", 0, len(ids))], "")


def warm(arena: Arena) -> None:
    """Every page is there before the time begins."""
    blocks = []
    for _ in range(CAPACITY // (64 << 20) - 2):
        with arena.reserve(64 << 20, tag="bench/warm/0") as block:
            np.frombuffer(block.buffer, np.uint8)[:] = 1
            blocks.append(block.seal(checksum=False))
    arena.free(blocks)


def run_tree(directory: Path, count: int) -> RunTree:
    """A run over one source, of which all episodes are one batch."""
    source = {"name": "a", "env": {"id": "reverse-text"}, "sampling": {"max_tokens": TOKENS}}
    return RunTree.model_validate(
        {
            "run": {"name": "bench", "output_dir": str(directory)},
            "model": {"path": str(directory)},
            "inference": {"urls": ["http://127.0.0.1:9"], "max_model_len": 2 * TOKENS},
            "orchestrator": {
                "batch_size": count,
                "group_size": 8,
                "max_inflight": count,
                "max_off_policy_steps": 0,
                "seq_len": 2 * TOKENS,
                "train": {"source": [source]},
            },
            "trainer": {"ranks": 1, "sampling_replay": False},
        }
    )


async def until(client: EnvClient, fact: str, value: int) -> None:
    """Wait for a fact of the server's health."""
    while (await client.health())[fact] < value:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def drained(directory: Path, arena: Arena, count: int) -> dict[str, Any]:
    """Start all rollouts, let them end, adopt what comes; the orchestrator's lag, the server's, and the seconds."""
    tree = run_tree(directory, count)
    config = EnvServerConfig.model_validate(
        {
            "env": {"id": "reverse-text"},
            "arena": {"address": arena.address},
            "serve": {"pool": {"workers": WORKERS}, "max_concurrent": count},
        }
    )
    args = {"directory": str(directory), "share": count // WORKERS}
    async with serve_sidecar("benches.bench_replies:Ending", args, config=config) as client:
        await until(client, "ready", WORKERS)
        arenas = Arenas(arena)
        await arenas.join(arena.origin, "", "")
        ledger = Ledger(arenas, 1)
        episodes = Episodes(ledger, tree.run.name, count, count)
        sink = TrainSink(tree, ledger, episodes)
        source = Source(tree, 0, [Replica(client, Place(client.address))], tree.inference.engine_urls)
        admission = Admission(6 << 20, spills=False)
        dispatcher = Dispatcher(tree, [source], episodes, sink, "a", lambda: None, arenas, admission)
        dispatching = asyncio.create_task(dispatcher.run())
        await until(client, "sessions", count)
        lag = Turns()
        start = time.monotonic() + 1.0
        (directory / "start").write_text(str(start))
        await asyncio.sleep(1.0)
        measuring = asyncio.create_task(lag.run())
        control = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benches.bench_replies",
            "idle",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        while sink.pending < count:
            _raise(dispatcher, dispatching)
            await asyncio.sleep(0.02)
        found = {"orchestrator": lag.quantiles_ms(), "seconds": time.monotonic() - start}
        found["server"] = (await client.health())["loop_lag_ms"]
        found["idle"] = json.loads((await control.communicate(b""))[0])
        for task in (measuring, dispatching):
            task.cancel()
        await dispatcher.stop()
        sink.close()
        await episodes.close()
    return found


def _raise(dispatcher: Dispatcher, dispatching: asyncio.Task[None]) -> None:
    """What has gone wrong, if anything has."""
    if dispatching.done():
        dispatching.result()
    if dispatcher.failure is not None:
        raise dispatcher.failure


def main(rollouts: str = str(ROLLOUTS)) -> int:
    """Prints a line per process; 1 if a bar is missed."""
    if rollouts == "idle":
        asyncio.run(idle())
        return 0
    with tempfile.TemporaryDirectory() as made:
        directory, count = Path(made), int(rollouts)
        write_model_dir(directory, num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
        arena = Arena.create(capacity=CAPACITY, run_id="bench")
        try:
            warm(arena)
            found = asyncio.run(drained(directory, arena, count))
            left = arena.stats()["blocks"]
        finally:
            arena.close()
            arena.unlink()
        workers = [json.loads(path.read_text()) for path in directory.glob("lag-*")]
    found["worker"] = max(workers, key=lambda one: one["p99"])
    print(
        f"{count:,} rollouts ended within {SPREAD_S:g} s and were drained after {found['seconds']:.1f} s; {left} left"
    )
    missed = 0
    for name in ("orchestrator", "worker", "server", "idle"):
        lag, bar = found[name], BARS_MS.get(name)
        missed += bar is not None and lag["p99"] >= bar
        told = "" if bar is None else f"(bar {bar:g}: {'held' if lag['p99'] < bar else 'NOT held'})"
        print(f"{name:14} p50 {lag['p50']:8.2f} ms, p99 {lag['p99']:8.2f}, max {lag['max']:8.2f} {told}")
        if "cpu_p99" in lag:
            spread = {what: f"p99 {lag[f'{what}_p99']:.2f} ms, max {lag[f'{what}_max']:.2f}" for what in WAITS}
            print(f"{'':14} " + "; ".join(f"{said}: {spread[what]}" for what, said in WAITS.items()))
            worst = "{worst:.1f} ms, of which {worst_cpu:.1f} of CPU and {worst_queued:.1f} waiting for a core"
            print(f"{'':14} the latest one: " + worst.format(**lag))
    return int(missed > 0 or left > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
