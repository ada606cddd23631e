"""Real rollouts without an environment: the embedded engine in this process, its answers as checked branches.

Used by `benches.fidelity` and by the trainer's tests, which need routing, heads and masks that belong to a model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmrl.inference.embedded.engine import Engine
from shmrl.inference.embedded.model import Model
from shmrl.inference.embedded.params import SamplingParams
from shmrl.inference.embedded.rows import Request, Row, make_rows
from shmrl.payload import Branch


def generate(model: Model, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int = 0) -> list[Row]:
    """Finish one row per prompt on an engine that lives as long as this call."""
    engine = Engine(model, None, max_num_seqs=64, max_model_len=model.max_positions)
    done = threading.Semaphore(0)
    requests = []
    for index, prompt in enumerate(prompts):
        rows = make_rows(list(prompt), params, max_model_len=model.max_positions, default_seed=seed + index)
        requests.append(Request(f"r{index}", rows, lambda request: done.release()))
    try:
        for request in requests:
            engine.submit(request)
        for _ in requests:
            if not done.acquire(timeout=120):
                raise TimeoutError(f"{len(prompts)} rollouts did not finish within 120 s")
    finally:
        engine.close()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.rows[0] for request in requests]


def branch_of(row: Row, num_experts: int, meta: dict[str, Any]) -> Branch:
    """The branch an env worker would store for this row: prompt without loss, every drawn token with it."""
    T, first = row.length, len(row.prompt)
    loss_mask = np.arange(T) >= first
    logprobs = np.zeros(T, np.float32)
    logprobs[first:] = row.logprobs
    params = row.params
    recorded = {"logprobs_mode": "processed", "temperature": params.temperature}
    mask = None
    if params.truncates:
        kept = [np.zeros(0, np.int32) if ids is None else np.asarray(ids) for ids in row.kept]
        counts = np.concatenate([np.zeros(first, np.int32), [len(ids) for ids in kept]]).astype(np.int32)
        mask = (np.concatenate(kept).astype(np.int32), counts)
        recorded |= {"top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p}
    head = (np.stack(row.head_ids).astype(np.int32), np.stack(row.head_logprobs)) if params.logprobs else None
    return Branch(
        np.array([*row.prompt, *row.tokens], np.int32),
        loss_mask,
        logprobs,
        routing=row.all_routing(),
        num_experts=num_experts,
        head=head,
        mask=mask,
        meta={**recorded, "version_start": 0, "version_end": 0, **meta},
    )


def rollouts(
    path: Path, count: int, *, seed: int = 0, dtype: str = "float32", tokens: tuple[int, int] = (8, 24), **params: Any
) -> list[Branch]:
    """`count` branches of the model in `path`; prompts of 4-12 random ids, completions of up to tokens[0]..tokens[1].

    `params` are SamplingParams' own (temperature, top_p, top_k, logprobs = the head's width, ...).
    """
    model = Model(path, dtype=dtype)
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for length in rng.integers(*tokens, 4).tolist():  # four lengths, so that sequences differ
        prompts = [rng.integers(0, 256, rng.integers(4, 12)).tolist() for _ in range(-(-count // 4))]
        rows += generate(model, prompts, SamplingParams(max_tokens=length, ignore_eos=True, **params), seed + length)
    return [
        branch_of(row, model.num_experts, {"source": "bench", "episode": str(index)})
        for index, row in enumerate(rows[:count])
    ]
