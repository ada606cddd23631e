"""Running what a model wrote: one bubblewrap sandbox per program, with limits whose names come back.

`serve.sandbox = "bwrap"` of an env server gives its environments a sandbox: `sandbox().run(...)` in the env workers
(`bwrap.py`). `init.py` is the first process inside, `cgroups.py` bounds all processes of a sandbox together.
"""

from __future__ import annotations

import logging

from shmrl.env.sandbox.bwrap import Limits, Outcome, Sandbox, problem
from shmrl.errors import ConfigError

__all__ = ["Limits", "Outcome", "Sandbox", "ensure", "problem", "sandbox", "use"]

log = logging.getLogger(__name__)
_current: Sandbox | None = None


def use(kind: str | None) -> None:
    """Set `serve.sandbox` for the environments that this process loads."""
    global _current
    _current = None if kind is None else Sandbox()


def sandbox() -> Sandbox:
    """This process's sandbox. ConfigError where the server was not told to have one: there is no running without."""
    if _current is None:
        raise ConfigError("this environment executes what the model writes: set serve.sandbox = 'bwrap'")
    return _current


def ensure() -> Sandbox:
    """This process's sandbox, made and checked where the server was not told to have one: for environments that ask
    for it by an argument of their own."""
    global _current
    if _current is None:
        box = Sandbox()
        box.check()
        log.info("sandbox: %s", box.active())
        _current = box
    return _current
