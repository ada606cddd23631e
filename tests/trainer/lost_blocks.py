"""Run by test_lost: one step of every job of `rank_gradients` on ranks of their own; each writes what it computed.

In a job called "...unseen" rank 1 alone cannot read its last micro batch.
"""

import os
import sys
from pathlib import Path

import torch

from shmrl.arena import Arena
from shmrl.config import load_run
from shmrl.errors import StaleHandle
from shmrl.payload import micro_batches_from_wire
from shmrl.trainer.parallel import Ranks, leave
from tests.trainer.rank_gradients import Watched, changed, start
from tests.trainer.rank_gradients import main as on_ranks


class Blind(Arena):
    """An attachment to which the blocks in `unseen` are gone."""

    unseen = frozenset()

    def get(self, handle, *args, **kwargs):
        if handle in self.unseen:
            raise StaleHandle(f"{handle!r} cannot be read here")
        return super().get(handle, *args, **kwargs)


def kept(stepper):
    """A list that gets what the ranks agree on in each step."""
    shares, assemble = [], stepper._assemble

    def keep(*args):
        shares.append(assemble(*args))
        return shares[-1]

    stepper._assemble = keep
    return shares


def work(rank, world, port, toml, jobs, out):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    tree = load_run([Path(toml)])
    ranks = Ranks("cpu")
    with Blind.attach(tree.arena.address, reader=rank) as arena:
        for name, trainer, batches in jobs:
            mine = micro_batches_from_wire(batches[rank])
            arena.unseen = frozenset(mine[-1].handles if name.endswith("unseen") and rank == 1 else ())
            _, stepper = start(changed(tree, Path(out) / name, trainer), ranks, arena, Watched)
            shares = kept(stepper)
            metrics = stepper.run(1, mine, lr=0.0)
            found = {"gradients": stepper.optimizer.gradients, "metrics": metrics, "tokens": shares[0].global_tokens}
            torch.save(found, Path(out) / f"{name}-{rank}.pt")
    ranks.close()
    leave(0)


if __name__ == "__main__":
    on_ranks(*sys.argv[1:], work=work)
