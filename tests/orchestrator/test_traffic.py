"""What a step of a real run costs the orchestrator's sockets: references alone, whichever nodes the blocks are on."""

import os

from shmrl import wire
from shmrl.env.protocol import episode_to_wire
from shmrl.payload import micro_batches_to_wire, pack
from shmrl.types import EpisodeResult, Handle, Sample

N, TOKENS, RANKS, NODES = 1024, 16_000, 8, 4
NBYTES = TOKENS * 384  # routing of 48 layers, top-8
HEADS = 400  # of an HTTP request and its answer


def of(number):
    """Sample `number`, as `encode` makes one."""
    nonce = os.urandom(8)
    handle = Handle.pack(node=7 + number % NODES, arena=9, slot=number, generation=1, nbytes=NBYTES, nonce=nonce)
    meta = {
        "source": "reverse-text", "group": f"a3f1-{number // 8}", "episode": str(number % 8), "branch": 0,
        "task": f"train-{number // 8}", "reward": number / N, "version_start": 41, "version_end": 42,
        "stop_reason": "stop", "logprobs_mode": "processed", "temperature": 1.0, "top_p": 0.95, "top_k": 64,
        "shapes": {"routing": (48, 8, 128), "head": (128,), "mask": ()},
    }  # fmt: skip
    return Sample(
        ((handle, 0, TOKENS),), TOKENS, TOKENS // 2, TOKENS - 1, ("routing", "head", "mask"), meta, 0.25 - number / N
    )


def test_a_step_of_1024_samples_of_16k_tokens_is_below_one_mebibyte():
    samples = [of(number) for number in range(N)]
    replies = [
        wire.pack(episode_to_wire(EpisodeResult(True, s.meta["task"], reward=s.meta["reward"], samples=(s,))))
        for s in samples
    ]
    nodes = {handle.origin: "http://10.77.0.12:40001" for s in samples[:NODES] for handle in s.handles}
    ranks = pack(samples, seq_len=TOKENS, num_ranks=RANKS)
    common = {"kind": "step", "step": 43, "run_id": "run", "loss_tokens": N * TOKENS // 2, "state": {}, "nodes": nodes}
    messages = [wire.pack({**common, "micro_batches": micro_batches_to_wire(micros)}) for micros in ranks]
    handles = [handle for s in samples for handle in s.handles]
    groups = [handles[at : at + 8] for at in range(0, N, 8)]
    adopts = sum(HEADS + len(wire.pack({"owner": "0" * 16, "number": 1, "operations": [["adopt", g]]})) for g in groups)
    ships = [wire.pack(["ship", handles[n::NODES], 2, 43]) for n in range(NODES)]
    dones = [wire.pack(["done", handles[n::NODES], RANKS]) for n in range(NODES)]
    parts = {
        "replies": sum(map(len, replies)), "messages": sum(map(len, messages)), "adopts": adopts,
        "ships": sum(map(len, ships)), "dones": sum(map(len, dones)),
    }  # fmt: skip
    assert sum(parts.values()) <= 1 << 20, parts
