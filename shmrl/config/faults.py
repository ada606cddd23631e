"""What is wrong with a configuration, for people: `file: dotted.key = value: what is allowed; did you mean ...`.

`lines` turns what pydantic found into one line per fault; `located` finds the files and flags that a fault of the
machine (a port, a missing directory) goes back to, by the keys that its message names. Called by `load.py` and the CLI.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from shmrl.config import tables
from shmrl.config.addresses import redacted
from shmrl.config.tables import Problems

FEW = 20  # names that are listed where none is close
Where = tuple[str, ...]  # a path of keys and list indices
_KEY = re.compile(r"\b[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+")
_PATTERNS = {
    tables.NAME: "must be letters, digits, '.', '_' or '-', at most 64, a letter or digit first",
    tables.URL: 'must be a URL, as "http://127.0.0.1:8000"',
    tables.ADDRESS: 'must be "tcp://host:port" or "ipc://path"',
    tables.DEVICE: 'must be "cpu", "cuda" or "cuda:N"',
    tables.HOST_PORT: 'must be "host:port"',
}


def lines(
    model: type[BaseModel], tree: Mapping[str, Any], error: ValidationError, origin: Mapping[str, str]
) -> list[str]:
    """Every fault once, in the order of the tree. origin: the file or flag of every dotted key that was given."""
    found: dict[tuple[Where, str], list[str]] = {}  # a value that fits no branch of a union is one fault
    for item in error.errors():
        path = _path(tree, item["loc"], item["type"])
        for message in _messages(model, path, _at(tree, path), item):
            texts = found.setdefault((path, "" if item["type"].endswith("_type") else message), [])
            texts += [message] if message not in texts else []
    said = {place: " or ".join(texts).replace(" or must be", " or") for place, texts in found.items()}
    return [_line(path, _at(tree, path), text, origin, model) for (path, _), text in said.items()]


def located(problem: str, origin: Mapping[str, str], tables: Iterable[str]) -> str:
    """The problem behind the files and flags that gave the keys of these tables that it names; behind all files where
    these have their defaults, and as it is where it names none."""
    keys = [key.split(".") for key in _KEY.findall(problem) if key.partition(".")[0] in [*tables]]
    where = dict.fromkeys(filter(None, (_giver(key, origin) for key in keys)))
    if keys and not where:
        where = dict.fromkeys(name for name in origin.values() if not name.startswith("--"))
    return ": ".join([", ".join(where), problem] if where else [problem])


def close_to(word: str, known: Iterable[str]) -> str:
    """A suggestion among `known`; else all of them, where there are not too many."""
    names = [*known]
    if close := difflib.get_close_matches(word, names, n=1):
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(names)}" if 0 < len(names) <= FEW else ""


def _path(tree: Any, loc: Sequence[str | int], kind: str) -> Where:
    """Where in the file a fault is; pydantic names the branches of unions, too."""
    path: list[str] = []
    for number, part in enumerate(loc):
        there = _at(tree, [*path, str(part)])
        if there is not None or (kind == "missing" and number == len(loc) - 1):
            path.append(str(part))
    return tuple(path)


def _at(tree: Any, path: Sequence[str]) -> Any:
    """The value at a path; None where there is none."""
    for part in path:
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdigit() and int(part) < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _deeper(model: type[BaseModel], path: Where) -> str:
    """The key of that very name in a table below, if there is one alone."""
    below = [*path[:-1]]
    found = [
        ".".join([*below, name, path[-1]])
        for name in _keys_at(model, below)
        if path[-1] in _keys_at(model, [*below, name])
    ]
    return f"did you mean {found[0]}?" if len(found) == 1 else ""


def _messages(model: type[BaseModel], path: Where, given: Any, item: Any) -> list[str]:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys_at(model, path[:-1])
        nearly = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.8)
        hint = close_to(path[-1], nearly) if nearly else _deeper(model, path) or close_to(path[-1], known)
        return ["unknown key" + (f"; {hint}" if hint else "")]
    if kind == "missing":
        return ["missing"]
    if kind == "literal_error":
        close = difflib.get_close_matches(str(given), re.findall(r"'([^']+)'", context["expected"]), n=1)
        return [f"must be {context['expected']}" + (f"; did you mean {close[0]!r}?" if close else "")]
    if kind == "string_pattern_mismatch":
        return [_PATTERNS.get(context["pattern"], f"must match {context['pattern']}")]
    if kind == "list_type" and isinstance(given, Mapping):
        return [f"must be a list of tables: [[{'.'.join(path)}]]"]
    if isinstance(fault := context.get("error"), Problems):
        return fault.problems
    return [item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)]


def _line(path: Where, given: Any, message: str, origin: Mapping[str, str], model: type[BaseModel]) -> str:
    """One fault; of secrets without the value. What is wrong between the keys of a table begins with one of them, or
    stands behind the table's name."""
    dotted, alone = ".".join(path), message == "missing" or path[-1:] == ("token",) or isinstance(given, list)
    if isinstance(given, Mapping) and not message.startswith("unknown key"):
        glue = "." if re.split(r"[ .]", message)[0] in _keys_at(model, path) else ": "
        fault = glue.join(filter(None, [dotted, message]))
    elif alone:
        fault = f"{dotted}: {message}"
    else:
        fault = f"{dotted} = {given!r}: {message}"
    source = _source(path, origin, message if isinstance(given, Mapping) else "")
    return redacted(f"{source}: {fault}" if source else located(fault, origin, model.model_fields))


def _source(path: Sequence[str], origin: Mapping[str, str], message: str) -> str:
    """Who gave the value at `path`: the file it stands in, and the flags below it; of a table's those that the message
    names, where it names any key that was given."""
    if not path:
        return ""
    below, words = ".".join([*path, ""]), set(re.findall(r"\w+", message))
    given = {key: by for key, by in origin.items() if key.startswith(below)}
    named = {key: by for key, by in given.items() if key.rpartition(".")[2] in words} or given
    return ", ".join(filter(None, [_giver(path, origin), *(by for by in named.values() if by.startswith("--"))]))


def _giver(path: Sequence[str], origin: Mapping[str, str]) -> str:
    return next((origin[key] for n in range(len(path), 0, -1) if (key := ".".join(path[:n])) in origin), "")


def _keys_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the table at `path`."""
    table: Any = model
    for part in path:
        if part.isdigit():
            continue
        info = next((one for name, one in table.model_fields.items() if (one.alias or name) == part), None)
        table = table_of(info.annotation) if info is not None else None
        if table is None:
            return []
    return [info.alias or name for name, info in table.model_fields.items()]


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The table class inside Optional / list / Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in getattr(annotation, "__args__", ()) if (found := table_of(one)) is not None), None)
