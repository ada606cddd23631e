"""The `shmrl` command: subcommands, the flags that are configuration keys, exit codes.

Runs first in every process. tyro parses subcommands and their own options; `--a.b-c value` pairs are taken out before
and become TOML values of the tree (`config.load`), so a flag and a line of a file mean the same. A role is imported
when it is called: `shmrl --version` pays for none, and nothing here imports torch.

Exit codes: 0 done; 1 something failed (printed in full); 2 usage or configuration; 130 / 141 / 143 for signals.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes, Positional, arg, subcommand

from shmrl import __version__
from shmrl.errors import ConfigError, ShmrlError

Flags = dict[str, str]
Files = Annotated[
    Positional[tuple[Path, ...]],
    arg(metavar="FILE...", help="TOML files; a later one wins over an earlier one.", help_behavior_hint=""),
]
Switch = Annotated[bool, arg(help_behavior_hint="")]

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


# --------------------------------------------------------------------------------------------------------------- run


@dataclass
class Run:
    """Check everything, start every process of a run, watch them, tear all of it down."""

    files: Files
    dry_run: Switch = False
    """Write the resolved configs and print what would be started; start nothing."""
    resume: Switch = False
    """Continue a used output directory from its last checkpoint."""
    clean: Switch = False
    """Remove what an earlier run left in the output directory."""

    def __call__(self, flags: Flags) -> int:
        tree = _run_tree("launcher", self.files, flags)
        from shmrl.launcher import run

        do = run.dry_run if self.dry_run else run.run
        return do(tree, resume=self.resume, clean=self.clean)


@dataclass
class Node:
    """Create the arena, the token and the initial model of a run whose roles are started by hand."""

    files: Files
    resume: Switch = False
    """Continue a used output directory from its last checkpoint."""
    clean: Switch = False
    """Remove what an earlier run left in the output directory."""

    def __call__(self, flags: Flags) -> int:
        tree = _run_tree("node", self.files, flags)
        from shmrl.node import host

        return host.main(tree, resume=self.resume, clean=self.clean)


# ------------------------------------------------------------------------------------------------------------- roles


@dataclass
class Orchestrator:
    """Dispatch episodes, pack references, ship steps to the trainer."""

    files: Files
    resume: Switch = False
    """Continue from the last checkpoint."""

    def __call__(self, flags: Flags) -> int:
        tree = _run_tree("orchestrator", self.files, flags)
        from shmrl import orchestrator

        return orchestrator.main(tree, self.resume)


@dataclass
class Trainer:
    """Train: starts its ranks under torch.distributed.run, and is one of them when RANK is set."""

    files: Files
    resume: Switch = False
    """Continue from the last checkpoint."""
    fake_data: Switch = False
    """Train on invented episodes for run.max_steps steps, without an orchestrator, and print how fast that goes."""

    def __call__(self, flags: Flags) -> int:
        rank = os.environ.get("RANK")
        tree = _run_tree(f"trainer:{rank}" if rank else "trainer", self.files, flags)
        if rank is None:
            from shmrl.launcher.roles import torch_command
            from shmrl.node.host import require_arena, require_torch

            require_torch()
            if not self.fake_data:
                require_arena(tree.arena)
            again = [*map(str, self.files), *(f"--{key}={value}" for key, value in flags.items())]
            switches = {"--resume": self.resume, "--fake-data": self.fake_data}
            command = torch_command(tree, [*again, *(name for name, on in switches.items() if on)])
            os.execv(command[0], command)
        from shmrl import trainer

        return trainer.main(tree, self.resume, self.fake_data)


@dataclass
class Inference:
    """Serve the policy: with the embedded engine, on vLLM's HTTP routes, or by becoming a vLLM server."""

    files: Files

    def __call__(self, flags: Flags) -> int:
        tree = _run_tree("inference", self.files, flags)
        if tree.inference.backend == "vllm":
            from shmrl.inference.vllm import launch

            launch.run(tree)
        from shmrl.node.host import require_torch

        require_torch()
        from shmrl.inference.embedded import server

        engine = tree.inference
        server.run(
            tree.newest_weights,
            engine.host,
            engine.port,
            served_name=tree.model.name,
            dtype=engine.dtype,
            device=engine.device,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_logprobs=engine.max_logprobs,
            logprobs_mode=engine.logprobs_mode,
            return_routed_experts="routing" in tree.captured,
            return_sampling_mask="mask" in tree.captured,
            seed=tree.run.seed,
        )
        return 0


