"""`shmrl replay ...`: a step of a run in a file, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg, subcommand

from shmrl.cli.common import Flags, Switch, show


@dataclass
class Export:
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
        from shmrl.orchestrator import export

        return show(export.export(self.step, self.run, self.out, self.micro_batch), export.exported, self.json)


@dataclass
class Show:
    """What is in a step's file."""

    file: Positional[Path]
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.payload import reassemble

        return show(reassemble.show(self.file), reassemble.shown, self.json)


@dataclass
class Assemble:
    """Assemble a step's file as the ranks did: the SHA-256 of every array, and of all of them."""

    file: Positional[Path]
    npz: Path | None = None
    """Write the arrays into this file, too."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.payload import reassemble

        return show(reassemble.assembled(self.file, self.npz), reassemble.assembled_lines, self.json)


Command = (
    Annotated[Export, subcommand("export")]
    | Annotated[Show, subcommand("show")]
    | Annotated[Assemble, subcommand("assemble")]
)
