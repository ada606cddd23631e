"""Environments of the package verifiers: `verifiers:<taskset>` (v1) and `[legacy] id` (v0), which cannot share a venv.

`find` says without importing it whether this interpreter has the right verifiers and the environment's module; `v1`
and `v0` adapt a loaded one, and are imported in the env workers alone. Either brings a client of its own, which is
pointed at the worker's `Endpoint`: there the episode's model records what is trained on.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from shmrl.config.sources import LEGACY
from shmrl.envs import source
from shmrl.envs.modules import module_file

PREFIX = "verifiers:"
V1_FROM, V0_BEFORE = (0, 4), (0, 2)


def is_ours(env_id: str) -> bool:
    """Whether an env id names an environment of verifiers."""
    return env_id.startswith((PREFIX, LEGACY))


def find(env_id: str) -> str | None:
    """What is wrong with such an id here, as one sentence, or None."""
    legacy, name = env_id.startswith(LEGACY), env_id.partition(":")[2]
    kind, wanted = ("a [legacy] environment", "verifiers<0.2") if legacy else ("a taskset of v1", "verifiers>=0.4")
    where = f"env id {env_id!r}: {kind}"
    own = "in an interpreter of its own, named by serve.python"
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        return f"{where} needs verifiers, which {sys.executable} does not have: pip install '{wanted}' {own}"
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not (release < V0_BEFORE if legacy else release >= V1_FROM):
        return f"{where} needs {wanted}, and {sys.executable} has {version}: install that one {own}"
    module = _module(name, legacy)
    if not module.isidentifier():
        return f"{where}: {name!r} is the name of no package"
    if module_file(module) or (not legacy and module_file(f"verifiers.v1.tasksets.{module}")):
        return None
    return f"{where}: {sys.executable} finds no module {module!r}: install the environment's package"


def misused(env_id: str, args: Mapping[str, Any]) -> list[str]:
    """What is wrong with the arguments of an id that `find` accepts, as far as the source tells.

    v0's `load_environment` is a function; v1's tasksets have tables of their own, which are validated in the worker.
    """
    file = module_file(_module(env_id.removeprefix(LEGACY), legacy=True)) if env_id.startswith(LEGACY) else None
    if file is None or file.suffix != ".py":
        return []
    return [one.replace("env.args.", "legacy.args.") for one in source.faults(file, "load_environment", args)]


def _module(name: str, legacy: bool) -> str:
    """The module of an environment, by verifiers' own rules. Example: "prime/reverse-text@1.2" -> "reverse_text" """
    last = name.rpartition("/")[2].replace("-", "_")
    return last if legacy else last.partition("@")[0].lower()


def quiet() -> None:
    """Lines per rollout and per request are not for the worker's log; warnings are."""
    for name in ("verifiers", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
