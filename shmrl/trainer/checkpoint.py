"""Checkpoints: `<output_dir>/checkpoints/step_<n>/`, complete or absent, and how a rank starts from one.

Written to a temporary directory, fsynced, renamed; `STABLE` is written last, and a directory without it is not a
checkpoint. Holds the model (public layout, tokenizer), lora.pt (adapters, which the model has merged in), optimizer.pt,
rng.pt, trainer.json, and orchestrator.json, the orchestrator's own part. Saving gathers on every rank, and rank 0
writes. Runs in the trainer's ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shmrl.config import RunTree
from shmrl.config.training import Checkpoint
from shmrl.errors import RunError, told
from shmrl.trainer import lora
from shmrl.trainer.parallel import Ranks
from shmrl.trainer.policy import Policy
from shmrl.trainer.weights import staging, steps_in, write_model

FORMAT = 1
ADAPTERS = "lora.pt"


def checkpoint_dir(tree: RunTree, step: int) -> Path:
    return tree.run.output_dir / "checkpoints" / f"step_{step}"


def save(
    tree: RunTree,
    ranks: Ranks,
    step: int,
    policy: Policy,
    weights: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    orchestrator: dict[str, Any],
    source: Path,
    metrics: Mapping[str, float],
) -> None:
    """Write the checkpoint of `step` on rank 0. A collective: call on every rank with its share of the optimizer.

    orchestrator: its own part. metrics: what is reported of the step; a rank that dies before it says so can say it
    after its restart.
    """
    optim = get_optimizer_state_dict(
        policy, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    rng = ranks.gather_objects(torch.get_rng_state())
    if ranks.rank:
        return
    target = checkpoint_dir(tree, step)
    with staging(target) as work:
        merged, adapters = lora.split(weights, tree.trainer.lora)
        write_model(policy.lm, merged, source, work)
        if adapters:
            torch.save(adapters, work / ADAPTERS)
        torch.save(optim, work / "optimizer.pt")
        torch.save(rng, work / "rng.pt")
        note = {"format": FORMAT, "step": step, "world": ranks.world, "seed": tree.run.seed, "metrics": {**metrics}}
        (work / "trainer.json").write_text(json.dumps(note, indent=1) + "\n")
        (work / "orchestrator.json").write_text(json.dumps(orchestrator) + "\n")
        _install(work, target)
    _prune(target.parent, tree.trainer.checkpoint)


def _install(work: Path, target: Path) -> None:
    """Everything on disk, then the name, then STABLE."""
    for file in work.iterdir():
        _fsync(file)
    _fsync(work)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(work, target)
    (target / "STABLE").touch()
    _fsync(target / "STABLE")
    _fsync(target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _prune(folder: Path, keep: Checkpoint) -> None:
    """The newest `keep_last` and every `keep_every`-th step stay; STABLE goes first, so no half is ever resumed."""
    for step in steps_in(folder)[: -keep.keep_last]:
        if keep.keep_every and step % keep.keep_every == 0:
            continue
        (folder / f"step_{step}" / "STABLE").unlink(missing_ok=True)
        shutil.rmtree(folder / f"step_{step}", ignore_errors=True)


def restore(
    tree: RunTree, ranks: Ranks, step: int, policy: Policy, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Adapters, optimizer and RNG state of `step` into this rank; other weights were loaded with the model. Returns the
    metrics of the step.

    RunError when a file is damaged, or when the checkpoint's note is of another format or step.
    """
    path = checkpoint_dir(tree, step)
    note = _loaded(path / "trainer.json", lambda file: dict(json.loads(file.read_text())))
    if (note.get("format"), note.get("step")) != (FORMAT, step):
        raise RunError(f"{path} cannot be resumed: it says {note}, expected format {FORMAT} and step {step}")
    if tree.trainer.lora is not None:
        adapters = {f"lm.{name}": value for name, value in _loaded(path / ADAPTERS, _tensors).items()}
        set_model_state_dict(policy, adapters, options=StateDictOptions(full_state_dict=True, strict=False))
    optim = _loaded(path / "optimizer.pt", _tensors)
    set_optimizer_state_dict(policy, optimizer, optim_state_dict=optim, options=StateDictOptions(full_state_dict=True))
    rng = _loaded(path / "rng.pt", _tensors)
    if ranks.rank < len(rng):
        torch.set_rng_state(rng[ranks.rank])
    return dict(note.get("metrics", {}))


def _tensors(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _loaded(file: Path, load: Callable[[Path], Any]) -> Any:
    """What `load` makes of the file; RunError with the way out when it is damaged (torch raises anything then)."""
    try:
        return load(file)
    except Exception as error:
        raise RunError(
            f"{file} cannot be read ({told(error)}): remove {file.parent} to resume from the checkpoint before it"
        ) from error
