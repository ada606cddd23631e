"""The `shmrl` command: subcommands, the flags that are configuration keys, exit codes.

Runs first in every process. tyro parses subcommands and their own options; `--a.b-c value` pairs are taken out before
and become TOML values of the tree (`config.load`), so a flag and a line of a file mean the same. A role is imported
when it is called: `shmrl --version` pays for none, and nothing here imports torch. One file per group of commands:
`help` (keys, init, doctor, version), `roles` (a run and its processes), `evaluate`, `page`, `arena`, `replay`; `common`
has what they share.

Exit codes: 0 done; 1 something failed (printed in full); 2 usage or configuration; 130 / 141 / 143 for signals.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes, subcommand

from shmrl import __version__
from shmrl.cli import arena, evaluate, help, page, replay, roles, usage
from shmrl.cli.common import Flags
from shmrl.errors import COMPLAINT, ConfigError, Faults, ShmrlError, told

_EPILOGUE = (
    "Any key of the configuration is a flag: --trainer.optimizer.lr 3e-4, --run.output-dir DIR; "
    "`shmrl keys` lists them with types, defaults and meanings."
)
_WELCOME = f"""shmrl {__version__}: a shared-memory runtime for RL post-training

  shmrl init                write shmrl.toml, a commented configuration for this machine
  shmrl run shmrl.toml      train; --dry-run: only say what would be started
  shmrl keys [KEY]          every key of the configuration: type, default, meaning
  shmrl eval ENV --model M  how good a model is in an environment
  shmrl arena top           who has the bytes in shared memory, and what may leak
  shmrl doctor              what this machine can and cannot do for a run

shmrl --help lists every command, shmrl COMMAND --help its options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(help.version())
        return 0
    if not arguments:
        print(_WELCOME, file=sys.stderr)
        return 2
    try:
        if arguments[:1] != ["orchestrator"]:  # that one says itself what Ctrl-C means to it (`catch_signals`)
            _take_interrupts()
        arguments, flags = split_flags(arguments)
        usage.check(arguments, _Command)
        command: Callable[[Flags], int] = usage.parsed(lambda: _parse(arguments))
        return command(flags)
    except ShmrlError as error:
        problems = error.problems if isinstance(error, Faults) else [told(error)]
        return _complain(problems, 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:  # only where nothing was there to be drained: die of it, which shells report as 130
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise


def _take_interrupts() -> None:
    """From here on Ctrl-C is an exception, as Python has it; one that came while everything was loaded is taken now."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def script(shell: str) -> str:
    """What completes `shmrl` in this shell."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        _parse(["--tyro-print-completion", shell])
    return out.getvalue()


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
        print(f"{COMPLAINT}{problem}", file=sys.stderr)
    return code


def _parse(arguments: Sequence[str]) -> Callable[[Flags], int]:
    config = (OmitSubcommandPrefixes, FlagCreatePairsOff)
    with _no_color():
        command: Any = tyro.cli(
            _Command,
            prog="shmrl",
            description=f"shmrl {__version__}: a shared-memory runtime for RL post-training. {_EPILOGUE}",
            args=arguments,
            config=config,
        )
    return command  # type: ignore[no-any-return]


@contextlib.contextmanager
def _no_color() -> Iterator[None]:
    """tyro's help knows of NO_COLOR only as a terminal that has none."""
    terminal = os.environ.get("TERM")
    if terminal is None or not os.environ.get("NO_COLOR"):
        yield
        return
    os.environ["TERM"] = "dumb"
    try:
        yield
    finally:
        os.environ["TERM"] = terminal


_Command = (
    Annotated[roles.Run, subcommand("run")]
    | Annotated[roles.Node, subcommand("node")]
    | Annotated[roles.Orchestrator, subcommand("orchestrator")]
    | Annotated[roles.Trainer, subcommand("trainer")]
    | Annotated[roles.Inference, subcommand("inference")]
    | Annotated[roles.EnvServer, subcommand("env-server")]
    | Annotated[evaluate.Eval, subcommand("eval")]
    | Annotated[page.Page, subcommand("page")]
    | Annotated[help.Init, subcommand("init")]
    | Annotated[help.Keys, subcommand("keys")]
    | Annotated[arena.Command, subcommand("arena", description="Look into shared memory, without stopping anyone.")]
    | Annotated[replay.Command, subcommand("replay", description="A step of a run in a file, and what is in it.")]
    | Annotated[help.Doctor, subcommand("doctor")]
    | Annotated[help.Completion, subcommand("completion")]
)
