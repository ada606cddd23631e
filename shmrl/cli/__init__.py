"""The `shmrl` command: subcommands, the flags that are configuration keys, exit codes.

Runs first in every process. tyro parses subcommands and their own options; `--a.b-c value` pairs are taken out before
and become TOML values of the tree (`config.load`), so a flag and a line of a file mean the same. A role is imported
when it is called: `shmrl --version` pays for none, and nothing here imports torch. One file per group of commands:
`roles` (a run and its processes), `evaluate`, `arena` (with doctor), `replay`; `common` has what they share.

Exit codes: 0 done; 1 something failed (printed in full); 2 usage or configuration; 130 / 141 / 143 for signals.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes, subcommand

from shmrl import __version__
from shmrl.cli import arena, evaluate, replay, roles
from shmrl.cli.common import Flags
from shmrl.errors import ConfigError, ShmrlError

_EPILOGUE = "Any key of the configuration is a flag: --trainer.optimizer.lr 3e-4, --run.output-dir DIR."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"shmrl {__version__}")
        return 0
    try:
        arguments, flags = split_flags(arguments)
        return _parse(arguments)(flags)
    except ConfigError as error:
        return _complain(error.problems, 2)
    except ShmrlError as error:
        return _complain([f"{type(error).__name__}: {error}"], 1)
    except KeyboardInterrupt:  # only where nothing was there to be drained: die of it, which shells report as 130
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise


def split_flags(arguments: Sequence[str]) -> tuple[list[str], Flags]:
    """The arguments without configuration flags, and those flags. Example: ["run", "a.toml"], {"run.seed": "7"}"""
    rest: list[str] = []
    flags: Flags = {}
    left = iter(arguments)
    for argument in left:
        key, equals, value = argument.partition("=")
        if not key.startswith("--") or "." not in key:
            rest.append(argument)
            continue
        given = value if equals else next(left, None)
        if given is None or (not equals and given.startswith("--")):
            raise ConfigError(f"{key} needs a value")
        flags[key.removeprefix("--")] = given
    return rest, flags


def _complain(problems: Sequence[str], code: int) -> int:
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    for problem in problems:
        print(f"shmrl: {problem}", file=sys.stderr)
    return code


def _parse(arguments: Sequence[str]) -> Callable[[Flags], int]:
    config = (OmitSubcommandPrefixes, FlagCreatePairsOff)
    command: Any = tyro.cli(
        _Command,
        prog="shmrl",
        description=f"shmrl {__version__}: a shared-memory runtime for RL post-training. {_EPILOGUE}",
        args=arguments,
        config=config,
    )
    return command  # type: ignore[no-any-return]


_Command = (
    Annotated[roles.Run, subcommand("run")]
    | Annotated[roles.Node, subcommand("node")]
    | Annotated[roles.Orchestrator, subcommand("orchestrator")]
    | Annotated[roles.Trainer, subcommand("trainer")]
    | Annotated[roles.Inference, subcommand("inference")]
    | Annotated[roles.EnvServer, subcommand("env-server")]
    | Annotated[evaluate.Eval, subcommand("eval")]
    | Annotated[arena.Command, subcommand("arena", description="Look into shared memory, without stopping anyone.")]
    | Annotated[replay.Command, subcommand("replay", description="A step of a run in a file, and what is in it.")]
    | Annotated[arena.Doctor, subcommand("doctor")]
)
