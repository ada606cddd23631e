"""`shmrl keys`, `shmrl init`, `shmrl doctor`, `shmrl completion`, `shmrl --version`: what a person asks first."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from shmrl.cli.common import Flags, Switch, print_lines, show

if TYPE_CHECKING:
    from shmrl.config.keys import Key

_BASH_KEYS = """
# Keys of the configuration, behind "--" and a letter.
_shmrl_with_keys() {
  _tyro_shmrl "$@"
  local cur="${COMP_WORDS[COMP_CWORD]}"
  [[ "$cur" == --?* ]] && COMPREPLY+=($(compgen -W "$(shmrl keys --flags)" -- "$cur"))
  return 0
}
complete -F _shmrl_with_keys shmrl
"""


@dataclass
class Keys:
    """List the keys of the configuration: type, default, meaning. Each is a line of TOML and a flag."""

    which: Annotated[Positional[str | None], arg(metavar="[KEY]", help_behavior_hint="")] = None
    """A table or key (trainer.optimizer), or a part of their names (lr); all of them without it."""
    env_server: Switch = False
    """Those of an env server's own file instead of a run's."""
    flags: Switch = False
    """Print the flags alone, one per line."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, _: Flags) -> int:
        from shmrl.config import EnvServerConfig, RunTree, keys

        found = keys.matching(EnvServerConfig if self.env_server else RunTree, self.which)
        if self.flags:
            return print_lines(f"--{key.dotted.replace('.N.', '.0.').replace('_', '-')}" for key in found)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        return show(keys.as_json(found), lambda _: _table(found, width), self.json)


def _table(found: Sequence[Key], width: int | None) -> str:
    """A table per table of the configuration; meanings are wrapped where the width is known."""
    import textwrap

    lines: list[str] = []
    tables: dict[str, list[Key]] = {}
    for key in found:
        tables.setdefault(key.dotted.rpartition(".")[0], []).append(key)
    for name, below in tables.items():
        cells = [(key.dotted, key.type, key.default or "-", key.meaning) for key in below]
        sizes = [max(len(row[column]) for row in cells) for column in range(3)]
        indent = 2 + sum(sizes) + 6
        shown = f"[[{name.removesuffix('.N')}]]" if name.endswith(".N") else f"[{name}]"
        lines += ["", shown] if lines else [shown]
        for row in cells:
            head = "  " + "  ".join(cell.ljust(size) for cell, size in zip(row[:3], sizes, strict=True)) + "  "
            room = (width or 0) - indent
            wrapped = textwrap.wrap(row[3], room) if room > 30 else [row[3]]
            if width is not None and room <= 30:  # too narrow for a column: below
                wrapped = ["", *textwrap.wrap(row[3], max(20, width - 6))]
                indent = 6
            lines += [(head + (wrapped or [""])[0]).rstrip(), *(" " * indent + line for line in wrapped[1:])]
    return "\n".join(lines)


@dataclass
class Init:
    """Write a commented configuration that runs on this machine: its cores, GPUs, shared memory, free ports."""

    file: Annotated[Positional[Path], arg(metavar="[FILE]", help_behavior_hint="(default: shmrl.toml)")] = Path(
        "shmrl.toml"
    )
    """Where to write it."""
    force: Switch = False
    """Replace a file that is there."""

    def __call__(self, _: Flags) -> int:
        from shmrl.launcher import init

        print(init.write(self.file, replace=self.force))
        return 0


@dataclass
class Doctor:
    """Explain what this machine can and cannot do for a run, with one line of advice for what it cannot; 1 where
    something is in the way."""

    files: Annotated[
        Positional[tuple[Path, ...]], arg(metavar="[FILE...]", help="A run's files: whether it would start here.")
    ] = ()
    vllm: Path | None = None
    """The interpreter that has vLLM; this one, or inference.python of the files, without it."""
    json: Switch = False
    """Print JSON."""

    def __call__(self, flags: Flags) -> int:
        from shmrl.launcher import doctor

        found = doctor.doctor(self.files, flags, self.vllm)
        return show(found, doctor.render, self.json) or int(any(one["status"] == "fail" for one in found))


@dataclass
class Completion:
    """Print a script that completes commands, options and keys.

    bash: shmrl completion bash > ~/.local/share/bash-completion/completions/shmrl
    """

    shell: Positional[Literal["bash", "zsh", "fish"]]

    def __call__(self, _: Flags) -> int:
        from shmrl.cli import script

        return print_lines([script(self.shell) + (_BASH_KEYS if self.shell == "bash" else "")])


def version() -> str:
    """shmrl, the arena's layout, Python, torch, vllm, commit; nothing is imported for it."""
    import platform
    from importlib import metadata

    from shmrl import LAYOUT_VERSION, __version__

    lines = [f"shmrl {__version__}", f"layout {LAYOUT_VERSION}", f"python {platform.python_version()}"]
    for name in ("torch", "vllm"):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} not installed here")
    return "\n".join([*lines, f"commit {_commit()}"])


def _commit() -> str:
    """Of the checkout that runs, or of the one that pip installed from."""
    import json
    import subprocess
    from importlib import metadata

    import shmrl

    root = Path(shmrl.__file__).parents[1]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return "unknown: git does not tell"
    try:
        told = json.loads(metadata.distribution("shmrl").read_text("direct_url.json") or "{}")
        return str(told["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, ValueError, KeyError):
        return "unknown: not a checkout"
