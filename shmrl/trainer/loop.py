"""The life of one trainer rank: load, hello, warm-up, begin, steps, finish.

Started once per rank by `python -m torch.distributed.run ... -m shmrl trainer`. The orchestrator leads: every action
here answers one of its messages. Rank 0 publishes weights, writes checkpoints and reports. A rank that was restarted
stands at its last checkpoint: the orchestrator sends it the steps since then once more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch

from shmrl.arena import Arena
from shmrl.arena.pinning import Pinned
from shmrl.config import RunTree
from shmrl.config.rundir import latest_checkpoint
from shmrl.config.training import Trainer
from shmrl.errors import RunError
from shmrl.inference.vllm.plugin.shmrl_broadcast import Sender
from shmrl.monitor import exposition
from shmrl.node.host import read_token, require_arena
from shmrl.node.published import Addresses
from shmrl.payload import micro_batches_from_wire
from shmrl.trainer import checkpoint, lora, weights
from shmrl.trainer.link import OrchestratorLink
from shmrl.trainer.models import prepare
from shmrl.trainer.parallel import Ranks, full_state
from shmrl.trainer.step import Stepper
from shmrl.types import MicroBatch

log = logging.getLogger(__name__)


def main(tree: RunTree, resume: bool) -> int:
    """Run this rank until the orchestrator says finish; 0 then. ShmrlError when the run cannot go on."""
    # A rank that waits in a collective runs no Python handler: the kernel's default ends it at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    address = require_arena(tree.arena)
    torch.manual_seed(tree.run.seed)
    ranks = Ranks(tree.trainer.device)
    if ranks.world != tree.trainer.ranks:
        raise RunError(f"trainer.ranks = {tree.trainer.ranks}, but {ranks.world} ranks were started")
    with Arena.attach(address, reader=ranks.rank) as arena:
        trainer = RankLoop(tree, ranks, arena, resume)
        trainer.serve()
    ranks.close()
    return 0


def _orchestrator(tree: RunTree) -> str:
    """Where the orchestrator is; on another node it says so itself. RunError when it does not in time."""
    if tree.trainer_address.startswith("ipc://"):
        return tree.trainer_address
    assert tree.job is not None
    addresses, timeout_s = Addresses(tree.job), tree.orchestrator.connect_timeout_s
    waiting = addresses.awaited(lambda: addresses.of("trainer"), 1, timeout_s, "orchestrators")
    return asyncio.run(waiting)[0].address


class RankLoop:
    """One rank's state between messages: the policy, its optimizer, and how many steps are complete."""

    def __init__(self, tree: RunTree, ranks: Ranks, arena: Arena, resume: bool) -> None:
        self._tree, self._ranks = tree, ranks
        self._origin = arena.origin
        self._pinned = Pinned(arena) if ranks.device.type == "cuda" else None
        saved = latest_checkpoint(tree.run.output_dir) if resume else None
        self.step = saved or 0
        self._source = tree.initial_weights  # of tokenizer files: a checkpoint may be pruned while this rank lives
        frozen = tree.trainer.lora is not None  # the model itself; a checkpoint's has the adapters merged in
        start = tree.initial_weights if saved is None or frozen else checkpoint.checkpoint_dir(tree, saved)
        self._policy, module = prepare(tree, ranks, start)
        self._stepper = Stepper(tree, ranks, arena, self._policy, module, self._new_optimizer())
        self._phase = "new" if saved is None else "saved"  # wire.py says which there are
        self._metrics: dict[str, float] = {}  # of the last step
        if saved is not None:
            self._metrics = checkpoint.restore(tree, ranks, saved, self._policy, self._stepper.optimizer)
        exposition.also(lambda: {"trainer/step": self.step, **self._metrics})
        self._saved = self.step
        self._state: dict[str, Any] = {}  # the orchestrator's part of the next checkpoint
        self._token = read_token(tree.arena)
        broadcasts = ranks.rank == 0 and tree.inference.weight_transfer == "broadcast"
        self._sender = Sender(ranks.device) if broadcasts else None
        patience_s, returning = tree.orchestrator.connect_timeout_s, tree.run.restarts.orchestrator > 0
        given_up = None if tree.job is None else tree.given_up
        self._link = OrchestratorLink(
            _orchestrator(tree), self._hello, patience_s, returning=returning, given_up=given_up
        )

    def _hello(self) -> dict[str, Any]:
        """Who this is and where it stands; rank 0 repeats its last report, which may have been lost with a process."""
        report = None
        if self._ranks.rank == 0 and self.step:
            report = {"path": str(self._tree.published_dir(self.step)), "metrics": self._metrics}
        who = {"rank": self._ranks.rank, "world": self._ranks.world, "token": self._token, "origin": self._origin}
        stands = {"step": self.step, "phase": self._phase, "report": report}
        return {"kind": "hello", **who, **stands, "sender": self._sender and self._sender.port}

    def _new_optimizer(self) -> torch.optim.AdamW:
        o = self._tree.trainer.optimizer
        trained = [parameter for parameter in self._policy.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, foreach=True)

    def serve(self) -> None:
        """Answer messages until `finish`."""
        handlers = {"warmup": self._warm_up, "begin": self._begin, "step": self._step}
        try:
            while (message := self._next())["kind"] != "finish":
                if message["kind"] not in handlers:
                    raise RunError(f"the orchestrator sent {message['kind']!r}, expected one of {sorted(handlers)}")
                handlers[message["kind"]](message)
            self._save()
            self._link.send({"kind": "finished", "rank": self._ranks.rank})
        finally:
            self._link.close()
            if self._sender is not None:
                self._sender.close()
            self._stepper.close()
            if self._pinned is not None:
                self._pinned.close()

    def _next(self) -> dict[str, Any]:
        """The next message. Where the launcher grants the time, the last step is saved when there will be none."""
        try:
            return self._link.receive()
        except RunError:
            if self._tree.job is not None:
                self._save()
            raise

    # ------------------------------------------------------------------------------------------------------ messages

    def _warm_up(self, message: dict[str, Any]) -> None:
        if self._phase not in ("new", "warming"):
            raise RunError(f"a warm-up step arrived after step {self.step}")
        self._phase = "warming"
        nodes = message.get("nodes", {})
        metrics = self._stepper.run(
            message["step"], _batches(message), lr=self._tree.warmup.lr, warmup=True, nodes=nodes
        )
        self._report(message["step"], "warmup", metrics)

    def _begin(self, message: dict[str, Any]) -> None:
        """Publish the version the run starts from; a warm-up's optimizer ends with it. What a warm-up made is saved
        where the trainer may have to go back to it."""
        if message["version"] != self.step:
            raise RunError(
                f"the orchestrator begins at version {message['version']}, the trainer holds step {self.step}"
            )
        warmed = self._phase == "warming"
        if warmed:
            self._stepper.optimizer = self._new_optimizer()
        target = self._tree.published_dir(self.step)
        if warmed or not target.exists():
            target = self._tree.initial_weights if self._phase == "new" else self._publish()
        self._phase, self._state = "begun", message["state"]
        if warmed and self._tree.run.restarts.trainer:
            self._checkpoint()
        self._announce(target)

    def _step(self, message: dict[str, Any]) -> None:
        step = message["step"]
        if step != self.step + 1:
            raise RunError(f"step {step} arrived after step {self.step}")
        if self._pinned is not None:
            self._pinned.extend()
        lr = learning_rate(self._tree.trainer, self._tree.run.max_steps, step)
        metrics = self._stepper.run(step, _batches(message), lr=lr, nodes=message.get("nodes", {}))
        self.step, self._phase, self._state, self._metrics = step, "begun", message["state"], metrics
        began = time.monotonic()
        self._announce(self._publish())
        metrics["time/publish"] = time.monotonic() - began
        interval = self._tree.trainer.checkpoint.interval
        if interval and step % interval == 0:
            self._save()
        if self._ranks.rank == 0:
            weights.prune(self._tree, self.step)
        self._report(step, "train", metrics)

    def _report(self, step: int, mode: str, metrics: dict[str, float]) -> None:
        if self._ranks.rank == 0:
            self._link.send({"kind": "report", "step": step, "mode": mode, "metrics": metrics})

    def _announce(self, path: Path) -> None:
        if self._ranks.rank == 0:
            self._link.send({"kind": "published", "version": self.step, "path": str(path)})

    # ------------------------------------------------------------------------------------------------------- effects

    def _publish(self) -> Path:
        """Write the current version on rank 0; every rank takes part in gathering it."""
        state = full_state(self._policy.lm, keep=self._ranks.rank == 0)
        if self._ranks.rank:
            return self._tree.published_dir(self.step)
        merged, _ = lora.split(state, self._tree.trainer.lora)
        return weights.publish(self._tree, self.step, self._policy.lm, merged, self._source)

    def _save(self) -> None:
        """Checkpoint the current step, once; step 0 is where every run starts anyway."""
        if self.step != self._saved:
            self._checkpoint()

    def _checkpoint(self) -> None:
        began = time.monotonic()
        checkpoint.save(
            self._tree,
            self._ranks,
            self.step,
            self._policy,
            full_state(self._policy.lm, keep=self._ranks.rank == 0),
            self._stepper.optimizer,
            self._state,
            self._source,
            self._metrics,
        )
        self._saved = self.step
        if self._ranks.rank == 0:
            log.info("checkpoint of step %d in %.1f s", self.step, time.monotonic() - began)


def learning_rate(trainer: Trainer, max_steps: int, step: int) -> float:
    """Of step 1 .. max_steps: a linear rise, then constant, or linear or cosine down to min_ratio of the peak."""
    schedule, peak = trainer.scheduler, trainer.optimizer.lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    last = max_steps - schedule.warmup_steps - 1
    done = min((step - schedule.warmup_steps - 1) / max(last, 1), 1.0)
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule.kind]
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * falling)


def _batches(message: dict[str, Any]) -> list[MicroBatch]:
    return micro_batches_from_wire(message["micro_batches"])
