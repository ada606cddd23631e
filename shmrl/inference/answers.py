"""What engines answer, in each of their dialects, as one `Generation`. No torch, no numpy: arrays stay in wire form.

Called by the client, beside its event loop. Three forms: /inference/v1/generate of vLLM 0.30 ("token": "token_id:7")
and of 0.32 ("token_id": 7), the first of which is the chat route's too, and /v1/completions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shmrl.errors import EngineError

FILTERED_BELOW = -9000.0  # engines write -9999.0 for the -inf of a token the sampler had excluded
Head = tuple[list[int], list[float]]
"""(ids, log-probabilities) of one token, the sampled one first."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice, as the engine sent it.

    Attributes:
        token_ids: T sampled ids. logprobs: T of them, the sampled tokens' own.
        finish_reason: "stop", "length" or "abort"; stop_reason: the stop id or string that ended it.
        top_logprobs: (ids, values) per token, the sampled token first, -9999.0 = excluded; None when not asked for.
        routed_experts: base64 of a .npy, [prompt + T - 1 - routed_experts_prompt_start, layers, top_k]; None if absent.
        sampling_mask: ids the sampler kept, ascending, per token; None where nothing was truncated or it is not known.
        weight_versions: (version, start, end) over the tokens; empty from engines that do not say.
        url: the engine that answered.

    Example: Generation([113, 4], "length", None, [-2.0, -0.9], None, "k05V...", [[19, 113], [4]], [("7", 0, 2)], url)
    """

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[float]
    top_logprobs: list[Head] | None
    routed_experts: str | None
    sampling_mask: list[list[int]] | None
    weight_versions: list[tuple[str, int, int]]
    url: str


def read_generation(text: str, url: str, sampling: Mapping[str, Any], head: int) -> Generation:
    """`parse_generation` of an answer's text. Heads are a JSON object per id, megabytes of them in a long answer."""
    try:
        answer = json.loads(text, object_hook=_let_the_loop_turn)
    except ValueError as error:
        raise EngineError(f"{url} sent no JSON: {error}") from error
    return parse_generation(answer, url, sampling, head)


def _let_the_loop_turn(entry: dict[str, Any]) -> dict[str, Any]:
    """A call of Python code per object: the decoder alone would keep the interpreter lock to the end."""
    return entry


def parse_generation(
    answer: Mapping[str, Any], url: str, sampling: Mapping[str, Any], head: int | None = None
) -> Generation:
    """The first choice of an answer; EngineError if unreadable.

    Args: sampling: the parameters as they were sent. head: how wide the caller wants heads, `logprobs` by default.

    Engines that send no sampling mask still send every kept id when `logprobs` >= `top_k`: those above -9000.
    """
    asked = int(sampling.get("logprobs") or 0)
    wanted = asked if head is None else head
    try:
        choice = answer["choices"][0]
        token_ids = list(choice["token_ids"] or ())
        logprobs, heads = _logprobs(choice, asked)
        if logprobs is None or len(logprobs) != len(token_ids):
            have = "none" if logprobs is None else len(logprobs)
            raise EngineError(f"{url} sent {len(token_ids)} tokens with {have} log-probabilities")
        mask = choice.get("sampling_mask")
        return Generation(
            token_ids=token_ids,
            finish_reason=choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            logprobs=logprobs,
            top_logprobs=heads if wanted == asked or not heads else _narrowed(heads, wanted),
            routed_experts=choice.get("routed_experts"),
            sampling_mask=_derived_mask(heads, sampling) if mask is None else mask,
            weight_versions=[(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ()],
            url=url,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{url} sent an answer this client cannot read: {type(error).__name__}: {error}") from error


def _logprobs(choice: Mapping[str, Any], asked: int) -> tuple[list[float] | None, list[Head] | None]:
    """(the sampled tokens' own log-probabilities, heads or None where none were asked for)."""
    given = choice.get("logprobs")
    if given is None:  # an answer aborted before its first token has none
        return (None, None) if choice["token_ids"] else ([], [] if asked else None)
    if "token_logprobs" in given:
        own = given["token_logprobs"]
        tops = [[(_id_in(name), value) for name, value in top.items()] for top in given["top_logprobs"] or ()]
    else:
        own = [entry["logprob"] for entry in given["content"]]
        tops = [[(_id(e), e["logprob"]) for e in c["top_logprobs"]] for c in given["content"]] if asked else []
    return [float(value) for value in own], [_head(top) for top in tops] if asked else None


def _head(entries: Iterable[tuple[int, Any]]) -> Head:
    pairs = [(token, float(value)) for token, value in entries]
    return [token for token, _ in pairs], [value for _, value in pairs]


def _narrowed(heads: list[Head], k: int) -> list[Head] | None:
    """Per token the sampled one, then the best `k`, which may have it too; None for k = 0."""
    if not k:
        return None
    rows = [list(zip(*head, strict=True)) for head in heads]
    return [_head([row[0], *sorted(row, key=lambda entry: -entry[1])[:k]]) for row in rows]


def _id(entry: Mapping[str, Any]) -> int:
    """The token id of a log-probability entry: `token_id` (0.32) or the text "token_id:N" (0.30)."""
    return int(entry["token_id"]) if "token_id" in entry else _id_in(entry["token"])


def _id_in(text: str) -> int:
    """Example: _id_in("token_id:7") == 7"""
    return int(text.removeprefix("token_id:"))


def _derived_mask(heads: list[Head] | None, sampling: Mapping[str, Any]) -> list[list[int]] | None:
    """Kept ids from heads that hold all of them. None when they do not: too narrow, or raw log-probabilities."""
    top_k = int(sampling.get("top_k") or 0)
    if heads is None or top_k < 1 or int(sampling["logprobs"]) < top_k:
        return None
    masks = []
    for ids, values in heads:
        kept = {i: value for i, value in zip(ids, values, strict=True) if value > FILTERED_BELOW}
        if not math.isclose(sum(map(math.exp, kept.values())), 1.0, abs_tol=1e-3):
            return None
        masks.append(sorted(kept))
    return masks


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as {name: value}, summed over label sets."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found
