"""Environments by name: a bundled name, `gem:<id>`, or `module:attribute` (a class or a factory, given `env.args`).

`openenv:` before it changes nothing, and before URLs names servers of sessions that someone else runs.

`find` is asked by the launcher before anything starts and imports no environment; `load` runs in the env worker.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shmrl.config.addresses import redacted
from shmrl.config.tree import REMOTE, remote_urls
from shmrl.env.interface import Environment, SessionRollout
from shmrl.envs import gem
from shmrl.errors import ConfigError

BUNDLED = {
    "reverse-text": "shmrl.envs.reverse_text:ReverseText",
    "alphabet-sort": "shmrl.envs.alphabet_sort:AlphabetSort",
    "guess-number": "shmrl.envs.guess_number:GuessNumber",
    "code-exec": "shmrl.envs.code_exec:CodeExec",
}


def find(env_id: str) -> str | None:
    """What is wrong with an env id, as one sentence, or None. Looks for files; imports nothing of the environment."""
    if env_id.startswith(REMOTE):
        env_id = env_id.removeprefix(REMOTE)
        if remote_urls(REMOTE + env_id):
            return None
    module, _, attribute = BUNDLED.get(env_id, env_id).partition(":")
    if env_id.startswith(gem.PREFIX) and attribute:
        return None if _module_file("gem") else f"env id {env_id!r}: GEM is not installed: pip install gem-llm"
    if not attribute:
        close = difflib.get_close_matches(env_id, BUNDLED, n=1)
        hint = f"did you mean {close[0]}?" if close else f"bundled are {', '.join(BUNDLED)}"
        return f"env id {redacted(env_id)!r} is neither a bundled name nor module:attribute; {hint}"
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        return f"env id {redacted(env_id)!r} is not module:attribute"
    if _module_file(module) is None:
        return f"env id {env_id!r}: there is no module {module!r} on the Python path or in {os.getcwd()}"
    return None


def _module_file(module: str) -> Path | None:
    """The file a module would be loaded from, by path alone: a package's own __init__ must not run in the launcher."""
    top, *rest = parts = module.split(".")
    for root in ("", *sys.path):
        if found := _file_below(Path(root or os.curdir), parts):
            return found
    spec = importlib.util.find_spec(top)  # an editable install is on no path: its finder knows where the package is
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    return next(filter(None, (_file_below(Path(root), rest) for root in spec.submodule_search_locations or ())), None)


def _file_below(root: Path, parts: Sequence[str]) -> Path | None:
    """The module's file, its package's __init__ or its namespace directory."""
    path = root.joinpath(*parts)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), path if path.is_dir() else None)


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
