"""The messages of the session protocol: what a client may send, and what it gets back. JSON texts on both ends.

    client -> server   reset {seed, episode_id, row_index, evaluation, ...}, step {action}, state, close, mcp
    server -> client   observation {observation, reward, done, metadata}, state {...}, error {message, code, ...}, mcp

Used by session processes (which parse and validate), by the server (which only writes errors) and by `remote`. Recorded
traffic of OpenEnv 0.10 and AgileRL 2.58 is what the tests compare with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

INVALID_JSON = "INVALID_JSON"
UNKNOWN_TYPE = "UNKNOWN_TYPE"
VALIDATION_ERROR = "VALIDATION_ERROR"
EXECUTION_ERROR = "EXECUTION_ERROR"  # the environment raised; the session goes on
CAPACITY_REACHED = "CAPACITY_REACHED"  # this and the rest end the session
FACTORY_ERROR = "FACTORY_ERROR"
SESSION_ERROR = "SESSION_ERROR"
LONGEST_INPUT = 1000
"""Characters of a wrong value that its client is shown again."""


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetData(BaseModel):
    """What a reset may say; other keys are the environment's own."""

    model_config = ConfigDict(extra="allow")
    seed: StrictInt | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None
    row_index: Annotated[StrictInt, Field(ge=0)] | None = None
    evaluation: StrictBool | None = None


class HttpReset(ResetData):
    """The body of POST /reset, where a seed is not negative."""

    seed: Annotated[StrictInt, Field(ge=0)] | None = None


class Reset(Message):
    type: Literal["reset"]
    data: ResetData = ResetData()


class StepMessage(Message):
    type: Literal["step"]
    data: dict[str, Any]


class HttpStep(BaseModel):
    """The body of POST /step; other keys are ignored."""

    action: dict[str, Any]


class Plain(Message):
    """A message without data."""

    type: Literal["state", "close"]


class Mcp(Message):
    type: Literal["mcp"]
    data: dict[str, Any]


MESSAGES: dict[str, type[Message]] = {"reset": Reset, "step": StepMessage, "state": Plain, "close": Plain, "mcp": Mcp}


class TextAction(BaseModel):
    """The action of an environment whose `step` takes a text."""

    model_config = ConfigDict(extra="forbid")
    message: str
    metadata: dict[str, Any] = Field(default_factory=dict)


class TextObservation(BaseModel):
    """The observation of an environment whose observations are texts."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    prompt: str
    truncated: bool = False
    question: str | None = None
    answer: str | None = None


class TextState(BaseModel):
    """A session's state: how far it is, and what the environment has."""

    episode_id: str | None = None
    step_count: int = 0
    dataset_size: int = 0
    tools: list[Any] = Field(default_factory=list)
    rubric_components: list[Any] = Field(default_factory=list)


def loads(text: str | bytes) -> Any:
    """A JSON value; ValueError for what is none or has no value here: NaN, 1e400, nesting without end."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a number of JSON")
    return number


def dumps(value: Any) -> str:
    """The value as JSON; numpy values as what they mean, other objects as their text. ValueError for NaN."""
    return json.dumps(value, default=_plain, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return list(value) if isinstance(value, (set, frozenset)) else str(value)


def frame(kind: str, data: Mapping[str, Any]) -> str:
    """A message of the server. Example: {"type":"state","data":{"episode_id":null,"step_count":0}}"""
    return dumps({"type": kind, "data": data})


def error_frame(code: str, message: str, **facts: Any) -> str:
    """Example: error_frame("EXECUTION_ERROR", "boom")"""
    return frame("error", {"message": message, "code": code, **facts})


def capacity_frame(active: int, most: int) -> str:
    """What a client is refused with."""
    message = f"Server at capacity: {active}/{most} sessions active. Cannot accept new connections."
    return error_frame(CAPACITY_REACHED, message, active_sessions=active, max_sessions=most)


def faults(error: ValidationError) -> list[Any]:
    """What is wrong with a message, one item per fault: {type, loc, msg, input, url}; long inputs are left out."""
    found: list[Any] = list(error.errors(include_context=False))
    return [fault if len(repr(fault["input"])) <= LONGEST_INPUT else {**fault, "input": "..."} for fault in found]
