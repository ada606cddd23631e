"""What a GPU adds: copies out of the arena, registered or not; copies beside compute; whole steps with and without.

`python -m benches.gpu`, two minutes on one GPU. Without CUDA everything runs on the CPU, much smaller: that shows that
it works, and the figures say nothing.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from shmrl.arena import Arena
from shmrl.arena.pinning import Pinned
from shmrl.config import load_run
from shmrl.payload.torch_adapter import view_to_torch
from shmrl.trainer import fake
from shmrl.trainer.models import prepare
from shmrl.trainer.parallel import Ranks
from shmrl.trainer.step import Stepper
from shmrl.trainer.transfer import at_once, sender
from shmrl.types import MicroBatch

CUDA = torch.cuda.is_available()
MIB = 1 << 20
ROOT = Path(__file__).parents[1]
ROUNDS = 7
STEP = {  # what `shmrl trainer --fake-data` would be given
    "run.max_steps": 6,
    "inference.max_model_len": 4096 if CUDA else 64,
    "orchestrator.seq_len": 16384 if CUDA else 256,
    "orchestrator.batch_size": 64 if CUDA else 16,
    "model.tiny.max_positions": 4096,
    "trainer.ranks": 1,
    "trainer.head": 64,
    "trainer.device": "cuda" if CUDA else "cpu",
    "inference.device": "cuda" if CUDA else "cpu",
}
SHAPE = {"layers": 16, "hidden": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "experts": 128, "top_k": 8}


def main() -> None:
    ranks = Ranks("cuda" if CUDA else "cpu")
    print(f"on {torch.cuda.get_device_name() if CUDA else 'a CPU: the figures say nothing'}")
    bandwidth(ranks.device)
    overlap(ranks.device)
    steps(ranks)
    ranks.close()


def timed(call: Callable[[], object]) -> float:
    """Median seconds of a call, everything it launched included; the first one does not count."""
    taken = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        call()
        if CUDA:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def bandwidth(device: torch.device) -> None:
    """A block to the device, as `view_to_torch` copies it, beside torch's own page-locked memory."""
    nbytes = (1024 if CUDA else 16) * MIB
    print(f"\n{nbytes // MIB} MiB from the host to the device, GB/s")
    with Arena.create(nbytes + 64 * MIB) as arena, Pinned(arena) as pinned:
        handle = arena.put(np.ones(nbytes, np.uint8))
        with arena.get(handle) as view:

            def copy() -> object:
                return view_to_torch(view, np.uint8, device)

            plain = timed(copy)
            pinned.extend()
            registered = timed(copy)
        own = torch.ones(nbytes, dtype=torch.uint8, pin_memory=CUDA)
        best = timed(lambda: own.to(device, non_blocking=True, copy=True))
        for what, took in (("arena", plain), ("arena, registered", registered), ("page-locked by torch", best)):
            print(f"  {what:24} {nbytes / took / 1e9:8.1f}   {plain / took:5.2f} x the first")
        arena.free(handle)
        arena.unlink()


def overlap(device: torch.device) -> None:
    """How much of a micro batch's way to the device disappears behind products that take about as long."""
    routes = np.ones(((256 if CUDA else 4) * MIB,), np.int8)
    x = torch.ones(4096 if CUDA else 256, 4096 if CUDA else 256, device=device)
    print(f"\n{routes.nbytes // MIB} MiB beside compute, ms")
    for what, send in (("on the side stream", sender(device)), ("at once", functools.partial(at_once, device))):
        copying = timed(lambda send=send: send({"routes": routes}))
        product = timed(lambda: x @ x)
        count = max(round(copying / product), 1)

        def compute(count: int = count) -> None:
            for _ in range(count):
                torch.mm(x, x)

        computing = timed(compute)
        both = timed(lambda send=send, compute=compute: (compute(), send({"routes": routes})))
        hidden = (copying + computing - both) / min(copying, computing)
        print(
            f"  {what:24} copy {copying * 1e3:8.2f}, compute {computing * 1e3:8.2f}, both {both * 1e3:8.2f}: "
            f"{hidden:4.0%} of the shorter is hidden"
        )


def steps(ranks: Ranks) -> None:
    """Steps on invented episodes with routing, heads and masks, with the side stream and without, in turn."""
    with tempfile.TemporaryDirectory() as directory:
        shape = {f"model.tiny.{name}": value for name, value in SHAPE.items()} if CUDA else {}
        flags = {"run.output_dir": directory, **STEP, **shape}
        tree = load_run([ROOT / "configs" / "reverse-text.toml"], {key: str(value) for key, value in flags.items()})
        with fake.model(tree, ranks) as path, fake.episodes(tree, ranks) as (arena, micro_batches):
            policy, module = prepare(tree, ranks, path)
            optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)

            def stepper() -> Stepper:
                return Stepper(tree, ranks, arena, policy, module, optimizer)

            beside = stepper()
            with mock.patch("shmrl.trainer.inputs.sender", lambda device: functools.partial(at_once, device)):
                plain = stepper()
            tokens = sum(batch.num_tokens for batch in micro_batches)
            print(f"\na step of {tokens:,} tokens in {len(micro_batches)} micro batches, s")
            taken = [
                [_train_s(one, step, micro_batches) for one in (beside, plain)]
                for step in range(1, tree.run.max_steps + 1)
            ]
        medians = [statistics.median(times) for times in zip(*taken[1:], strict=True)]
        ratio = statistics.median(a / b for a, b in taken[1:])
        for what, took in zip(("on the side stream", "at once"), medians, strict=True):
            print(f"  {what:24} {took:8.3f}")
        print(f"  ratio within a pair      {ratio:8.3f}")


def _train_s(stepper: Stepper, step: int, micro_batches: list[MicroBatch]) -> float:
    """Seconds of forward, backward and update; assembly, which both do alike, is left out."""
    return stepper.run(step, micro_batches, lr=0.0)["time/train"]


if __name__ == "__main__":
    main()
