"""Tests by their names: for tables that say which test shows what, and must not outlive it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


def source_of(name: str) -> str:
    """The text of "room/test_file.py::test_function"; KeyError if there is none."""
    file, _, function = name.partition("::")
    return _functions(file)[function]


@cache
def _functions(file: str) -> dict[str, str]:
    """With their decorators, where the values of a parametrized test are."""
    text = (TESTS / file).read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found
