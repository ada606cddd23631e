"""Sampling parameters of a request, checked at the door: names, types, ranges and limits, with vLLM's messages.

Parsed in the server's event loop; read by the engine thread. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shmrl.errors import ShmrlError


class BadRequest(ShmrlError):
    """A request this server cannot serve; becomes an HTTP answer in vLLM's error form."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        self.param, self.status = param, status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows. max_logprobs -1: the whole vocabulary."""

    vocab: int
    max_model_len: int
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's parameters; names and meanings are vLLM's. temperature 0 is greedy, top_k 0 (or -1) no limit.

    Example: SamplingParams.parse({"temperature": 0.7, "top_k": 40, "top_p": 0.9, "logprobs": 16}, limits)
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    routed_experts_prompt_start: int = 0

    @property
    def truncates(self) -> bool:
        """Whether the sampler keeps only a part of the vocabulary."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @classmethod
    def parse(cls, given: Mapping[str, Any], limits: Limits) -> SamplingParams:
        """Checked parameters; BadRequest names parameter and value. None is the default; for max_tokens, no limit."""
        unknown = sorted(set(given) - {field.name for field in fields(cls)})
        if unknown:
            raise BadRequest(f"unknown sampling parameter {unknown[0]!r} (parameter={unknown[0]})", param=unknown[0])
        values = {name: _typed(name, value) for name, value in given.items() if value is not None}
        if "max_tokens" in given and given["max_tokens"] is None:
            values["max_tokens"] = None
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if values.get("logprobs") == -1:
            values["logprobs"] = limits.vocab
        params = cls(**values)
        params._check(limits)
        return params

    def _check(self, limits: Limits) -> None:
        most = limits.vocab if limits.max_logprobs == -1 else limits.max_logprobs
        if self.logprobs is not None and self.logprobs > most:
            what = f"Requested sample logprobs of {self.logprobs}, which is greater than max allowed: {most}"
            raise BadRequest(f"{what} (parameter=logprobs, value={self.logprobs})", param="logprobs")
        for name, ok, rule in (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < 1e6, "at least 0 and finite"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "-1 or 0 (no limit), or at least 1"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "-1 or at least 0"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "in [0, max_tokens]"),
            ("stop", all(self.stop), "without empty strings"),
            ("stop_token_ids", all(0 <= i < limits.vocab for i in self.stop_token_ids), f"below {limits.vocab}"),
            ("routed_experts_prompt_start", self.routed_experts_prompt_start >= 0, "at least 0"),
        ):
            if not ok:
                raise refused(name, getattr(self, name), f"must be {rule}")


def refused(name: str, value: object, rule: str) -> BadRequest:
    """The error for one parameter's value, in vLLM's wording."""
    shown = list(value) if isinstance(value, tuple) else value
    return BadRequest(f"{name} {rule}, got {shown!r}. (parameter={name}, value={shown!r})", param=name)


_KINDS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "min_p": (int, float),
    "ignore_eos": (bool,),
    "include_stop_str_in_output": (bool,),
    "skip_special_tokens": (bool,),
}


def _typed(name: str, value: Any) -> Any:
    if name == "stop":
        return _items(name, [value] if isinstance(value, str) else value, str)
    if name == "stop_token_ids":
        return _items(name, value, int)
    kinds = _KINDS.get(name, (int,))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise refused(name, value, f"must be {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _items(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise refused(name, value, f"must be a list of {kind.__name__}")
    return tuple(value)
