"""Environments by name: a bundled name, `gem:<id>`, `verifiers:<id>`, `legacy:<id>`, or `module:attribute` (a class or
a factory, given `env.args`).

`openenv:` before it changes nothing, and before URLs names servers of sessions that someone else runs.

`find` is asked by the launcher before anything starts and imports no environment; `load` runs in the env worker.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from shmrl.config.addresses import redacted
from shmrl.config.sources import LEGACY, REMOTE, remote_urls
from shmrl.env.interface import Environment, SessionRollout
from shmrl.envs import gem, source, verifiers
from shmrl.envs.modules import module_file
from shmrl.errors import ConfigError

BUNDLED = {
    "reverse-text": "shmrl.envs.reverse_text:ReverseText",
    "alphabet-sort": "shmrl.envs.alphabet_sort:AlphabetSort",
    "guess-number": "shmrl.envs.guess_number:GuessNumber",
    "code-exec": "shmrl.envs.code_exec:CodeExec",
}
SANDBOXED = {"code-exec"}
"""Bundled environments that run what a model wrote."""


def find(env_id: str) -> str | None:
    """What is wrong with an env id, as one sentence, or None. Looks for files; imports nothing of the environment."""
    if env_id.startswith(REMOTE):
        env_id = env_id.removeprefix(REMOTE)
        if remote_urls(REMOTE + env_id):
            return None
    if verifiers.is_ours(env_id):
        return verifiers.find(env_id)
    module, _, attribute = BUNDLED.get(env_id, env_id).partition(":")
    if env_id.startswith(gem.PREFIX) and attribute:
        return None if module_file("gem") else f"env id {env_id!r}: GEM is not installed: pip install gem-llm"
    if not attribute:
        close = difflib.get_close_matches(env_id, BUNDLED, n=1)
        hint = f"did you mean {close[0]}?" if close else f"bundled are {', '.join(BUNDLED)}"
        return f"env id {redacted(env_id)!r} is neither a bundled name nor module:attribute; {hint}"
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        return f"env id {redacted(env_id)!r} is not module:attribute"
    if module_file(module) is None:
        return f"env id {env_id!r}: there is no module {module!r} on the Python path or in {os.getcwd()}"
    return None


def unsandboxed(env_id: str, sandbox: str | None) -> list[str]:
    """What is wrong with an environment that runs what a model wrote, without `serve.sandbox`."""
    missing = env_id in SANDBOXED and not sandbox
    return [f"{env_id} runs what a model wrote: set serve.sandbox = 'bwrap'"] if missing else []


def misused(env_id: str, args: Mapping[str, Any]) -> list[str]:
    """What is wrong with an id that `find` accepts and these arguments, as far as the source tells."""
    if env_id.startswith((REMOTE, gem.PREFIX)):
        return []
    if verifiers.is_ours(env_id):
        return verifiers.misused(env_id, args)
    return source_faults(BUNDLED.get(env_id, env_id), args)


def source_faults(path: str, args: Mapping[str, Any] | None = None) -> list[str]:
    """The same of any `module:attribute`, by its source alone. args: of the call; None: there is none yet."""
    module, _, attribute = path.partition(":")
    file = module_file(module) if all(part.isidentifier() for part in module.split(".")) else None
    if file is None:
        return [f"there is no module {module!r} on the Python path or in {os.getcwd()}"]
    if file.suffix != ".py":
        return []
    found = source.faults(file, attribute, args or {})
    return [one for one in found if args is not None or not one.startswith("env.args.")]


def load(env_id: str, args: Mapping[str, Any]) -> Environment:
    """The environment, imported and constructed; session environments come wrapped as rollouts.

    Raises ConfigError where the id does not resolve or the object is no environment, and whatever its own code raises.
    """
    return _as_rollout(env_id, _target(env_id), dict(args))


def construct(env_id: str, args: Mapping[str, Any]) -> Any:
    """The environment as its author wrote it, for whoever drives sessions. Raises as `load` does."""
    target = _target(env_id)
    _check_args(env_id, target, dict(args))
    built = target(**args)
    return gem.Sessions(partial(target, **args), built)() if gem.is_gem(built) else built


def _target(env_id: str) -> Any:
    """The class or factory behind an id."""
    problem = find(env_id)
    if problem is not None:
        raise ConfigError(problem)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if urls := remote_urls(env_id):
        from shmrl.env.sessions.remote import RemoteEnv

        return partial(RemoteEnv, urls)
    env_id = env_id.removeprefix(REMOTE)
    if verifiers.is_ours(env_id):
        module, attribute = ("v0", "Legacy") if env_id.startswith(LEGACY) else ("v1", "Taskset")
        adapter = getattr(importlib.import_module(f"shmrl.envs.verifiers.{module}"), attribute)
        return partial(adapter, env_id.partition(":")[2])
    return gem.factory(env_id) if env_id.startswith(gem.PREFIX) else _attribute(env_id)


def _attribute(env_id: str) -> Any:
    """What `module:attribute` names, imported."""
    module, _, attribute = BUNDLED.get(env_id, env_id).partition(":")
    target: Any = importlib.import_module(module)
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise ConfigError(f"env id {env_id!r}: {module} has no callable {attribute!r}")
    return target


def _as_rollout(env_id: str, target: Any, args: dict[str, Any]) -> Environment:
    _check_args(env_id, target, args)
    built = target(**args)
    if isinstance(built, Environment):
        return built
    if gem.is_gem(built):
        return SessionRollout(gem.Sessions(lambda: target(**args), built), seed=int(args.get("seed", 0)))
    if hasattr(built, "reset") and hasattr(built, "step"):
        return SessionRollout(lambda: target(**args), seed=int(args.get("seed", 0)))
    raise ConfigError(
        f"env id {env_id!r}: {type(built).__name__} is no environment: it derives from shmrl.env.Environment, or has "
        "reset and step"
    )


def _check_args(env_id: str, target: Any, args: dict[str, Any]) -> None:
    """Unknown or missing arguments as a configuration error, before the constructor turns them into a TypeError."""
    try:
        inspect.signature(target).bind(**args)
    except TypeError as error:
        raise ConfigError(f"env id {redacted(env_id)!r}: env.args: {error}") from None
    except ValueError:  # a callable without a signature: its own error will have to do
        return
