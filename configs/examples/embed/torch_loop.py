"""A training loop of plain torch: a worker process writes what was generated, this one trains on it with router replay.

python configs/examples/embed/torch_loop.py
"""

import multiprocessing

import torch
from engine import N, branch
from model import tiny_model
from outcome import fingerprints, report
from torch.nn.functional import cross_entropy

from shmrl import Arena, assemble, encode, pack
from shmrl.trainer.replay import RouterReplay


def worker(address, queue):
    with Arena.attach(address) as arena:
        for i in range(N):
            queue.put(encode(arena, branch(i), tag=f"embed/reverse/0/{i}"))  # some hundred bytes, whatever the length


def main():
    model = tiny_model()
    replay = RouterReplay(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    spawn = multiprocessing.get_context("spawn")
    queue, seen, batch = spawn.Queue(), [], None
    with Arena.create(capacity="64MiB") as arena:
        process = spawn.Process(target=worker, args=(arena.address, queue))
        process.start()
        samples = [queue.get(timeout=60) for _ in range(N)]
        process.join()
        arena.adopt([handle for sample in samples for handle in sample.handles])  # the worker's until now
        (micro_batches,) = pack(samples, seq_len=128, num_ranks=1)
        for micro_batch in micro_batches:
            batch = assemble(arena, micro_batch, out=batch)  # one copy, into the buffers of the batch before
            seen += fingerprints(batch)
            tensors = batch.torch()
            routes = torch.from_numpy(batch.routing_signed("int64"))  # -1 where no route was recorded
            with replay.routes(routes):
                positions = tensors.positions[None]  # starts again with each sequence: transformers masks by it
                logits = model(tensors.tokens[None], position_ids=positions).logits[0]
            sampled = tensors.loss_mask
            loss = cross_entropy(logits[:-1][sampled[1:]], tensors.tokens[sampled])
            loss.backward()
            print(f"{len(tensors.seq_lens)} sequences, {len(routes)} tokens, loss {loss.item():.3f}")
        optimizer.step()
        arena.free([handle for sample in samples for handle in sample.handles])
        report("torch_loop", seen, arena)
        arena.unlink()


if __name__ == "__main__":
    main()
