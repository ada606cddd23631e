"""Answers of the generating routes, in vLLM 0.32's JSON: finished rows in, plain dictionaries out.

Arrays travel as vLLM sends them: routing as base64 of a .npy, [tokens - 1 - prompt_start, layers, top_k]; sampling
masks as lists of ids; filtered head entries as -9999.0, since JSON has no infinity. Event loop of the server.
"""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shmrl.inference.embedded.bodies import Ask
from shmrl.inference.embedded.rows import Row

FILTERED = -9999.0


class Answers:
    """Renders rows for one served model.

    Args:
        routed_experts, sampling_mask: whether answers carry them at all (server-wide, as in vLLM).
    """

    def __init__(
        self, model: str, tokenizer: PreTrainedTokenizerBase | None, *, routed_experts: bool, sampling_mask: bool
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._routed_experts, self._sampling_mask = routed_experts, sampling_mask

    def generate(self, request_id: str, rows: list[Row]) -> dict[str, Any]:
        """/inference/v1/generate."""
        return {
            "request_id": request_id,
            "model": self._model,
            "created": int(time.time()),
            "usage": _usage(rows),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._generate_choice(index, row) for index, row in enumerate(rows)],
        }

    def _generate_choice(self, index: int, row: Row) -> dict[str, Any]:
        return {
            "index": index,
            "finish_reason": row.finish,
            "stop_reason": row.stop_reason,
            "token_ids": row.tokens,
            "routed_experts": self._routing(row),
            "sampling_mask": self._masks(row),
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in row.spans],
            "logprobs": None if row.params.logprobs is None else {"content": _token_logprobs(row)},
        }

    def completion(self, request_id: str, rows: list[Row], ask: Ask) -> dict[str, Any]:
        """/v1/completions."""
        choices = []
        for index, row in enumerate(rows):
            choice = {"index": index, "text": self._text(row), "logprobs": self._completion_logprobs(row, ask)}
            ids = {"prompt_logprobs": None, "prompt_token_ids": row.prompt if ask.token_ids else None}
            choices.append(choice | self._common(row, ask) | ids)
        answer = {"id": request_id, "object": "text_completion", "choices": choices}
        return self._envelope(answer, rows)

    def chat(self, request_id: str, rows: list[Row], ask: Ask) -> dict[str, Any]:
        """/v1/chat/completions."""
        absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        choices = []
        for index, row in enumerate(rows):
            message = {"role": "assistant", "content": self._text(row), **absent}
            choice = {"index": index, "message": message, "logprobs": self._chat_logprobs(row, ask)}
            choices.append(choice | self._common(row, ask))
        prompt = {"prompt_logprobs": None, "prompt_token_ids": rows[0].prompt if ask.token_ids else None}
        answer = {"id": request_id, "object": "chat.completion", "choices": choices, **prompt, "prompt_text": None}
        return self._envelope(answer, rows)

    def _common(self, row: Row, ask: Ask) -> dict[str, Any]:
        return {
            "finish_reason": row.finish,
            "stop_reason": row.stop_reason,
            "token_ids": row.tokens if ask.token_ids else None,
            "routed_experts": self._routing(row),
        }

    def _envelope(self, answer: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
        absent = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
        ours = {"created": int(time.time()), "model": self._model, "usage": _usage(rows)}
        return answer | ours | {"system_fingerprint": "shmrl-embedded"} | absent

    # -------------------------------------------------------------------------------------------------------- arrays

    def _routing(self, row: Row) -> str | None:
        rows = row.all_routing() if self._routed_experts else None
        if rows is None:
            return None
        npy = io.BytesIO()
        np.save(npy, np.ascontiguousarray(rows[row.params.routed_experts_prompt_start :]), allow_pickle=False)
        return base64.b64encode(npy.getvalue()).decode("ascii")

    def _masks(self, row: Row) -> list[list[int]] | None:
        """The kept ids per token; None when nothing was truncated (vLLM refuses such a request instead)."""
        if not self._sampling_mask or not row.params.truncates:
            return None
        return [[] if kept is None else kept.tolist() for kept in row.kept]

    # ---------------------------------------------------------------------------------------------------------- text

    def _text(self, row: Row) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(row.tokens, skip_special_tokens=row.params.skip_special_tokens)
        if isinstance(row.stop_reason, str) and (end := text.find(row.stop_reason)) >= 0:
            text = text[: end + len(row.stop_reason) * row.params.include_stop_str_in_output]
        return text

    def _shown(self, token: int, ask: Ask) -> str:
        return f"token_id:{token}" if ask.as_token_ids else self._decoded(token)

    def _decoded(self, token: int) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token]))

    def _completion_logprobs(self, row: Row, ask: Ask) -> dict[str, Any] | None:
        if row.params.logprobs is None:
            return None
        tokens = [self._shown(token, ask) for token in row.tokens]
        starts = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
        tops = [{self._shown(token, ask): lp for token, lp, _ in _with_sampled(row, i)} for i in range(len(row.tokens))]
        return {"text_offset": starts, "token_logprobs": row.logprobs, "tokens": tokens, "top_logprobs": tops}

    def _chat_logprobs(self, row: Row, ask: Ask) -> dict[str, Any] | None:
        if row.params.logprobs is None:
            return None
        content = []
        for i, token in enumerate(row.tokens):
            top = [self._chat_entry(t, lp, ask) for t, lp, _ in _with_sampled(row, i)[: row.params.logprobs]]
            content.append(self._chat_entry(token, row.logprobs[i], ask) | {"top_logprobs": top})
        return {"content": content}

    def _chat_entry(self, token: int, logprob: float, ask: Ask) -> dict[str, Any]:
        text = self._decoded(token)
        shown = f"token_id:{token}" if ask.as_token_ids else text
        return {"token": shown, "logprob": logprob, "bytes": list(text.encode())}


def _token_logprobs(row: Row) -> list[dict[str, Any]]:
    """0.32's entries; the heads hold `logprobs` entries in all, the sampled token first."""
    most = row.params.logprobs or 0
    content = []
    for i, (token, logprob, rank) in enumerate(zip(row.tokens, row.logprobs, row.ranks, strict=True)):
        top = [{"token_id": t, "logprob": lp, "rank": r} for t, lp, r in _with_sampled(row, i)[:most]]
        content.append({"token_id": token, "logprob": logprob, "rank": rank, "top_logprobs": top})
    return content


def _with_sampled(row: Row, i: int) -> list[tuple[int, float, int]]:
    """(id, log-probability, rank) of token i's head: the sampled token, then the best others in order."""
    ids = row.head_ids[i].tolist()
    values = np.maximum(row.head_logprobs[i], FILTERED).tolist()
    sampled = row.tokens[i]
    others = [(t, lp, rank) for rank, (t, lp) in enumerate(zip(ids, values, strict=True), 1) if t != sampled]
    return [(sampled, row.logprobs[i], row.ranks[i]), *others]


def _usage(rows: list[Row]) -> dict[str, Any]:
    prompt, completion = len(rows[0].prompt), sum(len(row.tokens) for row in rows)
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return counts | {"prompt_tokens_details": None, "completion_tokens_details": None}
