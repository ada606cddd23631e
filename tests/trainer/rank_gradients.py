"""Run by test_parallel: optimizer steps of every job on ranks of their own processes, written by rank 0. `lost_blocks`
gives them other work.

Arguments: run tree (TOML), jobs (msgpack), directory to write to. A job is its name, the keys of [trainer] it changes
and the micro batches of every rank. Ranks are forked off one process that has imported everything, once per world size:
importing takes longer than the steps.
"""

import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from shmrl import wire
from shmrl.arena import Arena
from shmrl.config import Loss, load_run
from shmrl.config.training import Lora
from shmrl.payload import micro_batches_from_wire
from shmrl.trainer import checkpoint, models
from shmrl.trainer.losses import LossOutput
from shmrl.trainer.models import prepare
from shmrl.trainer.parallel import Ranks, full_state, leave
from shmrl.trainer.step import Stepper

STEPS, LR = 5, 0.02
TABLES = {"loss": Loss, "lora": Lora}


class Watched(torch.optim.SGD):
    """Keeps the gradients of its first step."""

    def __init__(self, policy):
        self.trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        super().__init__(self.trained.values(), lr=0.0)
        self.gradients = None

    def step(self):
        if self.gradients is None:
            self.gradients = {name: whole(p.grad) for name, p in self.trained.items()}
        super().step()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def start(tree, ranks, arena, make_optimizer):
    """(policy, stepper) from the run's first weights, with the same adapters every time."""
    torch.manual_seed(tree.run.seed)
    policy, module = prepare(tree, ranks, tree.initial_weights)
    return policy, Stepper(tree, ranks, arena, policy, module, make_optimizer(policy))


def train(tree, ranks, arena, micro_batches):
    """This rank's share, STEPS times over: gradients and metrics of the first step, weights after the last."""
    policy, stepper = start(tree, ranks, arena, Watched)
    metrics = [stepper.run(step, micro_batches, lr=LR) for step in range(1, STEPS + 1)]
    weights = full_state(policy.lm)
    return SimpleNamespace(gradients=stepper.optimizer.gradients, metrics=metrics[0], weights=weights)


def resume(tree, ranks, arena, micro_batches):
    """The weights in a checkpoint after two steps, after a third, and after a third of ranks that came back from it."""

    def adam(policy):
        return torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.0)

    policy, stepper = start(tree, ranks, arena, adam)
    for step in (1, 2):
        stepper.run(step, micro_batches, lr=LR)
    saved = {name: value.clone() for name, value in full_state(policy.lm).items()}
    checkpoint.save(tree, ranks, 2, policy, saved, stepper.optimizer, {}, tree.initial_weights, {})
    stepper.run(3, micro_batches, lr=LR)
    straight = full_state(policy.lm)
    again, fresh = start(tree, ranks, arena, adam)
    checkpoint.restore(tree, ranks, 2, again, fresh.optimizer)
    fresh.run(3, micro_batches, lr=LR)
    return SimpleNamespace(saved=saved, straight=straight, resumed=full_state(again.lm))


def by_place(x, seen=None):
    """A custom loss: a token counts the more the later it stands in its sequence. `seen`: directory for what it saw."""
    places = x.batch.positions[x.positions]
    if seen is not None and x.step == 1:
        torch.save((x.batch, x.positions, x.meta), f"{seen}/{x.micro_batch}-{x.rank}.pt")
    loss = -(x.advantages * places / 64 * x.logprobs).sum()
    return LossOutput(loss, torch.zeros_like(x.logprobs, dtype=torch.bool))


def changed(tree, directory, trainer: dict[str, Any]):
    """The tree of one job. Not validated: offloading works on a CPU too, where it is refused as pointless."""
    trainer = {key: TABLES[key](**value) if key in TABLES else value for key, value in trainer.items()}
    update = {
        "trainer": tree.trainer.model_copy(update=trainer),
        "run": tree.run.model_copy(update={"output_dir": directory}),
    }
    return tree.model_copy(update=update)


def work(rank, world, port, toml, jobs, out):
    """One rank of the jobs that have so many."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    models.compile_layers = functools.partial(models.compile_layers, backend="eager")  # kernels take minutes
    tree = load_run([Path(toml)])
    ranks = Ranks("cpu")
    with Arena.attach(tree.arena.address, reader=rank) as arena:
        for name, trainer, batches in jobs:
            run = resume if name.endswith("resumed") else train
            mine = micro_batches_from_wire(batches[rank])
            found = run(changed(tree, Path(out) / name, trainer), ranks, arena, mine)
            if rank == 0:
                torch.save(vars(found), Path(out) / f"{name}.pt")
    ranks.close()
    leave(0)


def main(toml, jobs, out, work=work):
    jobs = wire.unpack(Path(jobs).read_bytes())
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # ranks meet at a store of this process
    for world in sorted({len(batches) for _, _, batches in jobs}):
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        mine = [job for job in jobs if len(job[2]) == world]
        start_processes(work, (world, store.port, toml, mine, out), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
