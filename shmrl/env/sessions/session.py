"""A session process: one environment instance, driven by what its client sends. Parses, validates, runs, answers.

Forked by the template process (`template.py`), or started as `python -m shmrl.env.sessions.session FD` where the
environment has threads, which no fork copies. Requests come over a `BlockingLink`, one at a time:

    server -> session   start (0, settings)                first
                        ws (0, text)                       a client's frame
                        reset | step | state (0, body)     of an HTTP request
                        end (0, b"")                       close the environment and exit
    session -> server   frame (GOES_ON or LAST, text)      the answer to a frame; after LAST the socket is closed
                        http (status, body)
"""

from __future__ import annotations

import inspect
import logging
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import setproctitle
from pydantic import BaseModel, ValidationError

from shmrl.env.death import CHILD_SUBREAPER, PDEATHSIG, die_with, prctl
from shmrl.env.interface import Step, action_model
from shmrl.env.link import BlockingLink
from shmrl.env.sessions import frames
from shmrl.env.sessions.frames import EXECUTION_ERROR, INVALID_JSON, SESSION_ERROR, UNKNOWN_TYPE, VALIDATION_ERROR
from shmrl.env.starting import log_of
from shmrl.errors import EnvError
from shmrl.monitor.log import setup
from shmrl.wire import unpack

log = logging.getLogger(__name__)
GOES_ON, LAST = 0, 1
SEED_BITS = 31  # of the seeds that are drawn here: numpy's generators take no more


class Session:
    """The environment as its client sees it: reset, step, state. What the environment raises comes out as it is."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.action: type[BaseModel] = action_model(environment) or frames.TextAction
        self.episode_id: str | None = None
        self.steps = 0

    def reset(self, data: frames.ResetData) -> dict[str, Any]:
        """Begin an episode. The environment gets of `data` what its reset takes."""
        given = data.model_dump(exclude_unset=True)
        self.episode_id, self.steps = given.get("episode_id"), 0
        seed, arguments = self._arguments(given)
        answer = self.environment.reset(**({} if seed is None else {"seed": seed}), **arguments)
        return self._observed(Step.first(answer))

    def _arguments(self, given: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
        """(seed, the other keyword arguments). Without a seed one is drawn: processes of one template are alike."""
        takes = inspect.signature(self.environment.reset).parameters
        seed = given.pop("seed", None)
        if seed is None and "seed" in takes:
            seed = random.SystemRandom().getrandbits(SEED_BITS)
        if hasattr(self.environment, "tasks") and "row_index" not in takes:
            return self._row(given.get("row_index"), seed or 0, bool(given.get("evaluation")))
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        protocol = ("episode_id", "row_index", "evaluation")  # not swept into a task's own data
        names = [name for name in given if name in takes or (anything and name not in protocol)]
        return seed if anything or "seed" in takes else None, {name: given[name] for name in names}

    def _row(self, row: int | None, seed: int, evaluation: bool) -> tuple[int, dict[str, Any]]:
        """Of an environment with a task set: the task at `row`, else the one that the seed falls on."""
        tasks = self.environment.tasks("eval" if evaluation else "train")
        size = _size(tasks)
        index = seed if row is None else row
        task = tasks[index % size if size else index]
        return task.seed, task.data

    def step(self, data: dict[str, Any]) -> dict[str, Any]:
        """The effect of one action. ValidationError for an action that is none."""
        action = self.action.model_validate(data)
        self.steps += 1
        return self._observed(Step.of(self.environment.step(_as_taken(action))))

    def state(self) -> dict[str, Any]:
        """An OpenEnv environment's own state, else what every session has."""
        own = getattr(self.environment, "state", None)
        if own is not None and hasattr(own, "model_dump"):
            return {"episode_id": self.episode_id, "step_count": self.steps, **own.model_dump()}
        has = self.environment
        return frames.TextState(
            episode_id=self.episode_id,
            step_count=self.steps,
            dataset_size=dataset_size(has),
            tools=list(getattr(has, "tools", ())),
            rubric_components=list(getattr(has, "rubric_components", ())),
        ).model_dump()

    def _observed(self, step: Step) -> dict[str, Any]:
        """The envelope: reward and done beside the observation, metadata inside it and, unless empty, beside it."""
        metadata = dict(step.info)
        if not self.steps and isinstance(prompt := getattr(self.environment, "system_prompt", None), str):
            metadata.setdefault("system_prompt", prompt)
        if isinstance(step.observation, Mapping):
            observation = {"metadata": metadata, **step.observation}
        else:
            text = frames.TextObservation(prompt=step.observation, truncated=step.truncated)
            observation = {**text.model_dump(), "metadata": metadata}
        envelope = {"observation": observation, "reward": step.reward, "done": step.done}
        return {**envelope, "metadata": metadata} if metadata else envelope

    def close(self) -> None:
        if callable(close := getattr(self.environment, "close", None)):
            close()


def _as_taken(action: BaseModel) -> Any:
    return action.message if isinstance(action, frames.TextAction) else action


