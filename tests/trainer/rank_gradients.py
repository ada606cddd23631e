"""Run by test_parallel under torch.distributed.run: five SGD steps per mode, written by rank 0.

Arguments: run tree (TOML), micro batches of every rank (msgpack), directory to write to, modes (ddp, fsdp, ...).
"""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shmrl import wire
from shmrl.arena import Arena
from shmrl.config import load_run
from shmrl.payload import micro_batches_from_wire
from shmrl.trainer.models import prepare
from shmrl.trainer.parallel import Ranks, leave
from shmrl.trainer.step import Stepper

MODES = {
    "ddp": {"fsdp": False},
    "fsdp": {"fsdp": True},
    "fsdp_checkpointed": {"fsdp": True, "activation_checkpointing": True},
    "fsdp_bfloat16": {"fsdp": True, "precision": "bfloat16"},
    "fsdp_offloaded": {"fsdp": True, "cpu_offload": True},
    "ddp_bfloat16": {"precision": "bfloat16"},
    "ddp_context": {"context_parallel": 2},
    "fsdp_context": {"context_parallel": 2, "fsdp": True},
    "fsdp_context_checkpointed": {"context_parallel": 2, "fsdp": True, "activation_checkpointing": True},
}
STEPS, LR = 5, 0.02


class Watched(torch.optim.SGD):
    """Keeps the gradients of its first step."""

    def __init__(self, policy):
        super().__init__(policy.parameters(), lr=0.0)
        self.policy, self.gradients = policy, None

    def step(self):
        if self.gradients is None:
            self.gradients = whole((name, p.grad) for name, p in self.policy.named_parameters())
        super().step()


def whole(tensors):
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors}


def train(tree, ranks, arena, micro_batches):
    """(gradients and metrics of the first step, parameters after the last) of this rank's share, five times over."""
    policy, module = prepare(tree, ranks, tree.initial_weights)
    watched = Watched(policy)
    stepper = Stepper(tree, ranks, arena, policy, module, watched)
    metrics = [stepper.run(step, micro_batches, lr=LR) for step in range(1, STEPS + 1)]
    return watched.gradients, metrics[0], whole(policy.named_parameters())


def main(toml, batches, out, *modes):
    tree = load_run([Path(toml)])
    ranks = Ranks("cpu")
    mine = micro_batches_from_wire(wire.unpack(Path(batches).read_bytes())[ranks.rank])
    with Arena.attach(tree.arena.address, reader=ranks.rank) as arena:
        for mode in modes:
            changed = tree.model_copy(update={"trainer": tree.trainer.model_copy(update=MODES[mode])})
            result = train(changed, ranks, arena, mine)
            if ranks.rank == 0:
                torch.save(result, Path(out) / f"{mode}.pt")
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
