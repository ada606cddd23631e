"""The messages of NeMo Gym's `/run`: who asks, for which task, and how an episode failed. Gym's own field names.

An answer has the ids of its request and exactly one of `result` and `failure`. A failure that is handled is an answer
like any other (HTTP 200); a request that is none gets 422 with pydantic's list of errors, as FastAPI gives it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Stage = Literal["admission", "seed", "agent", "verification", "cleanup"]
FAILURE_KINDS = frozenset(
    (
        *("transport_unreachable", "transport_peer_drop", "transport_timeout", "transport_local_resource"),
        *("agent_run_error", "agent_request_failed", "agent_timeout", "agent_command_not_allowed"),
        *("judge_failed", "judge_unparseable", "verifier_error"),
        *("provider_unavailable", "provider_quota_exhausted", "provider_oom_killed"),
        *("session_lost", "session_expired", "session_release_failed"),
        *("cancelled", "kill_shaped", "shutdown", "persistence_failed", "cohort_incomplete"),
    )
)
"""What can be the matter; a server's own kinds are called `<server>:<kind>`."""
LONGEST_REASON = 2000
_OWN_KIND = re.compile(r"[a-z][a-z0-9_]*:[a-z][a-z0-9_]*")
_ATTEMPT = re.compile(r"-a[1-9][0-9]*$")


class Message(BaseModel):
    """A part of the protocol: unknown keys are errors, as they are in Gym."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _no_attempt(rollout_id: str) -> str:
    if _ATTEMPT.search(rollout_id):
        raise ValueError("rollout_id must not end with -a<N>, which is how its attempts are told apart")
    return rollout_id


class EpisodeId(Message):
    """One attempt of one rollout. Example: EpisodeId(rollout_id="17-3", attempt=1).capture_key == "17-3-a1" """

    rollout_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"), AfterValidator(_no_attempt)]
    attempt: Annotated[int, Field(ge=0)] = 0

    @property
    def capture_key(self) -> str:
        """What calls of this episode are known by in the routes of model servers."""
        return f"{self.rollout_id}-a{self.attempt}" if self.attempt else self.rollout_id


class TaskId(Message):
    """A task of a taskset, which is called `<environment>:<taskset>`. Example: "rev:train", "17" """

    taskset: Annotated[str, Field(min_length=1)]
    task_id: Annotated[str, Field(min_length=1)]


class GivenTask(Message):
    """A task with its input, which the protocol of the episode understands."""

    task_id: TaskId
    task_input: dict[str, Any]


class EpisodeRequest(Message):
    """The body of `/run`."""

    episode_id: EpisodeId
    task: GivenTask


def _kind(kind: str | None) -> str | None:
    if kind is not None and kind not in FAILURE_KINDS and not _OWN_KIND.fullmatch(kind):
        raise ValueError(f"failure_kind {kind!r}: neither one of Gym's nor <server>:<kind>")
    return kind


class Failure(Message):
    """How an episode failed. terminal: trying it once more would not help.

    partial_response: what the agent had answered, if it had.

    Example: Failure(failure_reason="sandbox died", terminal=False, stage="seed", failure_kind="session_lost")
    """

    failure_reason: str
    terminal: bool
    failure_kind: Annotated[str | None, AfterValidator(_kind)] = None
    stage: Stage | None = None
    partial_response: dict[str, Any] | None = None

    @classmethod
    def of(cls, reason: str, **rest: Any) -> Failure:
        """A failure whose reason is cut to what the protocol carries, and can be encoded."""
        text = reason.encode("utf-8", "replace").decode()
        return cls(failure_reason=text[:LONGEST_REASON], **rest)


class EpisodeFailed(Exception):
    """Raised by a protocol: the episode is over with this failure, which is its answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.failure_reason)
        self.failure = failure


def answered(request: EpisodeRequest, result: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of an episode that succeeded. EpisodeFailed for a result without a finite `reward`."""
    reward = result.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise EpisodeFailed(
            Failure.of(f"the result's reward is {reward!r}, not a finite number", terminal=True, stage="verification")
        )
    return {**_ids(request), "result": dict(result)}


def failed(request: EpisodeRequest, failure: Failure) -> dict[str, Any]:
    """The answer of an episode that did not."""
    return {**_ids(request), "failure": failure.model_dump(mode="json", exclude_none=True)}


def _ids(request: EpisodeRequest) -> dict[str, Any]:
    return {"episode_id": request.episode_id.model_dump(), "task_id": request.task.task_id.model_dump()}


def encoded(value: Any) -> bytes:
    """The value as JSON. A text that cannot be encoded has its lone surrogates replaced: the peer could not read them.
    ValueError for NaN and infinity."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
