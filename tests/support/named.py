"""Tests by their names: for tables that say which test shows what, and must not outlive it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


HELPERS = ("check", "refused", "run")
"""Functions of tests that assert what they are given."""


def checks_of(name: str) -> str:
    """Of `source_of`, what can fail: assertions, expected exceptions and calls of HELPERS."""
    source = source_of(name)
    return "\n".join(str(ast.get_source_segment(source, node)) for node in ast.walk(ast.parse(source)) if _checks(node))


def _checks(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Assert)
    called = node.func
    return called.attr == "raises" if isinstance(called, ast.Attribute) else getattr(called, "id", "") in HELPERS


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
