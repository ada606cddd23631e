"""Environments of verifiers v0 (0.1.14): `[legacy] id, args`, loaded by verifiers' own `load_environment`.

The environment runs its rollout with verifiers' OpenAI client, pointed at the worker's endpoint; its rubric scores it,
or, where it has functions of a whole group, the group. Runs in the env workers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import verifiers
from openai import AsyncOpenAI
from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

from shmrl.env.endpoint import SESSION, Endpoint
from shmrl.env.interface import Environment, Episode, Generated, Split
from shmrl.env.model import Model
from shmrl.envs.verifiers import quiet
from shmrl.envs.verifiers.records import failure, scores_of
from shmrl.types import Task


class Client(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """verifiers' own, but an empty reply is a reply: the policy said nothing, and is scored for it."""

    async def raise_from_native_response(self, response: Any) -> None:
        return


@dataclass(slots=True)
class Scored(Episode):
    """An episode with verifiers' state of it, for the rubric's functions of a group."""

    state: Any = None


class Legacy(Environment):
    """A v0 environment as `load_environment` gives it."""

    def __init__(self, env_id: str, /, **args: Any) -> None:
        quiet()
        self.env = verifiers.load_environment(env_id, **args)
        rubric = self.env.rubric
        names = zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True)
        self._weights = {name: float(weight) for name, weight in names}
        self._in_groups = bool(self.env.requires_group_rollouts)
        if self._in_groups:
            self.score_group = self._score_group
        self.endpoint = Endpoint()

    async def setup(self) -> None:
        await self.endpoint.start()
        self._openai = AsyncOpenAI(
            base_url=self.endpoint.url, api_key=self.endpoint.key, max_retries=0, timeout=None
        )  # the model's own requests have the deadline

    async def teardown(self) -> None:
        await self.env._teardown()
        await self._openai.close()
        await self.endpoint.stop()

    def tasks(self, split: Split) -> Iterable[Task]:
        """The rows of the data set, or of the evaluation's; an environment without the latter has one for both."""
        rows = self.env.get_eval_dataset() if split == "eval" else self.env.get_dataset()
        return Generated(lambda index: Task(str(rows[index]["example_id"]), dict(rows[index]), index), len(rows))

    async def rollout(self, task: Task, model: Model) -> Episode:
        name = secrets.token_hex(16)
        session = self.endpoint.open(name, model)
        client = Client(self._openai.with_options(default_headers={SESSION: name}))
        sampling = {key: model.spec.sampling.get(key) for key in ("temperature", "top_p", "max_tokens")}
        try:
            state = await self.env.rollout(task.data, client, model.spec.name, sampling)
        finally:
            self.endpoint.close(name)
        if (error := state.get("error")) is not None:
            raise session.error or failure([{"type": type(error).__name__, "message": str(error)}]) from error
        if self._in_groups:
            return Scored(state=state)
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        return Episode(*scores_of(state, self._weights), _stop(state))

    async def _score_group(self, episodes: list[Scored]) -> None:
        """All functions of the rubric, over the rollouts that did not fail."""
        await self.env.rubric.score_group([episode.state for episode in episodes])
        for episode in episodes:
            episode.reward, episode.rewards, episode.metrics = scores_of(episode.state, self._weights)
            episode.stop_reason = _stop(episode.state)
            await self.env.rubric.cleanup(episode.state)


def _stop(state: Any) -> str:
    """Why it ended. A single turn's own end is none; the model says then how its reply ended."""
    condition = state.get("stop_condition")
    return "stop" if condition in (None, "max_turns_reached") else str(condition)
