"""Every key of the configuration with its type, default and meaning, for `shmrl keys`, messages and completion.

The meaning is the string below the key in its table's source; it is read when somebody asks.
"""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shmrl.config import tables
from shmrl.config.faults import close_to, table_of
from shmrl.errors import ConfigError

_PATTERNS = {
    tables.NAME: "name",
    tables.URL: "url",
    tables.ADDRESS: "tcp://host:port | ipc://path",
    tables.DEVICE: "cpu | cuda[:N]",
    tables.HOST_PORT: "host:port",
}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_WORDS: dict[Any, str] = {int: "int", float: "float", str: "text", bool: "true | false", Path: "path", Any: "any"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Example: Key("run.max_steps", "int > 0", "100", "Optimizer steps of the run.")

    default: as TOML; "" where there is none, "required" where the key must be given.
    """

    dotted: str
    type: str
    default: str
    meaning: str


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Of a table and all below it; items of a list of tables are `N`."""
    for name, info in model.model_fields.items():
        dotted = f"{prefix}{info.alias or name}"
        below = table_of(info.annotation)
        if below is None:
            yield Key(dotted, type_text(info), _default(info), meaning(model, name))
        else:
            yield from keys(below, f"{dotted}.N." if "list[" in str(info.annotation) else f"{dotted}.")


def matching(model: type[BaseModel], wanted: str | None) -> list[Key]:
    """Those of a table or key, else those with `wanted` somewhere in them. ConfigError where there are none."""
    every = [*keys(model)]
    if wanted is None:
        return every
    wanted = wanted.strip("-[].").replace("-", "_")
    below = [key for key in every if f"{key.dotted}.".startswith(f"{wanted}.")]
    found = below or [key for key in every if wanted in key.dotted]
    if not found:
        names = [name.replace(".N.", ".") for key in every for name in (key.dotted, key.dotted.rpartition(".")[0])]
        known = names if "." in wanted else [part for name in names for part in name.split(".")]
        hint = close_to(wanted, dict.fromkeys(known)) or "`shmrl keys` lists all"
        raise ConfigError(f"no key has {wanted!r} in it; {hint}")
    return found


def as_json(found: Sequence[Key]) -> list[dict[str, str]]:
    return [asdict(key) for key in found]


@cache
def meaning(model: type[BaseModel], name: str) -> str:
    """The string below a key, on one line."""
    for table in model.__mro__:
        if name in vars(table).get("__annotations__", {}):
            return " ".join(_strings(table).get(name, "").split())
    return ""


@cache
def _strings(table: type) -> dict[str, str]:
    """The string behind each annotated name of a class."""
    body = next(
        node.body
        for node in ast.walk(ast.parse(Path(str(inspect.getsourcefile(table))).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == table.__name__
    )
    found = {}
    for node, after in pairwise(body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, str):
            found[node.target.id] = text
    return found


def type_text(info: FieldInfo) -> str:
    """What a key takes. Example: "int > 0" """
    return _text(info.annotation, info.metadata)


def _text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _text(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_text(one, metadata) for one in arguments if one is not type(None)))
    if origin is list:
        return f"[{_text(arguments[0])}, ...]"
    if origin is tuple:
        return f"[{', '.join(map(_text, arguments))}]"
    if origin is dict:
        return "table"
    return _bounded(_WORDS.get(annotation, str(annotation)), metadata)


def _bounded(word: str, metadata: Sequence[Any]) -> str:
    """The type with its limits; those that only keep a number representable are left out."""
    rules = [rule for one in metadata for rule in getattr(one, "metadata", [one])]  # Field() in Annotated keeps its own
    for pattern in (rule.pattern for rule in rules if hasattr(rule, "pattern")):
        return _PATTERNS.get(pattern, word)
    limits = [(sign, getattr(rule, name)) for rule in rules for name, sign in _SIGNS.items() if hasattr(rule, name)]
    return " ".join([word, *(f"{sign} {limit:g}" for sign, limit in limits if limit < 1 << 31)])


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return ""
    return json.dumps(value, default=str)
