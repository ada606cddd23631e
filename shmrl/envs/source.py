"""What a module's source says about a class or function in it, without importing it: is it there, does it take these
arguments?

Asked by the launcher before anything starts. Where the source leaves it open (a decorator, a base class from elsewhere,
`from x import *`) nothing is said: the env worker will know.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLAIN_BASES = {"object", "Environment", "Protocol", "Generic"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Keyword parameters. Example: Parameters({"high", "seed"}, required=("high",), open=False)"""

    names: set[str]
    required: tuple[str, ...]
    open: bool  # takes any others, too


def faults(file: Path, attribute: str, args: Mapping[str, Any]) -> list[str]:
    """What is wrong with calling `attribute` of the module in `file` with `args`; empty where that cannot be told."""
    try:
        module = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return [f"{file}, line {error.lineno}: {error.msg}"]
    except (OSError, ValueError) as error:
        return [f"{file} cannot be read: {error}"]
    top = attribute.split(".")[0]
    bound = {name: node for node in _statements(module.body) for name in _bound(node)}
    if top not in bound:
        if "*" in bound or "__getattr__" in bound:
            return []
        close = difflib.get_close_matches(top, bound, n=1)
        return [f"{file} has no {top!r}" + (f"; did you mean {close[0]}?" if close else "")]
    parameters = _parameters(bound[top], bound) if top == attribute else None
    return [] if parameters is None else _unfit(attribute, parameters, args)


def _unfit(name: str, takes: Parameters, args: Mapping[str, Any]) -> list[str]:
    problems = []
    for arg in [] if takes.open else sorted(args.keys() - takes.names):
        close = difflib.get_close_matches(arg, takes.names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(takes.names)) or 'none'}"
        problems.append(f"env.args.{arg}: {name} has no such argument; {hint}")
    return problems + [f"env.args.{arg}: {name} needs it" for arg in takes.required if arg not in args]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also below `if` and `try`."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _parameters(node: ast.stmt, bound: Mapping[str, ast.stmt]) -> Parameters | None:
    """Of a plain function, or of a class's __init__, its own or that of a class above it in this module."""
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        return _of(node.args, bare=False)
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
        return None
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    if "__new__" in own:
        return None
    if "__init__" in own:
        return None if own["__init__"].decorator_list else _of(own["__init__"].args, bare=True)
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        above = bound.get(name.id) if isinstance(name, ast.Name) else None
        if isinstance(above, ast.ClassDef):
            return _parameters(above, bound)
        if not isinstance(name, ast.Name) or name.id not in _PLAIN_BASES:
            return None
    return Parameters(set(), (), open=False)


def _of(args: ast.arguments, *, bare: bool) -> Parameters:
    """bare: without the first, `self`."""
    positional = [arg.arg for arg in [*args.posonlyargs, *args.args]]
    needed = positional[: len(positional) - len(args.defaults)]
    keywords = [arg.arg for arg in args.kwonlyargs]
    needed += [name for name, default in zip(keywords, args.kw_defaults, strict=True) if default is None]
    cut = 1 if bare else 0
    return Parameters({*positional[cut:], *keywords}, tuple(needed[cut:]), open=args.kwarg is not None)
