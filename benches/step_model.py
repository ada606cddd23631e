"""A step of 1,024 rollouts of 16k tokens on 8 ranks of 4 nodes, computed from the unit costs that `benches.step`
measured.

Measured: seconds and CPU seconds per byte and per sample of encode, publish and gather, both ways; what a byte costs
that comes from another node, by the real node server and fetch; the orchestrator's messages, which are made here as
they are sent. Assumed, and printed: how samples lie, the network, that a node has a core for each of its processes,
and that HTTP servers and ranks work in parallel as far as their bytes let them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shmrl.env.protocol import episode_to_wire
from shmrl.payload import micro_batches_to_wire, pack
from shmrl.types import EpisodeResult, Handle, Sample
from shmrl.wire import pack as packed

ROLLOUTS, TOKENS, RANKS, NODES = 1_024, 16_384, 8, 4
NETWORK = 25e9  # bytes a second into a node: 200 Gbit/s
MIB = 1 << 20


@dataclass(frozen=True)
class Costs:
    """Measured on this machine: of the arena per sample, of HTTP and of what another node serves per byte and rank;
    encode and gather per byte, by the arena."""

    publish_s: float
    publish_cpu_s: float
    http_s: float
    http_cpu_s: float
    fetch_s: float
    fetch_cpu_s: float
    encode_s: float
    gather_s: float

    @classmethod
    def of(cls, nbytes: int, samples: int, readers: int, steps: Mapping[str, Mapping[str, float]]) -> Costs:
        """From steps of `nbytes` in `samples`, which `readers` ranks share, by kind."""
        arena, http, nodes = (steps[kind] for kind in ("arena", "http", "nodes"))
        share = nbytes / readers
        return cls(
            publish_s=arena["publish"] * readers / samples,
            publish_cpu_s=arena["publish_cpu"] / samples,
            http_s=http["publish"] / share,
            http_cpu_s=http["publish_cpu"] / nbytes,
            fetch_s=nodes["publish"] / share,
            fetch_cpu_s=nodes["publish_cpu"] / nbytes,
            encode_s=arena["encode"] / nbytes,
            gather_s=arena["gather"] / share,
        )


def messages(layers: int, top_k: int, experts: int, head: int) -> int:
    """Bytes that the orchestrator receives and sends: a reply per rollout, a message per rank."""
    names = {
        "source": "math", "task": "train-123456", "reward": 0.5, "stop_reason": "stop", "logprobs_mode": "processed",
        "version_start": 41, "version_end": 42, "temperature": 1.0, "branch": 0,
    }  # fmt: skip
    shapes = {"routing": (layers, top_k, experts), "head": (head,), "mask": ()}
    samples, received = [], 0
    for number in range(ROLLOUTS):
        handle = Handle.pack(
            node=7, arena=number % NODES, slot=number, generation=3, nbytes=30 << 20, nonce=number.to_bytes(8, "big")
        )
        meta = names | {"group": f"a3f1-{number // 16}", "episode": str(number % 16), "shapes": shapes}
        sample = Sample(((handle, 0, TOKENS),), TOKENS, TOKENS * 3 // 4, TOKENS - 1, tuple(shapes), meta, 0.5)
        samples.append(sample)
        result = EpisodeResult(
            True, "train-123456", 0.5, {"correct": 0.5}, stop_reason="stop", num_turns=1, num_tokens=TOKENS,
            version_start=41, version_end=42, samples=(sample,),
        )  # fmt: skip
        received += len(packed(episode_to_wire(result)))
    ranks = pack(samples, seq_len=TOKENS, num_ranks=RANKS)
    return received + sum(len(packed(micro_batches_to_wire(micros))) for micros in ranks)


def report(costs: Costs, *, layers: int, top_k: int, experts: int, head: int) -> str:
    """The table, in Markdown, with what it assumes."""
    nbytes = ROLLOUTS * TOKENS * (layers * top_k + 8 + 3 * (8 * head + 4 * 8) // 4)
    share, local = nbytes / RANKS, nbytes / NODES / RANKS
    afar = share - local
    mine = ROLLOUTS / RANKS * costs.publish_s + max(afar * costs.fetch_s, nbytes / NODES * 3 / 4 / NETWORK)
    mine_cpu = ROLLOUTS * costs.publish_cpu_s + RANKS * afar * costs.fetch_cpu_s
    theirs, theirs_cpu = max(share * costs.http_s, nbytes / NODES * 3 / 4 / NETWORK), nbytes * costs.http_cpu_s
    alone = ROLLOUTS / RANKS * costs.publish_s
    encode, gather = nbytes / NODES * costs.encode_s, share * costs.gather_s
    sent = messages(layers, top_k, experts, head)
    held = "held" if sent <= MIB else "NOT held"
    rows = [
        ("publish to readable, all samples of the rank's node", f"{1e3 * alone:.1f} ms", f"{theirs:.2f} s"),
        (f"publish to readable, (n-1)/n of {NODES} nodes' samples from afar", f"{mine:.2f} s", f"{theirs:.2f} s"),
        ("CPU of that, all processes", f"{mine_cpu:.1f} s", f"{theirs_cpu:.1f} s"),
        ("encode, a worker per node, over the step", f"{encode:.1f} s", f"{encode:.1f} s"),
        ("gather, per rank", f"{gather:.2f} s", f"{gather:.2f} s"),
        ("through the orchestrator", f"{sent / MIB:.2f} MiB", f"{sent / MIB:.2f} MiB"),
    ]
    title = f"{ROLLOUTS:,} rollouts x {TOKENS:,} tokens ({nbytes / 1e9:.1f} GB), {RANKS} ranks, {NODES} nodes"
    lines = [f"| {title} | shmrl | HTTP design |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    lines += [
        "",
        f"Orchestrator: {sent:,} bytes (bar 1 MiB: {held}). Measured here: publish {1e6 * costs.publish_s:.1f} us and "
        f"{1e6 * costs.publish_cpu_s:.1f} us of CPU per sample; HTTP {1e-9 / costs.http_s:.2f} GB/s per rank and "
        f"{1e9 * costs.http_cpu_s:.2f} s of CPU per GB; from another node {1e-9 / costs.fetch_s:.2f} GB/s per rank and "
        f"{1e9 * costs.fetch_cpu_s:.2f} s of CPU per GB, checked on arrival; encode {1e-9 / costs.encode_s:.2f} GB/s; "
        f"gather {1e-9 / costs.gather_s:.2f} GB/s per rank; the messages' sizes.",
        f"Assumed: rollouts lie evenly on the nodes; {NETWORK / 1e9:g} GB/s into each node; a core for every process; "
        "what comes from afar costs a byte what it costs here over the loopback, where all ranks and the one server "
        "share the cores; each block once per node, as it has one rank.",
    ]
    return "\n".join(lines)
