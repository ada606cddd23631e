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
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from shmrl.config import RunTree
from shmrl.errors import RunError
from shmrl.trainer.context import ATTENTION, ContextParallel, require_causal_attention
from shmrl.trainer.fold import Fold, part, whole
from shmrl.trainer.inputs import ModelInputs
from shmrl.trainer.lora import adapt
from shmrl.trainer.parallel import Ranks
from shmrl.trainer.policy import Policy
from shmrl.trainer.replay import RouterReplay

FLASH = "flash_attention_2"


def prepare(tree: RunTree, ranks: Ranks, path: Path) -> tuple[Policy, nn.Module]:
    """The checkpoint in `path` as (policy, the module to call). A collective. RunError when it cannot be trained."""
    size = tree.trainer.context_parallel
    context = ContextParallel(ranks.rank, ranks.world, size) if size > 1 else None
    if tree.trainer.fsdp and ranks.world > 1:
        policy, module = _load_sharded(tree, ranks, path, context)
    else:
        policy = load_policy(tree, path, ranks.device, context)
        module = ranks.wrap(policy, tree.trainer)
    with precision(tree, ranks.device):
        check_feeding(policy, module, ranks.device, _limit(tree))
    return policy, module


def load_policy(tree: RunTree, path: Path, device: torch.device, context: ContextParallel | None = None) -> Policy:
    """The checkpoint in `path` as the run's policy, float32 weights on `device`. RunError when it cannot be trained."""
    attention = _attention(tree, device, context)
    policy = _policy(tree, load_model(path, attention).to(device), attention, context)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=tree.trainer.precision == "bfloat16"):
        check_packing(policy, device, _limit(tree))
    return policy


def _load_sharded(tree: RunTree, ranks: Ranks, path: Path, context: ContextParallel | None) -> tuple[Policy, nn.Module]:
    """Rank 0 alone reads and checks the checkpoint, in host memory; every rank gets its slices, a tensor at a time.

    Models with tied embeddings are small, and tying does not survive an empty start: each rank loads those itself.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if config.get_text_config().tie_word_embeddings:
        policy = load_policy(tree, path, ranks.device, context)
        return policy, ranks.wrap(policy, tree.trainer)
    full = load_policy(tree, path, torch.device("cpu"), context) if ranks.rank == 0 else None
    attention = _attention(tree, ranks.device, context)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    policy = _policy(tree, lm.eval(), attention, context)
    module = ranks.wrap(policy, tree.trainer)
    ranks.scatter(policy, full)
    return policy, module


def _attention(tree: RunTree, device: torch.device, context: ContextParallel | None) -> str | None:
    """The implementation to ask transformers for; None: its own choice."""
    if context is not None:
        return ATTENTION
    flash = device.type == "cuda" and tree.trainer.precision == "bfloat16" and is_flash_attn_2_available()
    return FLASH if flash else None


def _policy(tree: RunTree, lm: Any, attention: str | None, context: ContextParallel | None) -> Policy:
    """The language model with hooks and wrappers of the run, not sharded yet."""
    if context is not None:
        require_causal_attention(lm)
    if tree.trainer.lora is not None:
        adapt(lm, tree.trainer.lora)
    if tree.trainer.compile:
        compile_layers(lm)
    if tree.trainer.activation_checkpointing:
        _checkpoint_layers(lm)
    replay = RouterReplay(lm) if tree.trainer.router_replay else None
    return Policy(lm, replay=replay, context=context, chunk=tree.trainer.logprob_chunk, packed=attention == FLASH)


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


def compile_layers(lm: Any, backend: str = "inductor") -> None:
    """Compile the forward pass of each layer, with the hooks on its routers; what FSDP hooks to it stays outside."""
    for layer in lm.get_decoder().layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def _checkpoint_layers(lm: Any) -> None:
    """Keep only each layer's input and run the layer again in the backward pass."""
    for layer in lm.get_decoder().layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


