"""What the commands share: types of arguments, how a configuration is loaded and a value printed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from shmrl.errors import ConfigError

Flags = dict[str, str]
Files = Annotated[
    Positional[tuple[Path, ...]],
    arg(metavar="FILE...", help="TOML files; a later one wins over an earlier one.", help_behavior_hint=""),
]
Switch = Annotated[bool, arg(help_behavior_hint="")]


def run_tree(role: str, files: Sequence[Path], flags: Flags) -> Any:
    """The validated run of these files and flags, with absolute paths; sets up this process's log and title."""
    from shmrl.config import load_run

    tree = load_run(given(files), flags).absolute()
    begin(role, tree.log)
    return tree


def given(files: Sequence[Path]) -> Sequence[Path]:
    if not files:
        raise ConfigError("give at least one TOML file")
    return files


def begin(role: str, log: Any) -> None:
    from setproctitle import setproctitle

    from shmrl.monitor.log import setup

    setup(role, log)
    setproctitle(f"shmrl:{role}")


def show(value: Any, render: Callable[[Any], str], as_json: bool) -> int:
    return print_lines([json.dumps(value, indent=2, default=str) if as_json else render(value)])


def print_lines(lines: Iterable[str]) -> int:
    """Each line at once; whoever reads them may leave before the end (`| head`)."""
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"shmrl: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0
