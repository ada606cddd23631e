"""`shmrl arena ...`: looking into shared memory, without stopping anyone."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg, subcommand

from shmrl.cli.common import Flags, Switch, print_lines, show
from shmrl.errors import ConfigError

Address = Annotated[Positional[str | None], arg(metavar="[ADDRESS]", help_behavior_hint="")]


@dataclass
class Ls:
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
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            return show(commands.ls(self.address), lambda rows: render.ls(rows, width), self.json)
        limit = self.limit if self.limit is not None else (0 if self.json else 50)
        rows = commands.blocks(self.address, wanted, self.sort, limit + 1 if limit and not self.json else limit or None)
        return print_lines(map(json.dumps, rows) if self.json else render.blocks(rows, limit or None))


@dataclass
class Stats:
    """Blocks and bytes of one arena, or of every live one."""

    address: Address = None
    """As `arena ls` prints it, or a directory."""
    by: str | None = None
    """source, step, field, holder or age; source, step and holder without it."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        return show(commands.stats(self.address, self.by), render.stats, self.json)


@dataclass
class Top:
    """Who has the bytes: by holder, source, step, age and field; the largest, the oldest, and what may leak.

    Of several arenas first a line each, those where somebody waits on top.

    On a terminal it redraws every second until Ctrl-C; into a pipe or with --json it prints once.
    """

    address: Address = None
    """As `arena ls` prints it, or a directory; every live arena without it."""
    count: int = 10
    """Rows of each table."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, overview

        if self.json or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            return show(commands.top(self.address, self.count), overview.top, self.json)
        overview.live(lambda width, height: overview.top(commands.top(self.address, self.count), width, height))
        return 0


@dataclass
class Holders:
    """Who has a block: owner, readers, done set, and what happened to it."""

    handle: Positional[str]
    """The handle as it is printed: h and 64 hexadecimal digits."""
    address: Address = None
    """Needed for arenas of a file that no process has open."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        return show(commands.holders(self.handle, self.address), render.holders, self.json)


@dataclass
class Fsck:
    """Check every invariant of one arena, or of all of them; exits with 1 if there is a fault."""

    address: Address = None
    """As `arena ls` prints it, or a directory."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        rows = commands.fsck(self.address)
        return show(rows, render.fsck, self.json) or int(any(row["faults"] for row in rows))


@dataclass
class Tail:
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
            return print_lines(map(json.dumps if self.json else render.event, commands.follow(self.address)))
        events = commands.tail(self.address)[-self.count :] if self.count > 0 else []
        return show(events, lambda rows: "\n".join(map(render.event, rows)), self.json)


@dataclass
class Gc:
    """Remove the arenas that no live process is attached to."""

    address: Address = None
    """An address, or a directory with arenas of backing "file"; /dev/shm without it."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.arena import commands, render

        return show(commands.gc(self.address), render.gc, self.json)


Command = (
    Annotated[Ls, subcommand("ls")]
    | Annotated[Stats, subcommand("stats")]
    | Annotated[Top, subcommand("top")]
    | Annotated[Holders, subcommand("holders")]
    | Annotated[Fsck, subcommand("fsck")]
    | Annotated[Tail, subcommand("tail")]
    | Annotated[Gc, subcommand("gc")]
)
