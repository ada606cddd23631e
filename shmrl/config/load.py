"""Reading the configuration: files in order, then flags, one validation, every fault at once.

Flags are merged as TOML values before validation (`--orchestrator.train.source.0.sampling.top-p 0.9`), so a flag and a
file line mean the same. Called by the CLI in every process.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from shmrl.config import faults
from shmrl.config.addresses import redacted
from shmrl.config.tree import EnvServerConfig, EvalConfig, RunTree
from shmrl.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


def read_layers(files: Sequence[Path], flags: Mapping[str, str] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged tree of files and flags, and where each dotted key came from. ConfigError names unreadable files."""
    tree: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for file in files:
        try:
            layer = tomllib.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: {error}") from None
        _merge(tree, layer, str(file), "", origin)
    for key, raw in (flags or {}).items():
        _set(tree, key, _flag_value(raw), origin)
    return tree, origin


def _merge(into: dict[str, Any], layer: dict[str, Any], file: str, prefix: str, origin: dict[str, str]) -> None:
    for key, value in layer.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, file, f"{dotted}.", origin)
        else:
            into[key] = value
            origin[dotted] = file


def _flag_value(raw: str) -> Any:
    """A flag's text as a TOML value; bare words are strings."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _set(tree: dict[str, Any], dotted: str, value: Any, origin: dict[str, str]) -> None:
    """Put one flag into the tree; missing tables are made, lists are addressed by index."""
    *path, last = (part.replace("-", "_") for part in dotted.split("."))
    where: Any = tree
    for depth, part in enumerate(path):
        if isinstance(where, dict):
            where = where.setdefault(part, {})
        else:
            where = where[_index(where, part, path[:depth], dotted)]
    if isinstance(where, dict):
        where[last] = value
    else:
        where[_index(where, last, path, dotted)] = value
    origin[".".join([*path, last])] = f"--{dotted}"


def put(tree: dict[str, Any], dotted: str, raw: str) -> None:
    """Put one flag into plain nested tables, whose keys are nobody's attributes: a "-" in them stays one."""
    *path, last = dotted.split(".")
    where: Any = tree
    for depth, part in enumerate(path):
        where = where.setdefault(part, {})
        if not isinstance(where, dict):
            raise ConfigError(f"--{dotted}: {'.'.join(path[: depth + 1])} is a value, not a table")
    where[last] = _flag_value(raw)


def _index(where: Any, part: str, path: list[str], dotted: str) -> int:
    """The list index a flag names, or an error that says what is there instead."""
    if not isinstance(where, list):
        raise ConfigError(f"--{dotted}: {'.'.join(path)} is a value, not a table")
    if not part.isdigit() or int(part) >= len(where):
        raise ConfigError(f"--{dotted}: {'.'.join(path)} has {len(where)} items, no {part!r}")
    return int(part)


def load_run(files: Sequence[Path], flags: Mapping[str, str] | None = None) -> RunTree:
    """The validated run; ConfigError lists every fault with file, dotted key, value and a suggestion."""
    tree, origin = read_layers(files, flags)
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and "name" in run and "output_dir" not in run:
        run["output_dir"] = f"runs/{run['name']}"
    return validated(RunTree, tree, origin)


def load_env_server(files: Sequence[Path], flags: Mapping[str, str] | None = None) -> EnvServerConfig:
    """The validated env server; same errors as `load_run`."""
    tree, origin = read_layers(files, flags)
    serve = tree.setdefault("serve", {})
    if isinstance(serve, dict) and not serve.get("protocols"):
        serve.setdefault("address", "tcp://127.0.0.1:5000")
    return validated(EnvServerConfig, tree, origin)


def env_server_from(tree: RunTree, index: int) -> EnvServerConfig:
    """The env server's own file for source `index` of a run: what the launcher writes to configs/envs/."""
    split, source = tree.sources[index]
    serve = source.serve.model_copy(update={"address": tree.env_address(index)})
    env = source.env
    if env.urls:
        env = env.model_copy(update={"args": {**env.args, "sessions": list(tree.remote_sessions(env.urls))}})
    return EnvServerConfig(
        name=source.name,
        split=split,
        env=env,
        serve=serve,
        arena=tree.arena,
        log=tree.log,
        job=tree.job,
        metrics_dir=tree.metrics_dir,
    )


def load_eval(given: str, flags: Mapping[str, str] | None = None) -> list[EvalConfig]:
    """What `shmrl eval` runs for one of its arguments: an env id; an env server's file, which may have [sampling]; or
    a run's file, of which the eval sources are taken, or the train sources where it has none."""
    if not given.endswith(".toml"):
        tree, origin = read_layers([], {"env.id": f'"{given}"', "name": f'"{_source_name(given)}"', **(flags or {})})
        return [validated(EvalConfig, tree, origin)]
    tree, origin = read_layers([Path(given)], flags)
    if "orchestrator" not in tree:
        return [validated(EvalConfig, tree, origin)]
    run = load_run([Path(given)], flags)
    sources = [source for split, source in run.sources if split == "eval"] or run.orchestrator.train.source
    return [
        EvalConfig(name=source.name, env=source.env, serve=source.serve, sampling=source.sampling, log=run.log)
        for source in sources
    ]


def _source_name(env_id: str) -> str:
    """An env id as the name of a source. Example: "my_module:Echo" -> "my_module-Echo" """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", redacted(env_id)).strip("-._")[:64] or "env"


def validated(model: type[T], tree: dict[str, Any], origin: Mapping[str, str] | None = None) -> T:
    """The tree as its model; ConfigError lists every fault. origin: which file or flag each dotted key came from."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(faults.lines(model, tree, error, origin or {})) from None


def dump_toml(table: BaseModel) -> str:
    """The table as TOML text that `load_*` reads back to an equal tree; absent values are left out."""
    return tomli_w.dumps(_plain(table.model_dump(mode="json", by_alias=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