@dataclass
class EnvServer:
    """Serve one environment: a pool of worker processes behind one address."""

    files: Files

    def __call__(self, flags: Flags) -> int:
        from shmrl.config import load_env_server

        config = load_env_server(_given(self.files), flags)
        _begin(f"env-server:{config.name}", config.log)
        from shmrl.env import server

        server.main(config)
        return 0


def _run_tree(role: str, files: Sequence[Path], flags: Flags) -> Any:
    """The validated run of these files and flags, with absolute paths; sets up this process's log and title."""
    from shmrl.config import load_run

    tree = load_run(_given(files), flags).absolute()
    _begin(role, tree.log)
    return tree


def _given(files: Sequence[Path]) -> Sequence[Path]:
    if not files:
        raise ConfigError("give at least one TOML file")
    return files


def _begin(role: str, log: Any) -> None:
    from setproctitle import setproctitle

    from shmrl.monitor.log import setup

    setup(role, log)
    setproctitle(f"shmrl:{role}")


# ---------------------------------------------------------------------------------------------------- looking inside


Address = Annotated[Positional[str | None], arg(metavar="[ADDRESS]", help_behavior_hint="")]


@dataclass
class ArenaLs:
    """List the arenas of this machine, or the blocks of one."""

    address: Address = None
    """As `arena ls` prints it: its blocks. A directory: the arenas of backing "file" in it."""
    limit: int | None = None
    """Blocks at most; 0: all of them. 50, with --json all."""
    sort: str | None = None
    """size, age or tag: the largest, the oldest, or by name first."""
    source: str | None = None
    """Only blocks of this source (second part of the tag)."""
    step: int | None = None
    """Only blocks shipped at this step."""
    holder: str | None = None
    """Only blocks that a process owns or reads: its pid, or part of its name."""
    state: str | None = None
    """Only blocks that are writing, ready, retired, orphan, shipped, discarded, spilled or unchecked."""
    json: Switch = False
    """Print JSON; of blocks one object per line."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render
        from shmrl.arena.inspect import Filter, is_directory

        wanted = Filter(self.source, self.step, self.holder, self.state)
        if self.limit is not None and self.limit < 0:
            raise ConfigError(f"limit {self.limit}: 0 (all of them) or more")
        asked = wanted != Filter() or self.sort is not None or self.limit is not None
        if not asked and (self.address is None or is_directory(self.address)):
            return _show(commands.ls(self.address), render.ls, self.json)
        limit = self.limit if self.limit is not None else (0 if self.json else 50)
        rows = commands.blocks(self.address, wanted, self.sort, limit + 1 if limit and not self.json else limit or None)
        return _print(map(json.dumps, rows) if self.json else render.blocks(rows, limit or None))


@dataclass
class ArenaStats:
    """Blocks and bytes of one arena, or of every live one."""

    address: Address = None
    """As `arena ls` prints it, or a directory."""
    by: str | None = None
    """source, step, field, holder or age; source, step and holder without it."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        return _show(commands.stats(self.address, self.by), render.stats, self.json)


@dataclass
class ArenaTop:
    """Who has the bytes: by holder, source, step, age and field; the largest, the oldest, and what may leak.

    On a terminal it redraws every second until Ctrl-C; into a pipe or with --json it prints once.
    """

    address: Address = None
    """As `arena ls` prints it, or a directory; every live arena without it."""
    count: int = 10
    """Rows of each table."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        if self.json or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            return _show(commands.top(self.address, self.count), render.top, self.json)
        render.live(lambda: render.top(commands.top(self.address, self.count)))
        return 0


@dataclass
class ArenaHolders:
    """Who has a block: owner, readers, done set, and what happened to it."""

    handle: Positional[str]
    """The handle as it is printed: h and 64 hexadecimal digits."""
    address: Address = None
    """Needed for arenas of a file that no process has open."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        return _show(commands.holders(self.handle, self.address), render.holders, self.json)


