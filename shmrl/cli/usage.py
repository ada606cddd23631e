"""What was typed wrong, in one line with what may have been meant. Called by `main`, around tyro.

tyro answers a wrong word with a box that is taller than the mistake, and knows nothing of the keys of the
configuration. So commands and options are compared with what there is before it sees them; what is left for it (a
value that is none, an argument that is missing) is taken out of its box.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from shmrl.errors import ConfigError

HELP = ("--help", "-h")
_OF_TYRO = "--tyro-"


def check(arguments: Sequence[str], commands: Any) -> None:
    """ConfigError for a command or an option that does not exist. commands: a union of subcommands."""
    path, words = ["shmrl"], list(arguments)
    while (below := _below(commands)) and words and not words[0].startswith("-"):
        if words[0] not in below:
            raise ConfigError(f"{words[0]!r} is no command of `{' '.join(path)}`{_instead(words[0], below)}")
        commands = below[words[0]]
        path.append(words.pop(0))
    known = [*HELP[:1], *(("--version",) if len(path) == 1 else _options(commands))]
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known and not name.startswith(_OF_TYRO):
            raise ConfigError(f"{name} is no option of `{' '.join(path)}`{_meant(name, known)}")


def _below(commands: Any) -> Mapping[str, Any]:
    """{name: what is behind it} of a union of subcommands; {} of a command."""
    found = {}
    for one in get_args(commands) if get_origin(commands) is not Annotated else ():
        of, *notes = get_args(one)
        found[next(note.name for note in notes if hasattr(note, "name"))] = of
    return found


def _options(command: Any) -> Iterator[str]:
    """Those of a dataclass, whose positional fields are no options."""
    if dataclasses.is_dataclass(command):
        hints = get_type_hints(command, include_extras=True)
        marker = get_args(Positional[int])[1]
        for field in dataclasses.fields(command):
            if marker not in get_args(hints[field.name])[1:]:
                yield f"--{field.name.replace('_', '-')}"


def _meant(name: str, known: Sequence[str]) -> str:
    """What it may have been: an option here, or the end of a key of the configuration."""
    if close := difflib.get_close_matches(name, known, 1):
        return f"; did you mean {close[0]}?"
    from shmrl.config import RunTree, keys

    ends = {key.dotted.rpartition(".")[2]: key.dotted for key in reversed(list(keys.keys(RunTree)))}
    close = difflib.get_close_matches(name.removeprefix("--").replace("-", "_"), ends, 1, 0.8)
    if close:
        return f"; did you mean --{ends[close[0]].replace('.N.', '.0.').replace('_', '-')}?"
    return f": {', '.join(known)}, and the keys of the configuration (shmrl keys)"


def _instead(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else f": {', '.join(known)}"


def parsed(parse: Callable[[], Any]) -> Any:
    """What `parse` returns; ConfigError with what tyro's box says, in a line, where it refuses."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse()
    except SystemExit as done:
        if done.code == 2:
            raise ConfigError(_unboxed(said.getvalue())) from None
        raise


def _unboxed(text: str) -> str:
    """Its words, without title, frame (of lines, or of dashes where the terminal has no lines) and the way to the help.

    Example: "Missing from shmrl eval: --model STR A model directory, or an engine's URL. (required)"
    """
    lines = [line.strip("│ ") for line in text.splitlines() if line.strip("│╭╮╰╯─- ")]
    shown = [line for line in lines if not line.startswith("╭")] if "╭" in text else lines[1:]
    end = next((at for at, line in enumerate(shown) if line.startswith("For full helptext")), len(shown))
    return " ".join(shown[:end]) or text.strip()
