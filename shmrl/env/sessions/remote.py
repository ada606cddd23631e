"""`RemoteEnv`: sessions of a server that someone else runs, as a client, and as an environment of a run.

In a run it stands in an env worker (`env.url`, or `env.id = "openenv:<url>"`), where our own loop drives it, so that
its episodes are captured as any other. Sockets stay open from episode to episode. A session that breaks takes its
episode with it: there is no silent new environment in the middle of one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from shmrl.config.addresses import redacted
from shmrl.env.interface import Environment, Episode, Generated, Split, Step, converse, task_seed
from shmrl.env.sessions.client import Refused, RemoteSession
from shmrl.errors import EnvError, told
from shmrl.types import Task

if TYPE_CHECKING:
    from shmrl.env.model import Model

T = TypeVar("T")
log = logging.getLogger(__name__)
CONNECT_S = 10.0
"""How long a server may take to let one in, or to say how it is."""
DIALS = 4
"""How often a server that is full, or not there, is asked; a slot may just be on its way to be free."""
MAX_REPLY = 100 << 20
SEED_MASK = (1 << 31) - 1  # numpy's generators take no more


class RemoteEnv(Environment):
    """Sessions of one server, or of several replicas of it in turn.

    Args:
        urls: http(s)://host:port, with the server's token as its path where it has one; or several of them.
        action_field: the field of an action that takes the model's reply. observation_field: the field of an
            observation that is the user's message; without it `prompt`, else the whole observation as JSON.
        timeout_s: for one message. 0: none.
        sessions: how many a run opens at most for training and for evaluation, for the message of a refusal.
        evaluation_sessions: how many evaluations share, opened at the first of them.
        seed: of the task set, which is seeds without end; with a data set on the server, its rows in turn.

    Example:
        async with RemoteEnv("http://127.0.0.1:8000").session() as session:
            print((await session.reset(seed=1)).text, (await session.step(message="5")).reward)
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        action_field: str = "message",
        observation_field: str | None = None,
        timeout_s: float = 300.0,
        sessions: Sequence[int] = (),
        evaluation_sessions: int = 1,
        seed: int = 0,
    ) -> None:
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        self.action_field, self.observation_field = action_field, observation_field
        self.timeout_s, self.sessions, self.seed = timeout_s or None, sessions, seed
        self._turn = count()
        self._http: aiohttp.ClientSession | None = None
        self._idle: list[RemoteSession] = []
        self._idle_evaluation: list[RemoteSession] = []
        self._evaluating = asyncio.Semaphore(evaluation_sessions)
        self._complained = False

    # ------------------------------------------------------------------------------------------------------ as a client

    async def check(self) -> str:
        """A line per server: whether it answers and has a session to give, or why not. Raises nothing for that."""
        self._complained = True  # by what is returned
        try:
            return "\n".join([await self._check(url) for url in self.urls])
        finally:
            await self.teardown()

    async def _check(self, url: str) -> str:
        try:
            session = await self._dial(url)
            try:
                return f"{redacted(url)}: ok, {json.dumps(await session.state())}"
            finally:
                await session.close()
        except EnvError as error:
            return str(error)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """A session for a block of code."""
        session: RemoteSession | None = None
        try:
            session = await self._open()
            yield session
        finally:
            if session is not None:
                await session.close()
            if not self._idle:
                await self.teardown()

    # ------------------------------------------------------------------------------------------- as an environment

    async def setup(self) -> None:
        """Reach every server. EnvError if one does not answer; no session is opened."""
        for url in self.urls:
            await self._retry(partial(self._healthy, url))

    async def teardown(self) -> None:
        sessions = [*self._idle, *self._idle_evaluation]
        self._idle, self._idle_evaluation = [], []
        await asyncio.gather(*(session.close() for session in sessions))
        if self._http is not None:
            await self._http.close()
            self._http = None

    def tasks(self, split: Split) -> Generated:
        data = {"evaluation": True} if split == "eval" else {}
        return Generated(
            lambda i: Task(f"{split}-{i}", {"index": i, **data}, task_seed(self.seed, split, i) & SEED_MASK)
        )

    async def rollout(self, task: Task, model: Model) -> Episode:
        """Evaluations share their sessions; every other episode under way has one of its own."""
        if not task.data.get("evaluation"):
            return await self._play_in(self._idle, task, model)
        async with self._evaluating:
            return await self._play_in(self._idle_evaluation, task, model)

    async def _play_in(self, idle: list[RemoteSession], task: Task, model: Model) -> Episode:
        """One episode in a session that is idle, or in a new one; an unbroken one is idle again after it."""
        session = idle.pop() if idle else await self._open()
        try:
            return await self._play(session, task, model)
        finally:
            if session.broken:
                await session.close()
            else:
                idle.append(session)

    async def _play(self, session: RemoteSession, task: Task, model: Model) -> Episode:
        data: dict[str, Any] = {"evaluation": task.data.get("evaluation")}
        if size := (await session.has()).get("dataset_size"):
            data["row_index"] = task.data["index"] % size
        first = await session.reset(task.seed, **data)

        async def step(reply: str) -> Step:
            return self._said(await session.step(**{self.action_field: reply}))

        return await converse(self._said(first), step, model)

    def _said(self, step: Step) -> Step:
        """The step with the observation that the model is to see."""
        if self.observation_field is None:
            return step
        assert not isinstance(step.observation, str)
        text = step.observation.get(self.observation_field)
        if not isinstance(text, str):
            raise EnvError(f"{self.observation_field!r} is no text of the observation {dict(step.observation)!r}"[:500])
        return Step(text, step.reward, step.done, step.truncated, step.info)

    # ------------------------------------------------------------------------------------------------------- dialling

    async def _open(self) -> RemoteSession:
        return await self._dial(self.urls[next(self._turn) % len(self.urls)])

    async def _dial(self, url: str) -> RemoteSession:
        """A session that the server has admitted. Its first refusal is told at once; after a few it is an EnvError."""
        return await self._retry(partial(self._connect, url))

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        dials = 1
        while True:
            try:
                return await attempt()
            except Refused as error:
                if not self._complained:
                    log.warning("%s%s", error, self._sum())
                    self._complained = True
                if dials == DIALS:
                    raise EnvError(f"{error}{self._sum()}") from None
            await asyncio.sleep(random.uniform(0.05, 0.35) * 2**dials)
            dials += 1

    def _sum(self) -> str:
        if not self.sessions:
            return ""
        train, evaluation = self.sessions
        return (
            f". This run opens up to {train + evaluation} sessions here: {train} (orchestrator.max_inflight) and "
            f"{evaluation} for evaluation. Raise the server's max_concurrent_envs, or lower max_inflight"
        )

    async def _connect(self, url: str) -> RemoteSession:
        """Connect and ask for the state: a server accepts first and refuses afterwards."""
        async with self._reaching(url):
            try:
                socket = await self._client().ws_connect(f"{url}/ws", max_msg_size=MAX_REPLY, compress=0)
            except aiohttp.WSServerHandshakeError as error:
                token = "; the URL needs the server's token as its path" if error.status == 401 else ""
                raise EnvError(f"{redacted(url)} answers {error.status}{token}") from None
        session = RemoteSession(url, socket, self.timeout_s)
        try:
            await session.has()
        except BaseException:
            await session.close()
            raise
        return session

    async def _healthy(self, url: str) -> None:
        async with self._reaching(url), self._client().get(f"{url}/health") as response:
            if response.status >= 500:
                raise Refused(f"{redacted(url)} answers {response.status}")

    @asynccontextmanager
    async def _reaching(self, url: str) -> AsyncIterator[None]:
        """Refused where nobody is, or where who is there does not answer in time."""
        limit_s = min(CONNECT_S, self.timeout_s or CONNECT_S)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise Refused(f"{redacted(url)} cannot be reached: no answer within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            refused = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            number = refused.errno if isinstance(refused, OSError) else None
            why = os.strerror(number) if number is not None and number > 0 else told(error)  # names have negative ones
            raise Refused(redacted(f"{url} cannot be reached: {why}")) from None

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
        return self._http
