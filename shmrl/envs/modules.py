"""Where a module would be loaded from, by path alone: environments are looked for without running any of their code."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def module_file(module: str) -> Path | None:
    """The file of a module; None if there is none. A package's own __init__ must not run in the launcher."""
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
