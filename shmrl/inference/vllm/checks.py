"""What is asked of a vLLM before an episode starts: does it deliver the captured fields, and does a reload really load?

Called by the orchestrator when the engines are healthy, whoever started them. Nothing is believed of a version alone:
one short generation goes through the same ingest as every episode, and the weights it serves are loaded once more.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shmrl.config import RunTree
from shmrl.config.shape import ModelShape, read_shape
from shmrl.errors import EngineError, PayloadError
from shmrl.inference.client import LOAD_METHOD, EngineClient
from shmrl.inference.vllm.launch import EXTENSION, PLUGIN
from shmrl.inference.vllm.versions import OLDEST, release
from shmrl.payload import BranchBuilder

PROBE_TOKENS = 32
LIMIT = {"float32": 1e-3, "bfloat16": 2e-2}  # nats; a reload that went wrong is off by tenths


async def greet(client: EngineClient, tree: RunTree, sender: int | None = None) -> bool:
    """Whether sampling masks have to be derived; EngineError where an engine cannot serve this run.

    sender: the port where trainer rank 0 broadcasts weights, if they are handed over so.
    """
    shape = read_shape(json.loads((tree.initial_weights / "config.json").read_text()))
    ids = random.Random(0).choices(range(shape.vocab), k=min(PROBE_TOKENS, tree.inference.max_model_len - 2))
    derive = False
    for url, version in zip(client.urls, await client.versions(), strict=True):
        if release(version) < OLDEST:
            raise EngineError(f"{url}: vLLM {version} is older than {'.'.join(map(str, OLDEST))}")
        async with EngineClient([url], timeout_s=tree.inference.request_timeout_s) as one:
            derive |= await _check_fields(one, tree, shape, ids, version)
    await check_reload(client, tree, ids, sender)
    return derive


async def _check_fields(client: EngineClient, tree: RunTree, shape: ModelShape, ids: list[int], version: str) -> bool:
    """Generate a little as the train sources do; whether masks had to be derived."""
    train = tree.orchestrator.train.source
    sampling = next((s.sampling for s in train if s.sampling.truncated), train[0].sampling).model_dump()
    asked = {**sampling, "max_tokens": 2, "logprobs": tree.trainer.head}
    native = await client.generate(ids, asked)
    derive = "mask" in tree.captured and native.sampling_mask is None
    answer = await client.generate(ids, asked, derive_masks=True) if derive else native
    try:
        _ingest(tree, shape, ids, answer, sampling)
    except PayloadError as error:
        raise EngineError(
            f"{client.urls[0]} (vLLM {version}) does not deliver what the trainer declares, "
            f"{', '.join(tree.captured)}: {error}. Routing needs --enable-return-routed-experts; masks need "
            f"--logprobs-mode processed_logprobs and --max-logprobs of at least top_k = {sampling['top_k']}"
        ) from error
    return derive


def _ingest(tree: RunTree, shape: ModelShape, ids: list[int], answer: Any, sampling: Mapping[str, Any]) -> None:
    routing: dict[str, Any] = {}
    if "routing" in tree.captured:
        routing = {"num_experts": shape.experts, "layers": shape.moe_layers, "decoder_layers": shape.layers}
        routing["top_k"] = shape.top_k
    masks = "mask" in tree.captured
    builder = BranchBuilder(**routing, head_k=tree.trainer.head, mask=masks, vocab=shape.vocab)
    builder.add_turn(ids, answer)
    branch = builder.branch({key: sampling[key] for key in ("top_p", "top_k", "min_p")} if masks else {})
    for rows in branch.rows.values():
        np.asarray(rows.values)  # stitched routing is decoded and checked when it is read


async def check_reload(client: EngineClient, tree: RunTree, ids: list[int], sender: int | None = None) -> None:
    """Load the weights that are served once more: a prompt must score as before. EngineError with both scores.

    Some versions answer 200 to a reload and compute with weights that are neither the old nor the new ones.
    """
    path = tree.newest_weights
    before = {url: await client.prompt_logprobs(url, ids) for url in client.urls}
    try:
        for url, files in (await client.weight_files(str(path), sender)).items():
            await client.call_workers(url, LOAD_METHOD, *files)
    except EngineError as error:
        raise EngineError(
            f"{error}; an engine that someone else starts needs VLLM_SERVER_DEV_MODE=1, PYTHONPATH={PLUGIN} and "
            f"--worker-extension-cls {EXTENSION}"
        ) from error
    for url in client.urls:
        _compare(url, path, before[url], await client.prompt_logprobs(url, ids), LIMIT[tree.inference.dtype])


def _compare(url: str, path: Path, before: list[float], after: list[float], limit: float) -> None:
    worst = max(abs(a - b) for a, b in zip(before, after, strict=True))
    if not worst <= limit:
        at = max(range(len(before)), key=lambda i: abs(before[i] - after[i]))
        raise EngineError(
            f"{url}: after loading {path}, which it should have served already, token {at + 1} of a probe has log-"
            f"probability {after[at]:.4f} instead of {before[at]:.4f}: either it was started with another model, or "
            "this version loads weights wrongly, and would go on with wrong ones after every step"
        )