@torch.no_grad()
def check_packing(policy: Policy, device: torch.device, limit: float = 1e-3) -> None:
    """Every token of three packed random sequences must score as in its sequence alone; RunError otherwise.

    Compared with the model's own logits, so that a head that scales or caps them is found too. limit: in nats.
    """
    tokens = _random_tokens(policy)
    fold = whole(CHECKED, policy.packed)
    rows = [torch.as_tensor(row, device=device) for row in np.split(tokens, fold.starts[1:])]
    alone = torch.cat([_alone(policy.lm, row) for row in rows])
    worst = float((policy(_scored(fold, tokens, device)).label - alone).abs().max())
    if not worst <= limit:
        raise RunError(
            f"{type(policy.lm).__name__}: packed sequences score differently from the same sequences alone (by "
            f"{worst:.2e} nats, limit {limit:.0e}): they see each other, or the head is not a plain projection"
        )


@torch.no_grad()
def check_feeding(policy: Policy, module: nn.Module, device: torch.device, limit: float) -> None:
    """What this rank feeds of three sequences must score as in rows of their own. A collective; RunError otherwise.

    After sharding, when the model's own logits are out of reach; rows of their own were checked before.
    """
    context = policy.context
    if context is None and not policy.packed:
        return
    tokens, rows = _random_tokens(policy), whole(CHECKED)
    fold = whole(CHECKED, packed=True) if context is None else part(CHECKED, context.size, context.rank)
    expected = torch.zeros(len(tokens), device=device)
    expected[_scorable(rows)] = module(_scored(rows, tokens, device)).label
    ranges = fold.ranges if fold.ranges is not None else [(i, 0, length) for i, length in enumerate(CHECKED)]
    read = np.concatenate([rows.starts[sequence] + np.arange(a, b) for sequence, a, b in ranges])
    x = _scored(fold, tokens[read], device)
    with policy.prepared(x):
        mine = module(x).label
    if isinstance(module, FSDPModule):
        module.reshard()  # the root keeps what it gathered until a backward pass, and an optimizer would be given that
    worst = float((mine - expected[read[_scorable(fold)]]).abs().max())
    if not worst <= limit:
        how = "one packed row" if context is None else f"parts on {context.size} ranks (trainer.context_parallel)"
        raise RunError(
            f"{type(policy.lm).__name__}: sequences score differently as {how} than in rows of their own (by "
            f"{worst:.2e} nats, limit {limit:.0e})"
        )


def _limit(tree: RunTree) -> float:
    """Of a difference in nats: rounding is 1e-5 in float32; bleeding, 0.1 at initialisation."""
    return 0.25 if tree.trainer.precision == "bfloat16" else 1e-3


CHECKED = (5, 11, 7)
"""Lengths of the sequences that the checks score."""


def _random_tokens(policy: Policy) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, policy.lm.config.get_text_config().vocab_size, sum(CHECKED))


def _scorable(fold: Fold) -> NDArray[np.int64]:
    """Every position that a token fed here predicts."""
    others = fold.starts if fold.foreign is None else np.concatenate([fold.starts, fold.foreign])
    return np.setdiff1d(np.arange(len(fold.sequence)), others)


def _scored(fold: Fold, tokens: NDArray[np.int64], device: torch.device) -> ModelInputs:
    """Inputs that score every position there is, at temperature 1."""
    at = _scorable(fold)
    put = functools.partial(torch.as_tensor, device=device)
    return ModelInputs(
        tokens=put(fold.spread(tokens, 0)),
        position_ids=None if fold.positions is None else put(fold.positions),
        picks=put(fold.predictors(at)),
        labels=put(tokens[at]),
        temperature=torch.ones(len(at), device=device),
        visible=None if fold.visible is None else put(fold.visible),
    )


def _alone(lm: Any, row: Tensor) -> Tensor:
    """log p of row[1:] given what precedes, from the model's own full logits. [T - 1] float32."""
    logits: Tensor = lm(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