@dataclass
class ArenaFsck:
    """Check every invariant of one arena, or of all of them; exits with 1 if there is a fault."""

    address: Address = None
    """As `arena ls` prints it, or a directory."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        rows = commands.fsck(self.address)
        return _show(rows, render.fsck, self.json) or int(any(row["faults"] for row in rows))


@dataclass
class ArenaTail:
    """What happened last in an arena."""

    address: Address = None
    """As `arena ls` prints it; may be left out where one arena lives."""
    count: int = 20
    """How many events (at most 4,096 are kept)."""
    follow: Annotated[Switch, arg(aliases=["-f"])] = False
    """Go on printing them as they happen; with --json one object per line."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        if self.follow:
            return _print(map(json.dumps if self.json else render.event, commands.follow(self.address)))
        events = commands.tail(self.address)[-self.count :] if self.count > 0 else []
        return _show(events, lambda rows: "\n".join(map(render.event, rows)), self.json)


@dataclass
class ArenaGc:
    """Remove the arenas that no live process is attached to."""

    address: Address = None
    """An address, or a directory with arenas of backing "file"; /dev/shm without it."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        return _show(commands.gc(self.address), render.gc, self.json)


@dataclass
class Doctor:
    """Explain what this machine can and cannot do for a run."""

    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import doctor

        return _show(doctor.doctor(), doctor.render, self.json)


# ------------------------------------------------------------------------------------------------------------- replay


@dataclass
class ReplayExport:
    """Write a step of a run on this host, live or dead, to a file that assembles to the same bytes anywhere."""

    step: Positional[int]
    run: Annotated[Positional[Path | None], arg(metavar="[DIR]", help_behavior_hint="")] = None
    """The run's output directory; may be left out where only one run has the step."""
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """The file; step_<STEP>.shmrl without it."""
    micro_batch: str | None = None
    """rank:number, to write that micro batch alone."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.orchestrator import replay

        return _show(replay.export(self.step, self.run, self.out, self.micro_batch), replay.exported, self.json)


@dataclass
class ReplayShow:
    """What is in a step's file."""

    file: Positional[Path]
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.payload import replay

        return _show(replay.show(self.file), replay.shown, self.json)


@dataclass
class ReplayAssemble:
    """Assemble a step's file as the ranks did: the SHA-256 of every array, and of all of them."""

    file: Positional[Path]
    npz: Path | None = None
    """Write the arrays into this file, too."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.payload import replay

        return _show(replay.assembled(self.file, self.npz), replay.assembled_lines, self.json)


def _show(value: Any, render: Callable[[Any], str], as_json: bool) -> int:
    return _print([json.dumps(value, indent=2, default=str) if as_json else render(value)])


def _print(lines: Iterable[str]) -> int:
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


_ArenaCommand = (
    Annotated[ArenaLs, subcommand("ls")]
    | Annotated[ArenaStats, subcommand("stats")]
    | Annotated[ArenaTop, subcommand("top")]
    | Annotated[ArenaHolders, subcommand("holders")]
    | Annotated[ArenaFsck, subcommand("fsck")]
    | Annotated[ArenaTail, subcommand("tail")]
    | Annotated[ArenaGc, subcommand("gc")]
)

_ReplayCommand = (
    Annotated[ReplayExport, subcommand("export")]
    | Annotated[ReplayShow, subcommand("show")]
    | Annotated[ReplayAssemble, subcommand("assemble")]
)

_Command = (
    Annotated[Run, subcommand("run")]
    | Annotated[Node, subcommand("node")]
    | Annotated[Orchestrator, subcommand("orchestrator")]
    | Annotated[Trainer, subcommand("trainer")]
    | Annotated[Inference, subcommand("inference")]
    | Annotated[EnvServer, subcommand("env-server")]
    | Annotated[_ArenaCommand, subcommand("arena", description="Look into shared memory, without stopping anyone.")]
    | Annotated[_ReplayCommand, subcommand("replay", description="A step of a run in a file, and what is in it.")]
    | Annotated[Doctor, subcommand("doctor")]
)
