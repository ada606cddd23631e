"""What engines answer, in each of their dialects, as one `Generation`.

Called by the client, beside its event loop. Three forms: /inference/v1/generate of vLLM 0.30 ("token": "token_id:7")
and of 0.32 ("token_id": 7), the first of which is the chat route's too, and /v1/completions. Of the first two what
grows with the tokens is read in C, without the interpreter lock; whatever is not quite like them by a JSON library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import EngineError, PayloadError
from shmrl.payload import _answers
from shmrl.payload.heads import Heads, KeptSets

Content = tuple[list[float], Heads]
"""`logprobs.content` of a choice: the sampled tokens' own log-probabilities, and what is listed for each."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice, as the engine sent it.

    Attributes:
        token_ids: T sampled ids. logprobs: T of them, the sampled tokens' own.
        finish_reason: "stop", "length" or "abort"; stop_reason: the stop id or string that ended it.
        top_logprobs: of each token, itself first, -9999.0 = excluded; None when not asked for.
        routed_experts: base64 of a .npy, [prompt + T - 1 - routed_experts_prompt_start, layers, top_k]; None if absent.
        sampling_mask: the ids the sampler kept; None where nothing was truncated or it is not known.
        weight_versions: (version, start, end) over the tokens; empty from engines that do not say.
        url: the engine that answered.

    Example: Generation([113, 4], "length", None, [-2.0, -0.9], None, "k05V...", None, [("7", 0, 2)], url)
    """

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[float]
    top_logprobs: Heads | None
    routed_experts: str | None
    sampling_mask: KeptSets | None
    weight_versions: list[tuple[str, int, int]]
    url: str


def read_generation(text: bytes, url: str, sampling: Mapping[str, Any], head: int) -> Generation:
    """`parse_generation` of an answer's text: megabytes where heads are wide, a JSON object per id."""
    try:
        answer = _split(text, wanted=bool(sampling.get("logprobs")))
        if answer is None:
            answer = json.loads(text.decode(errors="replace"), object_hook=_let_the_loop_turn)
    except ValueError as error:
        raise EngineError(f"{url} sent no JSON: {error}") from error
    return parse_generation(answer, url, sampling, head)


def _split(text: bytes, wanted: bool) -> dict[str, Any] | None:
    """The answer with arrays in place of the lists that C has read; None where it knows of a better reader.

    wanted: heads were asked for, so that one of no entries is another form.
    """
    parts = _answers.split(text)
    if parts is None:
        return None
    rest, tokens, content, mask, routed = parts
    answer: dict[str, Any] = json.loads(rest)
    if not answer.get("choices"):
        return None
    choice = answer["choices"][0]
    if tokens is not None:
        choice["token_ids"] = np.frombuffer(tokens, np.int32).tolist()
    if content is not None:
        logprobs, counts, ids, values = content
        heads = Heads(_int32(counts), _int32(ids), np.frombuffer(values, np.float32))
        if wanted and not heads.counts.all():
            return None
        choice["logprobs"]["content"] = np.frombuffer(logprobs, np.float64).tolist(), heads
    if mask is not None:
        choice["sampling_mask"] = KeptSets(*map(_int32, mask))
    if routed is not None:
        choice["routed_experts"] = routed
    return answer


def _int32(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, np.int32)


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
            top_logprobs=_narrowed(heads, asked, wanted),
            routed_experts=choice.get("routed_experts"),
            sampling_mask=_derived_mask(heads, sampling) if mask is None else KeptSets.of(mask),
            weight_versions=[(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ()],
            url=url,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, PayloadError) as error:
        raise EngineError(f"{url} sent an answer this client cannot read: {type(error).__name__}: {error}") from error


def _logprobs(choice: Mapping[str, Any], asked: int) -> tuple[list[float] | None, Heads | None]:
    """(the sampled tokens' own log-probabilities, heads or None where none were asked for)."""
    given = choice.get("logprobs")
    if given is None:  # an answer aborted before its first token has none
        return (None, None) if choice["token_ids"] else ([], Heads.of([]) if asked else None)
    if "token_logprobs" in given:
        own = [float(value) for value in given["token_logprobs"]]
        tops = [[(_id_in(name), value) for name, value in top.items()] for top in given["top_logprobs"] or ()]
    elif isinstance(given["content"], tuple):
        own, heads = given["content"]
        return own, heads if asked else None
    else:
        own = [float(entry["logprob"]) for entry in given["content"]]
        tops = [[(_id(e), e["logprob"]) for e in c["top_logprobs"]] for c in given["content"]] if asked else []
    return own, Heads.of([_head(top) for top in tops]) if asked else None


def _head(entries: Iterable[tuple[int, Any]]) -> tuple[list[int], list[float]]:
    pairs = [(token, float(value)) for token, value in entries]
    return [token for token, _ in pairs], [value for _, value in pairs]


def _narrowed(heads: Heads | None, asked: int, wanted: int) -> Heads | None:
    """As wide as the caller wants them: None for 0."""
    if heads is None or not wanted:
        return None
    return heads if wanted == asked or not len(heads) else heads.narrowed(wanted)


def _id(entry: Mapping[str, Any]) -> int:
    """The token id of a log-probability entry: `token_id` (0.32) or the text "token_id:N" (0.30)."""
    return int(entry["token_id"]) if "token_id" in entry else _id_in(entry["token"])


def _id_in(text: str) -> int:
    """Example: _id_in("token_id:7") == 7"""
    return int(text.removeprefix("token_id:"))


def _derived_mask(heads: Heads | None, sampling: Mapping[str, Any]) -> KeptSets | None:
    """Kept ids from heads that hold all of them. None when they do not: too narrow, or raw log-probabilities."""
    top_k = int(sampling.get("top_k") or 0)
    if heads is None or top_k < 1 or int(sampling["logprobs"]) < top_k:
        return None
    return heads.kept() if np.allclose(heads.mass(), 1.0, rtol=0, atol=1e-3) else None


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as {name: value}, summed over label sets."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found
