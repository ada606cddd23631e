"""The hook of an env worker as prime-rl has it: keep(episode) when a training episode ends, discard(episode) when its
reply could not be delivered. Between processes the episode carries 32-byte handles where its arrays were.

    python configs/examples/embed/env_worker.py
"""

import multiprocessing

from engine import N, branch
from outcome import fingerprints, report

from shmrl import Arena, assemble, encode, pack
from shmrl.errors import PayloadError


class Payloads:
    def __init__(self, address):
        self.arena = Arena.attach(address)

    def keep(self, episode):
        """Every branch's arrays into the arena; all of them, or none and the error in the episode."""
        tag = f"embed/reverse/{episode['id']}"
        try:
            episode["samples"] = [encode(self.arena, branch, tag=tag) for branch in episode.pop("branches")]
        except PayloadError as error:
            self.discard(episode)
            episode["error"] = {"type": "PayloadError", "message": str(error)}

    def discard(self, episode):
        self.arena.discard(f"embed/reverse/{episode['id']}")


def worker(address, connection):
    hook = Payloads(address)
    for i in range(N + 1):
        episode = {"id": i, "branches": [branch(i)], "reward": (i % 4) / 3}
        hook.keep(episode)
        connection.send(episode) if i < N else hook.discard(episode)  # the last one is not wanted any more


def main():
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with Arena.create(capacity="64MiB") as arena:
        process = spawn.Process(target=worker, args=(arena.address, theirs))
        process.start()
        samples = [sample for _ in range(N) for sample in ours.recv()["samples"]]
        process.join()
        arena.adopt([handle for sample in samples for handle in sample.handles])
        (micro_batches,) = pack(samples, seq_len=256, num_ranks=1)
        seen = [digest for micro_batch in micro_batches for digest in fingerprints(assemble(arena, micro_batch))]
        arena.free([handle for sample in samples for handle in sample.handles])
        report("env_worker", seen, arena)
        arena.unlink()


if __name__ == "__main__":
    main()
