"""Sources: the orchestrator's side of one environment each: its env servers, its tasks by position, its model settings.

Tasks stay in the server (user code never runs here) and are asked for in pages, so that an infinite task set costs
nothing and a position is all that a resumed run needs. Used by the dispatcher and the sinks, in the orchestrator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shmrl.config import EvalSource, RunTree, TrainSource
from shmrl.errors import EnvError, NodeError, RunError, ServerDied, TasksetError
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.replicas import RESUME_S, Replica, Replicas
from shmrl.orchestrator.together import together
from shmrl.types import ErrorInfo, Task

log = logging.getLogger(__name__)

PAGE = 64
HEALTH_S = 5.0


class Source:
    """Source `index` of the run, in config order.

    `position` counts the tasks it has given out. `scores_groups`: its environment sees a group's episodes together
    (`score_group`), so that a group is one request. `engines`: the urls of those that serve the policy.
    """

    config: TrainSource | EvalSource

    def __init__(self, tree: RunTree, index: int, replicas: Sequence[Replica], engines: list[str]) -> None:
        self.split, self.config = tree.sources[index]
        self.replicas = Replicas(self.config.name, replicas)
        self.engines = engines
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

    def log_of(self, error: ErrorInfo) -> Path | None:
        """The env server's log, if it has this error's traceback and is a file of this run."""
        path = self._tree.run.output_dir / "logs" / "latest" / "envs" / self.split / f"{self.name}.log"
        return path if error.where and path.exists() else None

    async def connect(self, timeout_s: float, arenas: Arenas, *, resumed: bool = False) -> None:
        """Wait until every replica is ready; one that a resumed run has lost before is not waited for long. RunError if
        one cannot do what this run needs: keep blocks that the ranks can read, demonstrate."""

        async def greet(replica: Replica) -> None:
            brief = resumed and len(self.replicas.every) > 1
            try:
                await self._greet(replica, min(timeout_s, RESUME_S) if brief else timeout_s, arenas)
            except (ServerDied, NodeError) as error:
                if not brief or not self.replicas.lose(replica, error):
                    raise

        await together(*[greet(replica) for replica in self.replicas.every])
        serve, count = self.config.serve, len(self.replicas.every)
        if count > 1:
            log.info(
                "source %r: %d replicas on %s, in all %d workers and %d episodes at once",
                self.name, count, ", ".join(one.place.node for one in self.replicas.every),
                count * serve.pool.most, count * serve.max_concurrent,
            )  # fmt: skip

    async def _greet(self, replica: Replica, timeout_s: float, arenas: Arenas) -> None:
        await replica.client.connect(timeout_s)
        info = await replica.client.info()
        self.scores_groups = bool(info["scores_groups"])
        where = f"source {self.name!r} ({info['env_id']} at {replica.place.address})"
        if self.split == "train":
            await self._meet(replica, info, arenas, where)
        if self.split == "train" and self._tree.warmup.steps and not info["demonstrates"]:
            raise RunError(f"{where} has no demonstrate(), which warmup.steps = {self._tree.warmup.steps} needs")

    async def _meet(self, replica: Replica, info: dict[str, Any], arenas: Arenas, where: str) -> None:
        """Its arena: this run's own, or another node's that can be reached."""
        replica.origin = info["origin"] or ""
        url = replica.place.node_url or info["node"]
        if replica.origin != arenas.local.origin:
            there = f"{where} keeps payloads in {info['arena'] or 'no arena'}, this run's is {arenas.local.address}"
            if self._tree.arena.transport == "required":
                raise RunError(f"{there}, and arena.transport = 'required' allows shared memory alone")
            if not replica.origin or not url:
                raise RunError(f"{there}, and no node server is known for it")
        log.info(
            "transport of %s: %s",
            where,
            "shared memory" if replica.origin == arenas.local.origin else f"http from {url}",
        )
        await arenas.join(replica.origin, replica.place.node or replica.host, url)

    async def take_over(self, run: str) -> None:
        """What an orchestrator before this one had asked for ends."""
        await together(*[replica.client.take_over(run) for replica in self.replicas.alive])

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*[replica.client.close() for replica in self.replicas.every])

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
            page = await self._tasks(len(found), min(PAGE, n - len(found)))
            if not page:
                break
            found += page
        if not found:
            raise TasksetError(f"source {self.name!r} has no {self.split} tasks")
        return found

    async def _load(self, index: int) -> None:
        page = await self._tasks(index, PAGE)
        if len(page) < PAGE:
            self._size = index + len(page) if page else await self._end(index)
        if self._size == 0:
            raise TasksetError(f"source {self.name!r} has no {self.split} tasks")
        self._first, self._page = index, page

    async def _end(self, beyond: int) -> int:
        """How many tasks there are: `beyond` at most, where a run that went on in a new process may stand."""
        size = 0
        while size < beyond:
            middle = (size + beyond) // 2
            if await self._tasks(middle, 1):
                size = middle + 1
            else:
                beyond = middle
        return size

    async def _tasks(self, start: int, n: int) -> list[Task]:
        """Every replica has the same ones."""
        while True:
            replica = self.replicas.alive[0]
            try:
                return await replica.client.tasks(self.split, start, n)
            except ServerDied as error:
                if not self.replicas.lose(replica, error):
                    raise

    async def rss_bytes(self) -> int | None:
        """Of all its replicas that answer; None if none does."""
        found: list[int] = []

        async def ask(replica: Replica) -> None:
            with contextlib.suppress(EnvError, TimeoutError):  # an episode will say so
                async with asyncio.timeout(HEALTH_S):
                    found.append((await replica.client.health())["rss_bytes"])

        await asyncio.gather(*map(ask, self.replicas.alive))
        return sum(found) if found else None

    def seed(self, *parts: object) -> int:
        """A 31-bit seed of the run's seed, this source and the parts: the same in every attempt."""
        text = "/".join(map(str, (self._tree.run.seed, self.name, *parts)))
        return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "little") >> 1

    def model(self, version: int, group_id: str, host: str) -> dict[str, Any]:
        """What an episode needs to know of the engine, at this policy version; a group's prefix stays on one engine.

        host: of the replica that plays it. An engine on the same host is asked first, where some are on others.
        """
        tree = self._tree
        near = [url for url in self.engines if urlsplit(url).hostname == host]
        return {
            "urls": list(self.engines),
            "near": near if len(near) < len(self.engines) else [],
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
