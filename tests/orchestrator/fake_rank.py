"""A trainer rank without a model: assembles every micro batch for real, says done, publishes and reports.

Run as `python -m tests.orchestrator.fake_rank RESOLVED.toml RANK STEP [PATIENCE_S]`; writes what it assembled to
rank_<r>.jsonl. Micro batches that are lost it drops alone: there is nothing to agree on.
"""

import json
import sys
from pathlib import Path

import zmq

from shmrl import wire
from shmrl.arena import Arena
from shmrl.config import load_run
from shmrl.errors import LostPayload
from shmrl.node import client
from shmrl.node.blocks import StepBlocks
from shmrl.node.host import read_token
from shmrl.payload import assemble, micro_batches_from_wire


def main(file, rank, step):
    tree = load_run([Path(file)])
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(tree.trainer_address)

    def say(**message):
        socket.send(wire.pack(message))

    state = {}
    with Arena.attach(tree.arena.address, reader=rank) as arena:
        blocks = StepBlocks(arena, rank, tree.arena, tree.node, read_token(tree.arena))
        say(
            kind="hello",
            rank=rank,
            world=tree.trainer.ranks,
            token=read_token(tree.arena),
            origin=arena.origin,
            step=step,
            phase="saved" if step else "new",
            report=None,
            sender=None,
        )
        while (message := wire.unpack(socket.recv()))["kind"] != "finish":
            kind = message["kind"]
            if kind == "begin":
                step = message["version"]
                if rank == 0:
                    say(kind="published", version=step, path=str(tree.weights_dir(step)))
                continue
            micro_batches = micro_batches_from_wire(message["micro_batches"])
            here = blocks.here(micro_batches, message.get("nodes", {}))
            read = {n: batch for n, micro in enumerate(here) if (batch := readable(arena, micro))}
            record(tree, rank, message, [micro_batches[n] for n in read], list(read.values()))
            blocks.done(micro_batches)
            if kind == "step":
                step, state = message["step"], message["state"]
            if rank == 0:
                if kind == "step":
                    say(kind="published", version=step, path=str(tree.weights_dir(step)))
                mode = "train" if kind == "step" else "warmup"
                metrics = {"train/loss": 0.5, "payload/dropped_micro_batches": len(micro_batches) - len(read)}
                say(kind="report", step=message["step"], mode=mode, metrics=metrics)
        blocks.close()
    if rank == 0 and step:
        directory = tree.run.output_dir / "checkpoints" / f"step_{step}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "orchestrator.json").write_text(json.dumps(state))
    context.destroy(linger=1000)


def readable(arena, micro):
    try:
        return assemble(arena, micro, verify=True)
    except LostPayload:
        return None


def record(tree, rank, message, micro_batches, batches):
    samples = [sample for micro in micro_batches for sample in micro.samples]
    line = {
        "kind": message["kind"],
        "step": message["step"],
        "nbytes": len(wire.pack(message)),
        "nodes": sorted(message.get("nodes", {})),
        "micro_batches": len(micro_batches),
        "loss_tokens": message["loss_tokens"],
        "assembled_loss_tokens": sum(int(batch.loss_mask.sum()) for batch in batches),
        "advantages": [sample.advantage for sample in samples],
        "lags": [message["step"] - 1 - sample.meta["version_start"] for sample in samples],
        "sources": [sample.meta["source"] for sample in samples],
        "fields": sorted({field for sample in samples for field in sample.fields}),
    }
    with (tree.run.output_dir / f"rank_{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 4:
        client.PATIENCE_S = float(sys.argv[4])
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
