"""`RemoteSession`: the client's end of one session's socket. Opened by `remote.RemoteEnv`, in its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, NoReturn, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from shmrl.config.addresses import redacted
from shmrl.env.interface import Step
from shmrl.env.sessions.frames import CAPACITY_REACHED, EXECUTION_ERROR, VALIDATION_ERROR
from shmrl.errors import EnvError

CLOSE_S = 2.0
"""How long the server may take to say that the slot is free."""


class Answer(BaseModel):
    """What a server sends; its other keys are its own business, here and below."""

    type: str
    data: dict[str, Any]


class ObservationData(BaseModel):
    """Of the answer to reset and step."""

    observation: dict[str, Any] | None = None
    reward: float | None = None
    done: bool | None = None
    metadata: dict[str, Any] | None = None


class StateData(BaseModel):
    """Of the answer to state."""

    model_config = ConfigDict(extra="allow")
    dataset_size: NonNegativeInt | None = None


D = TypeVar("D", bound=BaseModel)


class Refused(EnvError):
    """The server is full, or cannot be reached."""


class RemoteSession:
    """One socket, one environment. Broken after an error of the transport or a timeout; `reset` begins an episode."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse, timeout_s: float | None) -> None:
        self.url, self._socket, self._timeout_s = redacted(url), socket, timeout_s  # the URL is for messages alone
        self.broken = False
        self._state: dict[str, Any] | None = None

    async def reset(self, seed: int | None = None, **data: Any) -> Step:
        """The first observation. EnvError if the environment raises, or if the session is lost."""
        given = {key: value for key, value in {"seed": seed, **data}.items() if value is not None}
        return _step(await self._ask({"type": "reset", "data": given}, ObservationData))

    async def step(self, **action: Any) -> Step:
        """The effect of an action. Example: await session.step(message="5")"""
        return _step(await self._ask({"type": "step", "data": action}, ObservationData))

    async def state(self) -> dict[str, Any]:
        """What the server says of the session: step_count, tools, dataset_size..."""
        return (await self._ask({"type": "state"}, StateData)).model_dump(exclude_unset=True)

    async def has(self) -> dict[str, Any]:
        """`state` as it was at the first call: for what does not change."""
        self._state = self._state or await self.state()
        return self._state

    async def _ask(self, message: dict[str, Any], wanted: type[D]) -> D:
        """The data of the answer. Answers have no numbers: after a timeout the next one would be the wrong one."""
        if self.broken:
            raise EnvError(f"{self.url}: the session was lost before")
        self.broken = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(json.dumps(message))
                received = await self._socket.receive()
        except TimeoutError:
            await self._hang_up()
            raise EnvError(f"{self.url}: no answer to {message['type']} within {self._timeout_s:g} s") from None
        except ConnectionError as error:
            raise EnvError(f"{self.url}: the session is lost: {error}") from None
        except asyncio.CancelledError:
            await self._hang_up()
            raise
        if received.type is not aiohttp.WSMsgType.TEXT:
            code = self._socket.close_code
            raise EnvError(f"{self.url}: the session is lost, and with it its episode (closed with {code})")
        try:
            answer = Answer.model_validate_json(received.data)
            data = None if answer.type == "error" else wanted.model_validate(answer.data)
        except ValidationError:
            raise EnvError(f"{self.url}: no answer to {message['type']}: {received.data[:200]!r}") from None
        if data is None:
            self._raise(answer.data)
        self.broken = False
        return data

    def _raise(self, error: dict[str, Any]) -> NoReturn:
        code = error.get("code")
        self.broken = code not in (VALIDATION_ERROR, EXECUTION_ERROR)
        kind = Refused if code == CAPACITY_REACHED else EnvError
        raise kind(f"{self.url}: {error.get('message')} ({code}){_errors(error)}")

    async def _hang_up(self) -> None:
        """Close without waiting for the peer, who may be stuck: the server ends the environment."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(0.5):
                await self._socket.close()

    async def close(self) -> None:
        """End the session; the server closes its environment."""
        if not self.broken:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await self._socket.send_str('{"type":"close"}')
                async with asyncio.timeout(CLOSE_S):  # it hangs up when the slot is free
                    await self._socket.receive()
        self.broken = True
        await self._hang_up()


def _step(data: ObservationData) -> Step:
    observation = data.observation or {}
    return Step(observation, data.reward, bool(data.done), bool(observation.get("truncated")), data.metadata or {})


def _errors(data: dict[str, Any]) -> str:
    found = data.get("errors")
    return f": {json.dumps(found)[:500]}" if found else ""
