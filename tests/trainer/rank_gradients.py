"""Run by test_parallel under torch.distributed.run: one step per mode, its gradients written by rank 0.

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
from shmrl.trainer.models import load_policy
from shmrl.trainer.parallel import Ranks, leave
from shmrl.trainer.step import Stepper

MODES = {
    "ddp": {"fsdp": False},
    "fsdp": {"fsdp": True},
    "fsdp_checkpointed": {"fsdp": True, "activation_checkpointing": True},
    "fsdp_bfloat16": {"fsdp": True, "precision": "bfloat16"},
    "ddp_bfloat16": {"precision": "bfloat16"},
}


class Keep(torch.optim.Optimizer):
    """Moves nothing; keeps the gradients it was given."""

    def __init__(self, policy):
        super().__init__(policy.parameters(), {"lr": 0.0})
        self.policy, self.gradients = policy, {}

    def step(self):
        for name, parameter in self.policy.named_parameters():
            grad = parameter.grad
            self.gradients[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


def gradients(tree, ranks, arena, micro_batches):
    """(gradients by parameter, metrics) of one step of this rank's share."""
    policy = load_policy(tree, tree.initial_weights, ranks.device)
    module = ranks.wrap(policy, fsdp=tree.trainer.fsdp, bfloat16=tree.trainer.precision == "bfloat16")
    keep = Keep(policy)
    metrics = Stepper(tree, ranks, arena, policy, module, keep).run(1, micro_batches, lr=0.0)
    return keep.gradients, metrics


def main(toml, batches, out, *modes):
    tree = load_run([Path(toml)])
    ranks = Ranks("cpu")
    mine = micro_batches_from_wire(wire.unpack(Path(batches).read_bytes())[ranks.rank])
    with Arena.attach(tree.arena.address, reader=ranks.rank) as arena:
        for mode in modes:
            changed = tree.model_copy(update={"trainer": tree.trainer.model_copy(update=MODES[mode])})
            result = gradients(changed, ranks, arena, mine)
            if ranks.rank == 0:
                torch.save(result, Path(out) / f"{mode}.pt")
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
