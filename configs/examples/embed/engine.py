"""What the examples here have for an engine: vLLM's answers to eight prompts, made up from their number.

With a vLLM of your own, `answer(i)` is the JSON that POST /inference/v1/generate returned, and the rest stays as it is.
"""

import base64
import hashlib
import io
import json
from itertools import accumulate
from typing import Any

import numpy as np

from shmrl import Branch
from shmrl.inference.answers import parse_generation
from shmrl.payload import BranchBuilder

LAYERS, EXPERTS, TOP_K, HEAD, N = 4, 8, 2, 3, 8


def prompt(i: int) -> list[int]:
    return list(b"turn this around: " + bytes(range(97, 99 + i)))


def answer(i: int) -> dict[str, Any]:
    """routed_experts: a row for every token that was fed, which the last one was not."""
    random = np.random.default_rng(i)
    tokens = random.integers(97, 123, 12 + i).tolist()
    fed = len(prompt(i)) + len(tokens) - 1
    npy = io.BytesIO()
    np.save(npy, random.random((fed, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8))
    content = []
    for token in tokens:
        best = [token, *(t for t in random.choice(97, HEAD, replace=False).tolist())]
        top: list[dict[str, Any]] = [{"token": f"token_id:{t}", "logprob": -0.5 * (1 + n)} for n, t in enumerate(best)]
        content.append({**top[0], "top_logprobs": top})
    return {
        "choices": [
            {
                "token_ids": tokens,
                "logprobs": {"content": content},
                "routed_experts": base64.b64encode(npy.getvalue()).decode(),
                "sampling_mask": [sorted(int(entry["token"][9:]) for entry in row["top_logprobs"]) for row in content],
                "finish_reason": "stop",
            }
        ]
    }


def branch(i: int) -> Branch:
    """Prompt and answer as one trainable branch: the arrays are checked here, and copied when `encode` writes them."""
    generation = parse_generation(answer(i), "http://engine", {"logprobs": HEAD})
    builder = BranchBuilder(num_experts=EXPERTS, layers=range(LAYERS), top_k=TOP_K, head_k=HEAD, mask=True)
    builder.add_turn(prompt(i), generation)
    return builder.branch({"source": "embed", "task": str(i), "reward": (i % 4) / 3, "top_k": HEAD + 1})


def fingerprints(batch) -> list[str]:
    """A SHA-256 per sequence, of every recorded row that `assemble` copied; how it was packed plays no part."""
    arrays, found = batch.arrays(), []
    ends = list(accumulate(batch.seq_lens.tolist()))
    for start, stop in zip([0, *ends], ends, strict=False):
        digest = hashlib.sha256()
        for name in sorted(arrays.keys() - {"seq_lens"}):
            rows, counts, covered = arrays[name], arrays.get(f"{name}/counts"), arrays.get(f"{name}/covered")
            if counts is not None:
                rows = rows[counts[:start].sum() : counts[:stop].sum()]
            elif covered is not None:
                rows = rows[start:stop][covered[start:stop]]  # elsewhere is what fills a gap
            else:
                rows = rows[start:stop]
            digest.update(f"{name} {rows.dtype} {rows.shape}".encode() + rows.tobytes())
        found.append(digest.hexdigest())
    return found


def report(name: str, seen: list[str], arena) -> None:
    """The line that all examples end with: the same SHA-256 in each, and an arena without blocks."""
    whole = hashlib.sha256("".join(sorted(seen)).encode()).hexdigest()
    print(json.dumps({"example": name, "sequences": len(seen), "sha256": whole, "blocks": arena.stats()["blocks"]}))


def tiny_model():
    """A random Qwen3-MoE of this shape, over bytes."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=261, num_hidden_layers=LAYERS, head_dim=16, **shape, **experts)
    )
