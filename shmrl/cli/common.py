"""What the commands share: types of arguments, how a configuration is loaded and a value printed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from shmrl.errors import ConfigError, PortInUse

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


@contextmanager
def located(files: Sequence[Path], flags: Flags) -> Iterator[None]:
    """What is wrong on this machine with a configuration names the files and flags it comes from, too."""
    from shmrl.config import RunTree
    from shmrl.config.faults import located
    from shmrl.config.load import read_layers

    try:
        yield
    except (ConfigError, PortInUse) as error:
        _, origin = read_layers(files, flags)
        lines = [located(problem, origin, RunTree.model_fields) for problem in error.problems]
        raise type(error)(lines) from error


def given(files: Sequence[Path]) -> Sequence[Path]:
    if not files:
        raise ConfigError("give at least one TOML file")
    return files


def begin(role: str, log: Any) -> None:
    """Log and title of a process that starts others. ConfigError where they would load another package than it."""
    from setproctitle import setproctitle

    from shmrl.monitor.log import setup

    _unshadowed()
    setup(role, log)
    setproctitle(f"shmrl:{role}")


def _unshadowed() -> None:
    """`python -m` looks into the working directory first, and the `shmrl` command does not."""
    installed, here = Path(__file__).parents[1], Path.cwd() / "shmrl"
    if not sys.flags.safe_path and (here / "__init__.py").exists() and not here.samefile(installed):
        raise ConfigError(
            f"{here} hides the installed package ({installed}) from the processes that are started here: install this "
            "source with pip install -e, or run in another directory"
        )


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
        print(f"shmrl: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0
