"""GEM's environments as sessions: `gem:<id>` of its registry, and whatever factory returns one of them.

GEM (the package gem-llm) has gymnasium's shape: reset -> (observation, info), step -> (observation, reward, terminated,
truncated, info). Its own sandbox finds no interpreter in a virtual environment and counts that as a wrong answer, so
`sandbox_type = "bwrap"` runs in shmrl's instead. Runs in the env workers; imports gem only when it is asked for.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shmrl.env import sandbox
from shmrl.env.interface import Step

PREFIX = "gem:"
_dice = threading.Lock()
"""GEM seeds Python's global generator: whoever draws from it holds this."""


def factory(env_id: str) -> Callable[..., Any]:
    """What builds the environment of "gem:<id>": an attribute of the module where there is one (gem:make), else an id
    of GEM's registry."""
    name = env_id.removeprefix(PREFIX)
    gem = importlib.import_module("gem")
    found = getattr(gem, name, None)
    return found if callable(found) else lambda **args: gem.make(name, **args)


def is_gem(built: Any) -> bool:
    """Whether an object is an environment of GEM."""
    core = sys.modules.get("gem.core")
    return core is not None and isinstance(built, core.Env)


class Sessions:
    """Makes sessions over environments that are used again: some load a data set when they are built.

    `make` builds one more; `first` is there already.
    """

    def __init__(self, make: Callable[[], Any], first: Any) -> None:
        self.make, self.idle = make, deque([first])
        if getattr(first, "sandbox_type", None) == "bwrap":
            _take_over_sandbox()

    def __call__(self) -> Session:
        return Session(self)


class Session:
    """One episode of one environment, taken at reset and given back by close."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._environment: Any = None

    def reset(self, seed: int, **_: Any) -> Step:
        if self._environment is None:
            self._environment = self._sessions.idle.popleft() if self._sessions.idle else self._sessions.make()
        with _dice:
            return Step.first(self._environment.reset(seed=seed % (1 << 32)))  # numpy takes 32 bits

    def step(self, action: str) -> Step:
        if hasattr(self._environment, "sandbox_type"):  # runs programs for seconds, and draws nothing
            return Step.of(self._environment.step(action))
        with _dice:
            return Step.of(self._environment.step(action))

    def close(self) -> None:
        if self._environment is not None:
            self._sessions.idle.append(self._environment)
            self._environment = None


def _take_over_sandbox() -> None:
    """GEM's programs for "bwrap" run in this process's sandbox; there is one from here on."""
    box = sandbox.ensure()
    module: Any = importlib.import_module("gem.utils.sandbox")
    own = module.subprocess_run
    if own.__module__ == __name__:
        return

    def subprocess_run(
        code: str, cmd_list: list[str], sandbox_type: str, stdin: str | None = None, timeout: float = 10
    ) -> tuple[bool, str, str]:
        if sandbox_type != "bwrap":
            return own(code, cmd_list, sandbox_type, stdin, timeout)  # type: ignore[no-any-return]
        outcome = box.python(code, stdin or "", replace(box.limits, wall_s=timeout))
        if outcome.limit == "wall_s":
            raise subprocess.TimeoutExpired("bwrap", timeout)
        limit = f"\nended by the limit {outcome.limit}" if outcome.limit else ""
        return outcome.ok, outcome.stdout, outcome.stderr.strip() + limit

    module.subprocess_run = subprocess_run
