"""What verifiers recorded of an episode, as an `Episode`: rewards and metrics by name, why it stopped, what failed.

Plain maps in, so that a record from disk is read as a live one is. A v1 record has a trace per agent, a graph of
messages; its paths from the root to the leaves are the branches that the trace's own model recorded, call by call.
Used by `v1` and `v0` in the env workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmrl.env.endpoint import Session
from shmrl.env.interface import Episode
from shmrl.env.model import Model
from shmrl.errors import EnvError

ENDED = ("agent_completed", None)
"""How v1 says that nothing cut the episode short."""


def finished(record: Mapping[str, Any], parts: Mapping[str, Session], model: Model) -> Episode:
    """A recorded episode as ours: its scores, and in `model` the branches of its trainable traces.

    Raises what failed: the model's own error where there was one, else what verifiers recorded (EnvError).
    """
    traces = record["traces"]
    if not record["ok"]:
        for trace in traces:
            if not trace["ok"] and (session := parts.get(trace["id"])) is not None and session.error is not None:
                raise session.error
        raise failure([error for owner in (*traces, record) for error in owner["errors"]])
    for trace in traces:
        if trace["agent"]["trainable"]:
            model.join(parts[trace["id"]].model)
    return episode_of(record)


def failure(errors: Sequence[Mapping[str, Any]]) -> EnvError:
    """Errors that verifiers recorded, oldest first, as the one to raise: the last, with those before as its causes."""
    raised: EnvError | None = None
    for error in errors or [{"type": "Error", "message": "the rollout failed, and verifiers recorded no error"}]:
        last = EnvError(f"{error['type']}: {error['message']}")
        last.__cause__, raised = raised, last
    assert raised is not None
    return raised


def episode_of(record: Mapping[str, Any]) -> Episode:
    """Scores of a v1 episode. Parts of a trace's reward are weighted, and named after its agent where several differ.

    An episode has one reward here, and its branches train with it: the mean over its trainable traces, and so are the
    parts of equal names. Without a trainable trace all of them count.

    Example: {"traces": [{"rewards": {"exact": {"score": 1.0, "weight": 0.5}}, ...}]} -> reward 0.5, rewards exact = 0.5
    """
    traces = [trace for trace in record["traces"] if trace["agent"]["trainable"]] or record["traces"]
    several = len({trace["agent"]["name"] for trace in traces}) > 1
    rewards: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    totals = []
    for trace in traces:
        prefix = f"{trace['agent']['name']}/" if several else ""
        parts = {name: part["score"] * part["weight"] for name, part in trace["rewards"].items() if part is not None}
        totals.append(sum(parts.values()))
        for name, value in parts.items():
            rewards.setdefault(prefix + name, []).append(value)
        for name, value in trace["metrics"].items():
            if value is not None:
                metrics.setdefault(prefix + name, []).append(value)
    stops = [trace["stop_condition"] for trace in traces if trace["stop_condition"] not in ENDED]
    return Episode(_mean(totals), _means(rewards), _means(metrics), stops[0] if stops else "stop")


def scores_of(
    output: Mapping[str, Any], weights: Mapping[str, float]
) -> tuple[float, dict[str, float], dict[str, float]]:
    """(reward, weighted parts, metrics) of a v0 rollout: the score of a function that has a weight is such a part.

    Example: scores_of({"reward": 0.5, "metrics": {"exact": 1.0, "num_turns": 2.0}}, {"exact": 0.5, "num_turns": 0.0})
        == (0.5, {"exact": 0.5}, {"num_turns": 2.0})
    """
    scores = output["metrics"] or {}
    rewards = {name: float(value) * weights[name] for name, value in scores.items() if weights.get(name)}
    metrics = {name: float(value) for name, value in scores.items() if not weights.get(name)}
    return float(output["reward"] or 0.0), rewards, metrics


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: _mean(given) for name, given in values.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
