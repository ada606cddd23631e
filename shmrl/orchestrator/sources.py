"""Sources: the orchestrator's side of one env server each: its client, its tasks by position, its model settings.

Tasks stay in the server (user code never runs here) and are asked for in pages, so that an infinite task set costs
nothing and a position is all that a resumed run needs. Used by the dispatcher and the sinks, in the orchestrator.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shmrl.config import EvalSource, RunTree, TrainSource
from shmrl.errors import RunError, TasksetError
from shmrl.types import EpisodeResult, Task

PAGE = 64


class Client(Protocol):
    """What is used of `shmrl.env.client.EnvClient`; cancelling the awaiting task cancels the episode at the server."""

    async def connect(self, timeout_s: float = 600.0) -> dict[str, Any]: ...
    async def health(self) -> dict[str, Any]: ...
    async def info(self) -> dict[str, Any]: ...
    async def take_over(self, run: str) -> int: ...
    async def tasks(self, split: str, start: int, n: int) -> list[Task]: ...
    async def run_rollout(
        self, task: Task, *, model: Mapping[str, Any], group_id: str, seed: int, keep: str, tag: str
    ) -> EpisodeResult: ...
    async def run_group(
        self, task: Task, *, model: Mapping[str, Any], group_id: str, seeds: Sequence[int], keep: str, tag: str
    ) -> list[EpisodeResult]: ...
    async def close(self) -> None: ...


class Source:
    """Source `index` of the run, in config order.

    `position` counts the tasks it has given out. `scores_groups`: its environment sees a group's episodes together
    (`score_group`), so that a group is one request.
    """

    config: TrainSource | EvalSource

    def __init__(self, tree: RunTree, index: int, client: Client) -> None:
        self.split, self.config = tree.sources[index]
        self.client = client
        self._index = index
        self.position = 0
        self.scores_groups = False
        self.derive_masks = False  # the engine sends no sampling masks: they are read off its log-probabilities
        self._tree = tree
        self._first, self._page = 0, list[Task]()
        self._size: int | None = None  # of a finite set, once its end was seen
        self._loading = asyncio.Lock()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def group_size(self) -> int:
        """Episodes per group: the source's own, else `orchestrator.group_size`."""
        own = self.config.group_size if isinstance(self.config, TrainSource) else None
        return own or self._tree.orchestrator.group_size

    @property
    def timeout_s(self) -> float | None:
        """How long one episode may take here; None for no limit. Evaluations of a remote source take turns."""
        turns = 1
        if isinstance(self.config, EvalSource) and self.config.env.urls:
            turns = -(-self.config.num_examples * self.config.rollouts_per_example // self.config.env.evaluations)
        return turns * self.config.serve.request_timeout_s or None

    async def connect(self, timeout_s: float, arena: str) -> None:
        """Wait until the server is ready. RunError if it cannot do what this run needs: our arena, demonstrations."""
        await self.client.connect(timeout_s)
        info = await self.client.info()
        self.scores_groups = bool(info["scores_groups"])
        where = f"source {self.name!r} ({info['env_id']} at {self._tree.env_address(self._index)})"
        if self.split == "train" and info["arena"] != arena:
            raise RunError(f"{where} keeps payloads in {info['arena'] or 'no arena'}, this run's is {arena}")
        if self.split == "train" and self._tree.warmup.steps and not info["demonstrates"]:
            raise RunError(f"{where} has no demonstrate(), which warmup.steps = {self._tree.warmup.steps} needs")

    async def next_task(self) -> Task:
        """The task at the current position, which moves on by one."""
        self.position += 1
        return await self.task(self.position - 1)

    async def task(self, position: int) -> Task:
        """Task `position` of this source's split; a finite set starts over. TasksetError if it is empty."""
        async with self._loading:
            while True:
                index = position % self._size if self._size else position
                if self._first <= index < self._first + len(self._page):
                    return self._page[index - self._first]
                await self._load(index)

    async def first_tasks(self, n: int) -> list[Task]:
        """The first n tasks, fewer if the set is smaller: what an evaluation uses."""
        found: list[Task] = []
        while len(found) < n:
            page = await self.client.tasks(self.split, len(found), min(PAGE, n - len(found)))
            if not page:
                break
            found += page
        if not found:
            raise TasksetError(f"source {self.name!r} has no {self.split} tasks")
        return found

    async def _load(self, index: int) -> None:
        page = await self.client.tasks(self.split, index, PAGE)
        if len(page) < PAGE:
            self._size = index + len(page)
        if self._size == 0:
            raise TasksetError(f"source {self.name!r} has no {self.split} tasks")
        self._first, self._page = index, page

    def seed(self, *parts: object) -> int:
        """A 31-bit seed of the run's seed, this source and the parts: the same in every attempt."""
        text = "/".join(map(str, (self._tree.run.seed, self.name, *parts)))
        return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "little") >> 1

    def model(self, version: int, group_id: str) -> dict[str, Any]:
        """What an episode needs to know of the engine, at this policy version; a group's prefix stays on one engine."""
        tree = self._tree
        return {
            "urls": tree.inference.engine_urls,
            "name": tree.model.name,
            "tokenizer": str(tree.initial_weights.resolve()),
            "sampling": self.config.sampling.model_dump(),
            "version": version,
            "cache_salt": f"{tree.run.name}.{version}.{group_id}",  # vLLM takes no slashes in it
            "fields": list(tree.captured),
            "head": tree.trainer.head,
            "max_model_len": tree.inference.max_model_len,
            "logprobs_mode": tree.inference.logprobs_mode,
            "derive_masks": self.derive_masks,
            "timeout_s": tree.inference.request_timeout_s,
        }
