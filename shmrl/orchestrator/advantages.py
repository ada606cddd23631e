"""Advantages: from the rewards of one group to one number per episode.

Owned by the orchestrator, called by the train sink once per finished group. GRPO (arXiv:2402.03300) is the group mean
as a baseline; its options are the functions below, each usable alone. Every branch of an episode gets its advantage.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial

from shmrl.config import RunTree
from shmrl.errors import ConfigError, RunError

Advantages = Callable[[Sequence[float], Sequence[int]], list[float]]

STD_EPSILON = 1e-6


def centred(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean. [1, 0, 0, 1] -> [0.5, -0.5, -0.5, 0.5]."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the others (RLOO, arXiv:2402.14740), 0 for a group of one. [1, 0] -> [1, -1]."""
    n = len(rewards)
    return [value * n / (n - 1) for value in centred(rewards)] if n > 1 else [0.0]


def unit_std(values: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """Values over the population standard deviation of the rewards (+ 1e-6); equal rewards stay at 0."""
    deviation = math.sqrt(math.fsum(value * value for value in centred(rewards)) / len(rewards))
    return [value / (deviation + STD_EPSILON) for value in values]


def penalised(rewards: Sequence[float], lengths: Sequence[int], penalty: float) -> list[float]:
    """Reward minus penalty x (sampled tokens / the group's longest): the longest episode pays `penalty` in full."""
    longest = max(max(lengths), 1)
    return [reward - penalty * length / longest for reward, length in zip(rewards, lengths, strict=True)]


def grpo(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    std: bool = False,
    loo: bool = False,
    length_penalty: float = 0.0,
) -> list[float]:
    """GRPO over one group: length penalty first, then the baseline, then the scale."""
    if length_penalty:
        rewards = penalised(rewards, lengths, length_penalty)
    values = leave_one_out(rewards) if loo else centred(rewards)
    return unit_std(values, rewards) if std else values


def load(tree: RunTree) -> Advantages:
    """What `[orchestrator.advantage]` names. A custom function gets (rewards, sampled tokens) of one group."""
    config = tree.orchestrator.advantage
    if config.path is None:
        return partial(grpo, std=config.std, loo=config.leave_one_out, length_penalty=config.length_penalty)
    return partial(_checked, _import(config.path), config.path)


def _import(path: str) -> Callable[..., object]:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"orchestrator.advantage.path = {path!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"orchestrator.advantage.path = {path!r}: a {type(found).__name__} cannot be called")
    return found  # type: ignore[no-any-return]


def _checked(
    function: Callable[..., object], path: str, rewards: Sequence[float], lengths: Sequence[int]
) -> list[float]:
    """The custom function's values, or RunError if they are not one finite number per episode."""
    values = [float(value) for value in function(list(rewards), list(lengths))]  # type: ignore[attr-defined]
    if len(values) != len(rewards) or not all(map(math.isfinite, values)):
        raise RunError(f"{path} answered {values} for a group of {len(rewards)}: one finite number each is needed")
    return values
