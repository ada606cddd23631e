"""Ray actors in the shape of verl and slime: rollout workers and a trainer on one host, a driver between them passes
batches of references. What Ray moves and pickles are handles; the arrays stay in the arena.

    pip install ray; python configs/examples/embed/ray_worker.py
"""

import numpy as np
import ray
from engine import N, branch
from outcome import fingerprints, report

from shmrl import Arena, assemble, encode, pack

READERS = 2


@ray.remote(num_cpus=0)
class RolloutWorker:
    def __init__(self, address):
        self.arena = Arena.attach(address)

    def generate_sequences(self, ids):
        """verl's DataProto in short: tensors are for the driver to compute with, the rest travels beside them."""
        samples = [encode(self.arena, branch(i), tag=f"embed/reverse/{i // 4}/{i}") for i in ids]
        rewards = np.array([sample.meta["reward"] for sample in samples], np.float32)
        return {"batch": {"rewards": rewards}, "non_tensor_batch": {"payload": samples}}


@ray.remote(num_cpus=0)
class TrainerRank:
    def __init__(self, address, rank):
        self.arena = Arena.attach(address, reader=rank)

    def update_actor(self, micro_batches, handles):
        seen = [digest for micro_batch in micro_batches for digest in fingerprints(assemble(self.arena, micro_batch))]
        for handle in handles:
            self.arena.done(handle)  # the last rank's frees the block
        return seen


def main():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with Arena.create(capacity="64MiB") as arena:
        rollout = [RolloutWorker.remote(arena.address) for _ in range(2)]
        ranks = [TrainerRank.remote(arena.address, rank) for rank in range(READERS)]
        parts = [worker.generate_sequences.remote(range(k, N, 2)) for k, worker in enumerate(rollout)]
        samples = [sample for part in ray.get(parts) for sample in part["non_tensor_batch"]["payload"]]
        handles = [handle for sample in samples for handle in sample.handles]
        arena.adopt(handles)  # the driver's: a worker that dies takes nothing with it
        arena.ship(handles, readers=READERS)
        lists = pack(samples, seq_len=128, num_ranks=READERS)
        updates = [rank.update_actor.remote(mine, handles) for rank, mine in zip(ranks, lists, strict=True)]
        report("ray_worker", [digest for seen in ray.get(updates) for digest in seen], arena)
        arena.unlink()
    ray.shutdown()


if __name__ == "__main__":
    main()
