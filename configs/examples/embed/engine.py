"""What the examples here have for an engine: vLLM's answers to eight prompts, made up from their number.

With a vLLM of your own, `answer(i)` is the JSON that POST /inference/v1/generate returned, and the rest stays as it is.
"""

import base64
import io
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
