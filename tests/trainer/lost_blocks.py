"""Run by test_lost under torch.distributed.run: one step per mode and case; every rank writes what it computed.

Arguments: run tree (TOML), cases (msgpack: {case: micro batches of every rank}), directory to write to, jobs
"mode-case" with a mode of rank_gradients. In a case called "unseen" rank 1 alone cannot read its last micro batch.
"""

import sys
from pathlib import Path

import torch

from shmrl import wire
from shmrl.arena import Arena
from shmrl.config import load_run
from shmrl.errors import StaleHandle
from shmrl.payload import micro_batches_from_wire
from shmrl.trainer.models import prepare
from shmrl.trainer.parallel import Ranks, leave
from shmrl.trainer.step import Stepper
from tests.trainer.rank_gradients import MODES, Watched


class Blind(Arena):
    """An attachment to which the blocks in `unseen` are gone."""

    unseen = frozenset()

    def get(self, handle, *args, **kwargs):
        if handle in self.unseen:
            raise StaleHandle(f"{handle!r} cannot be read here")
        return super().get(handle, *args, **kwargs)


class Counting(Stepper):
    """Keeps the number of loss tokens that the ranks agreed on."""

    def _assemble(self, step, micro_batches):
        share = super()._assemble(step, micro_batches)
        self.agreed = share.global_tokens
        return share


def main(toml, cases, out, *jobs):
    tree = load_run([Path(toml)])
    ranks = Ranks("cpu")
    given = wire.unpack(Path(cases).read_bytes())
    with Blind.attach(tree.arena.address, reader=ranks.rank) as arena:
        for job in jobs:
            mode, case = job.split("-")
            changed = tree.model_copy(update={"trainer": tree.trainer.model_copy(update=MODES[mode])})
            mine = micro_batches_from_wire(given[case][ranks.rank])
            arena.unseen = frozenset(mine[-1].handles if case == "unseen" and ranks.rank == 1 else ())
            policy, module = prepare(changed, ranks, tree.initial_weights)
            watched = Watched(policy)
            stepper = Counting(changed, ranks, arena, policy, module, watched)
            metrics = stepper.run(1, mine, lr=0.0)
            torch.save((watched.gradients, metrics, stepper.agreed), Path(out) / f"{job}-{ranks.rank}.pt")
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
