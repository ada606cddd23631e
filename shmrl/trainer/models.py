"""Loads a checkpoint directory as a `Policy` and checks, before anything is trained, that it computes what it should.

The check catches what is silent otherwise: packed sequences that see each other, and a head that is more than one
matrix. Called by `loop` at start, before the model is wrapped. Runs in a trainer rank.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from shmrl.config import RunTree
from shmrl.errors import RunError
from shmrl.trainer.inputs import Fold, ModelInputs
from shmrl.trainer.policy import Policy
from shmrl.trainer.replay import RouterReplay


def load_policy(tree: RunTree, path: Path, device: torch.device) -> Policy:
    """The checkpoint in `path` as the run's policy, float32 weights on `device`. RunError when it cannot be trained."""
    packed = device.type == "cuda" and tree.trainer.precision == "bfloat16" and is_flash_attn_2_available()
    lm = load_model(path, "flash_attention_2" if packed else None).to(device)
    if tree.trainer.activation_checkpointing:
        _checkpoint_layers(lm)
    replay = RouterReplay(lm) if tree.trainer.router_replay else None
    if tree.trainer.compile:
        for layer in lm.get_decoder().layers:
            layer.compile(dynamic=True)  # by layer: what FSDP shards, and one compilation serves them all
    policy = Policy(lm, replay=replay, chunk=tree.trainer.logprob_chunk, packed=packed)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=tree.trainer.precision == "bfloat16"):
        check_packing(policy, device)
    return policy


def load_model(path: Path, attention: str | None = None) -> Any:
    """AutoModelForCausalLM in float32 and eval mode (dropout breaks the ratio). RunError names what does not fit."""
    if not (path / "config.json").is_file():
        raise RunError(f"{path} is no model directory: it has no config.json")
    transformers_logging.disable_progress_bar()
    try:
        lm, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=attention, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RunError(f"cannot load the model in {path}: {type(error).__name__}: {error}") from error
    faults = {kind: sorted(map(str, found[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    wrong = [f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in faults.items() if names]
    if wrong:
        raise RunError(f"the weights in {path} do not fit {type(lm).__name__}: {'; '.join(wrong)}")
    return lm.eval()


def precision(tree: RunTree, device: torch.device) -> AbstractContextManager[Any]:
    """Around every forward pass: autocast for bfloat16 (with FSDP the sharding's own policy casts), else nothing."""
    on = tree.trainer.precision == "bfloat16" and not tree.trainer.fsdp
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=on)


def _checkpoint_layers(lm: Any) -> None:
    """Keep only each layer's input and run the layer again in the backward pass."""
    for layer in lm.get_decoder().layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


@torch.no_grad()
def check_packing(policy: Policy, device: torch.device) -> None:
    """Every token of three packed random sequences must score as in its sequence alone; RunError otherwise.

    Compared with the model's own logits, so that a head that scales or caps them is found too.
    """
    lens = (5, 11, 7)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, policy.lm.config.get_text_config().vocab_size, sum(lens))
    fold = Fold(lens, policy.packed)
    at = np.flatnonzero(~np.isin(np.arange(len(tokens)), fold.starts))
    put = functools.partial(torch.as_tensor, device=device)
    x = ModelInputs(
        tokens=put(fold.spread(tokens, 0)),
        position_ids=None if fold.positions is None else put(fold.positions),
        picks=put(fold.predictors(at)),
        labels=put(tokens[at]),
        temperature=torch.ones(len(at), device=device),
    )
    alone = torch.cat([_alone(policy.lm, put(row)) for row in np.split(tokens, fold.starts[1:])])
    worst = float((policy(x).label - alone).abs().max())
    limit = (
        0.25 if torch.is_autocast_enabled(device.type) else 1e-3
    )  # rounding is 1e-5; bleeding, 0.1 at initialisation
    if not worst <= limit:
        raise RunError(
            f"{type(policy.lm).__name__}: packed sequences score differently from the same sequences alone (by "
            f"{worst:.2e} nats, limit {limit:.0e}): they see each other, or the head is not a plain projection"
        )


def _alone(lm: Any, row: torch.Tensor) -> torch.Tensor:
    """log p of row[1:] given what precedes, from the model's own full logits. [T - 1] float32."""
    logits: torch.Tensor = lm(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