def dataset_size(environment: Any) -> int:
    """How many rows there are; 0 where that is not known."""
    if isinstance(size := getattr(environment, "dataset_size", None), int):
        return size
    return _size(environment.tasks("train")) if hasattr(environment, "tasks") else 0


def _size(tasks: Any) -> int:
    if not hasattr(tasks, "__getitem__"):
        raise EnvError("the task set is an iterator: rows by index need a sequence, or shmrl.env.Generated")
    size = getattr(tasks, "size", None) if hasattr(tasks, "make") else len(tasks)
    return int(size or 0)


# -------------------------------------------------------------------------------------------------------- messages


def answer(session: Session, text: str) -> tuple[int, str]:
    """(GOES_ON or LAST, the answer to a client's frame); the answer to `close` is empty."""
    try:
        message = frames.loads(text)
    except ValueError as error:
        return GOES_ON, frames.error_frame(INVALID_JSON, f"Invalid JSON: {error}")
    if not isinstance(message, dict):
        return LAST, frames.error_frame(SESSION_ERROR, f"a message is a JSON object, not a {type(message).__name__}")
    kind = message.get("type", "")
    if not isinstance(kind, str) or kind not in frames.MESSAGES:
        return GOES_ON, frames.error_frame(UNKNOWN_TYPE, f"Unknown message type: {kind}"[:300])
    try:
        return _run(session, frames.MESSAGES[kind].model_validate(message))
    except ValidationError as error:
        return GOES_ON, frames.error_frame(VALIDATION_ERROR, "Invalid message", errors=frames.faults(error))
    except Exception as error:
        log.info("the environment raised", exc_info=True)
        return GOES_ON, frames.error_frame(EXECUTION_ERROR, str(error) or type(error).__name__)


def _run(session: Session, message: Any) -> tuple[int, str]:
    if isinstance(message, frames.Reset):
        return GOES_ON, frames.frame("observation", session.reset(message.data))
    if isinstance(message, frames.StepMessage):
        return GOES_ON, frames.frame("observation", session.step(message.data))
    if isinstance(message, frames.Mcp):
        refusal = {"code": -32603, "message": "Environment does not support MCP", "data": None}
        return GOES_ON, frames.frame("mcp", {"jsonrpc": "2.0", "id": message.data.get("id"), "error": refusal})
    return (GOES_ON, frames.frame("state", session.state())) if message.type == "state" else (LAST, "")


def answer_http(session: Session, method: str, body: bytes) -> tuple[int, str]:
    """(status, JSON) of one stateless request: POST /reset, POST /step, GET /state."""
    try:
        value = frames.loads(body or b"{}")
    except ValueError as error:
        return 422, frames.dumps({"detail": [{"type": "json_invalid", "loc": ["body"], "msg": str(error)}]})
    try:
        if method == "state":
            return 200, frames.dumps(session.state())
        if method == "reset":
            return 200, frames.dumps(session.reset(frames.HttpReset.model_validate(value)))
        return 200, frames.dumps(session.step(frames.HttpStep.model_validate(value).action))
    except ValidationError as error:
        where = ("body",) if error.title == frames.HttpReset.__name__ else ()
        return 422, frames.dumps(
            {"detail": [{**fault, "loc": (*where, *fault["loc"])} for fault in frames.faults(error)]}
        )
    except Exception as error:
        log.info("the environment raised", exc_info=True)
        return 500, frames.dumps({"detail": str(error) or type(error).__name__})


# --------------------------------------------------------------------------------------------------------- process


def run(end: socket.socket, make: Callable[[Mapping[str, Any]], Any]) -> None:
    """Be the session at the other end of `end`, until the server says so or is gone.

    make: gives the environment, from the settings that the server sends first.
    """
    prctl(PDEATHSIG, signal.SIGKILL)  # with the template, which reaps
    prctl(CHILD_SUBREAPER, 1)  # what the environment leaves behind stays in reach of whoever buries this process
    link = BlockingLink(end)
    if (start := link.receive()) is None:
        return
    die_with(end)
    settings = unpack(start[2])
    role = f"{settings['name']}/{settings['number']}"
    setproctitle.setproctitle(f"shmrl:env-session {role}")
    setup(role, log_of(settings))
    if "numpy" in sys.modules:  # its generator is the template's; `random` looks after itself
        sys.modules["numpy"].random.seed()
    serve(link, make(settings))


def serve(link: BlockingLink, environment: Any) -> None:
    """Answer what comes over `link` until `end`; then close the environment."""
    session = Session(environment)
    while (received := link.receive()) is not None:
        _, kind, payload = received
        if kind == "end":
            break
        if kind == "ws":
            number, text = answer(session, payload.decode())
            link.send(number, "frame", text.encode())
        else:
            number, text = answer_http(session, kind, payload)
            link.send(number, "http", text.encode())
    session.close()


def main(argv: list[str]) -> int:
    from shmrl.env.sessions.template import load

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(argv[0]))
    end.set_inheritable(False)
    run(end, load)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
