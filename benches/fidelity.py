"""How close the trainer's log-probabilities are to the sampler's, and what each replay is worth.

`python -m benches.fidelity` prints one table over the same weights: router replay off and on with a bfloat16 engine and
a float32 trainer (in float32 no route differs and replay proves nothing), sampling replay off and on with top_p = 0.9
in float32; the last line has everything on, and nothing left to differ. The difference d is the trainer's logp minus
the sampler's, per sampled token.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benches.rollouts import rollouts
from shmrl.arena import Arena
from shmrl.config import RunTree, TinyModel
from shmrl.inference.embedded.tiny import write_tiny
from shmrl.payload import Branch, TensorBatch, assemble, encode, pack
from shmrl.trainer.inputs import InputBuilder
from shmrl.trainer.losses import mismatch_kl
from shmrl.trainer.models import load_model
from shmrl.trainer.policy import Policy
from shmrl.trainer.replay import RouterReplay
from shmrl.types import MicroBatch

Work = list[tuple[MicroBatch, TensorBatch]]
SCALE = 5.0
VOCAB = 264  # top_k without effect: what is measured is top_p's


@dataclass(frozen=True)
class Row:
    """One line of the table: mean k3 KL, mean ratio exp(d), largest |d|, and the share of routes that differ."""

    engine: str
    router_replay: bool
    sampling_replay: bool
    top_p: float
    tokens: int
    kl: float
    ratio: float
    worst: float
    flipped: float


def write_scaled(path: Path, shape: TinyModel | None = None, scale: float = SCALE) -> Path:
    """A random model whose matrices are `scale` times larger, so that routes and logits are not degenerate."""
    write_tiny(shape or TinyModel(initializer_range=0.02), path, seed=0)
    lm = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(scale)
    lm.save_pretrained(path)
    return path


def _tree(path: Path, top_p: float, *, router_replay: bool, sampling_replay: bool) -> RunTree:
    """A run that trains on rollouts of `benches.rollouts` sampled with this top_p."""
    sampling = {"top_p": top_p, **({"top_k": VOCAB} if top_p < 1 else {})}
    source = {"name": "bench", "env": {"id": "reverse-text"}, "sampling": sampling}
    return RunTree.model_validate(
        {
            "model": {"path": path},
            "orchestrator": {"batch_size": 8, "train": {"source": [source]}},
            "trainer": {"router_replay": router_replay, "sampling_replay": sampling_replay},
        }
    )


@torch.no_grad()
def score(policy: Policy, tree: RunTree, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """(trainer, sampler) log-probabilities of every sampled token, float32 each, as a step would compute them."""
    replay = policy.replay if tree.trainer.router_replay else None
    builder = InputBuilder(tree, replay, torch.device("cpu"), policy.packed)
    ours, theirs = [], []
    for micro_batch, batch in work:
        inputs, arrays = builder.build(micro_batch, batch)
        with policy.replay.routes(inputs.routes):
            ours.append(policy(inputs).label.numpy())
        theirs.append(arrays.sampler_logprobs.numpy())
    return np.concatenate(ours), np.concatenate(theirs)


@torch.no_grad()
def flipped(policy: Policy, tree: RunTree, work: Work) -> float:
    """Share of recorded (token, layer) routes that the trainer would not have chosen."""
    builder = InputBuilder(tree, policy.replay, torch.device("cpu"), policy.packed)
    own: dict[int, torch.Tensor] = {}
    routers = [policy.lm.model.layers[layer].mlp.gate for layer in policy.replay.layers]
    hooks = [r.register_forward_hook(lambda m, a, out, c=c: own.__setitem__(c, out[2])) for c, r in enumerate(routers)]
    differ = total = 0
    for micro_batch, batch in work:
        inputs, _ = builder.build(micro_batch, batch)
        policy(inputs)
        there = inputs.routes[:, 0, 0] >= 0
        chosen = torch.stack([own[c] for c in range(len(own))], 1)[there].sort(-1).values
        differ += int((chosen != inputs.routes[there].sort(-1).values).any(-1).sum())
        total += chosen.shape[0] * chosen.shape[1]
    for hook in hooks:
        hook.remove()
    return differ / total


def table(path: Path, count: int = 64, tokens: tuple[int, int] = (24, 64)) -> list[Row]:
    """Every line, over `count` rollouts per engine and sampling."""
    lm = load_model(path)
    policy = Policy(lm, replay=RouterReplay(lm))
    rows = []
    for dtype, top_p, cases in (
        ("bfloat16", 1.0, ((False, True), (True, True))),
        ("float32", 0.9, ((True, False), (True, True))),
    ):
        sampling = {"top_p": top_p, "top_k": VOCAB} if top_p < 1 else {}
        branches = rollouts(path, count, dtype=dtype, tokens=tokens, **sampling)
        with assembled(branches) as work:
            differ = flipped(policy, _tree(path, top_p, router_replay=True, sampling_replay=True), work)
            for routed, masked in cases:
                tree = _tree(path, top_p, router_replay=routed, sampling_replay=masked)
                rows.append(_row(dtype, tree, top_p, *score(policy, tree, work), differ))
    return rows


@contextmanager
def assembled(branches: Sequence[Branch]) -> Iterator[Work]:
    """The branches through an arena: encoded, packed for one rank, assembled."""
    arena = Arena.create(capacity="64MiB")
    try:
        samples = [encode(arena, branch, tag=f"bench/bench/0/{i}") for i, branch in enumerate(branches)]
        (packed,) = pack(samples, seq_len=1024, num_ranks=1)
        yield [(micro_batch, assemble(arena, micro_batch)) for micro_batch in packed]
        arena.free([handle for sample in samples for handle in sample.handles])
    finally:
        arena.unlink()
        arena.close()


def _row(dtype: str, tree: RunTree, top_p: float, ours: np.ndarray, theirs: np.ndarray, differ: float) -> Row:
    d = ours.astype(np.float64) - theirs
    kl = float(mismatch_kl(torch.from_numpy(ours), torch.from_numpy(theirs)).mean())
    routed, masked = tree.trainer.router_replay, tree.trainer.sampling_replay
    return Row(dtype, routed, masked, top_p, len(d), kl, float(np.exp(d).mean()), float(np.abs(d).max()), differ)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        rows = table(write_scaled(Path(folder) / "model"))
    print("engine    trainer  top_p  router  sampling  tokens  mismatch KL  mean ratio  max |d|  routes differ")
    for row in rows:
        on = {True: "on", False: "off"}
        print(
            f"{row.engine:9} float32  {row.top_p:5.2f}  {on[row.router_replay]:6}  {on[row.sampling_replay]:8}  "
            f"{row.tokens:6d}  {row.kl:11.2e}  {row.ratio:10.4f}  {row.worst:7.1e}  {row.flipped:13.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
