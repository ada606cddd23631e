"""Request bodies of the three generating routes, checked and turned into (prompt ids, sampling parameters).

vLLM's names throughout. What this engine does not implement is refused by name, never ignored; only values that mean
"off" are dropped. Event loop of the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from shmrl.inference.embedded.params import BadRequest, Limits, SamplingParams, refused

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_ROUTING = {"model", "stream", "request_id", "cache_salt", "priority", "user"}  # carry nothing the draw depends on
_OFF: dict[str, tuple[Any, ...]] = {  # values that mean "off"; a parameter of ours that is None means its default
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "echo": (False, None),
    "stream_options": ({"include_usage": False}, None),
    "prompt_logprobs": (None,),
    "response_format": ({"type": "text"}, None),
    "tool_choice": ("none", "auto", None),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for.

    Example: Ask(prompt=[72, 105], params=SamplingParams(max_tokens=4), token_ids=True)
    """

    prompt: list[int]
    params: SamplingParams
    stream: bool = False
    token_ids: bool = False
    as_token_ids: bool = False
    request_id: str | None = None


def parse_generate(body: Mapping[str, Any], limits: Limits) -> Ask:
    """/inference/v1/generate: {token_ids, sampling_params}."""
    left = _without_off(body, _ROUTING | {"token_ids", "sampling_params"})
    sampling = left.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise refused("sampling_params", sampling, "must be an object")
    if left.get("stream"):
        raise refused("stream", True, "must be false on /inference/v1/generate")
    params = SamplingParams.parse(_drop_off(sampling), limits)
    return _ask(left.get("token_ids"), "token_ids", params, limits, request_id=left.get("request_id"))


def parse_completion(body: Mapping[str, Any], limits: Limits, tokenizer: PreTrainedTokenizerBase) -> Ask:
    """/v1/completions: prompt as text or token ids."""
    flags = {"return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"}
    left = _without_off(body, _ROUTING | _SAMPLING | flags | {"prompt"})
    prompt = left.get("prompt")
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt, add_special_tokens=left.get("add_special_tokens", True))
    params = SamplingParams.parse({k: v for k, v in left.items() if k in _SAMPLING}, limits)
    return _ask(prompt, "prompt", params, limits, left)


def parse_chat(body: Mapping[str, Any], limits: Limits, tokenizer: PreTrainedTokenizerBase) -> Ask:
    """/v1/chat/completions: messages through the model's chat template."""
    flags = {"return_token_ids", "return_tokens_as_token_ids", "add_generation_prompt", "continue_final_message"}
    ours = {"messages", "top_logprobs", "max_completion_tokens", "tools", "chat_template_kwargs"}
    left = _without_off(body, _ROUTING | _SAMPLING | flags | ours)
    sampling = {k: v for k, v in left.items() if k in _SAMPLING and k != "logprobs"}
    sampling["max_tokens"] = left.get("max_completion_tokens") or left.get("max_tokens")
    if left.get("logprobs"):
        sampling["logprobs"] = left.get("top_logprobs") or 0
    return _ask(_render(left, tokenizer), "messages", SamplingParams.parse(sampling, limits), limits, left)


def _render(left: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        raise BadRequest("this model has no chat template: use /v1/completions")
    messages = left.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise refused("messages", messages, "must be a list of at least one {role, content}")
    try:
        text = tokenizer.apply_chat_template(
            [{**message, "content": _plain(message.get("content"))} for message in messages],
            tools=left.get("tools"),
            add_generation_prompt=left.get("add_generation_prompt", True),
            continue_final_message=left.get("continue_final_message", False),
            tokenize=False,
            **(left.get("chat_template_kwargs") or {}),
        )
    except Exception as error:
        raise BadRequest(f"the chat template failed: {type(error).__name__}: {error}", param="messages") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _plain(content: Any) -> Any:
    """Text parts as one text; anything that is not text is refused."""
    if not isinstance(content, list):
        return content
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
        raise refused("messages", content, "may hold text parts only")
    return "".join(part["text"] for part in content)


def _drop_off(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if not (key in _OFF and value in _OFF[key])}


def _without_off(body: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    left = _drop_off(body)
    unknown = sorted(set(left) - known)
    if unknown:
        raise BadRequest(f"this engine does not know {unknown[0]!r} (parameter={unknown[0]})", param=unknown[0])
    return left


def _ask(
    prompt: Any,
    name: str,
    params: SamplingParams,
    limits: Limits,
    body: Mapping[str, Any] | None = None,
    request_id: str | None = None,
) -> Ask:
    body = body or {}
    if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
        shown = prompt if not isinstance(prompt, list) else prompt[:8]
        raise refused(
            name, shown, "must be one non-empty prompt, as a list of token ids" + (" or a text" * (name == "prompt"))
        )
    if bad := [token for token in prompt if not 0 <= token < limits.vocab]:
        raise refused(name, bad[0], f"must hold token ids in [0, {limits.vocab})")
    if len(prompt) >= limits.max_model_len:
        what = f"This model's maximum context length is {limits.max_model_len} tokens. However, your request has "
        raise BadRequest(f"{what}{len(prompt)} input tokens and must leave room for one more.", param="input_tokens")
    if params.routed_experts_prompt_start > len(prompt):
        start = params.routed_experts_prompt_start
        raise refused("routed_experts_prompt_start", start, f"must be at most the prompt's {len(prompt)} tokens")
    return Ask(
        prompt,
        params,
        stream=bool(body.get("stream")),
        token_ids=bool(body.get("return_token_ids")),
        as_token_ids=bool(body.get("return_tokens_as_token_ids")),
        request_id=request_id or body.get("request_id"),
    )
