"""The file of an evaluation: one line of JSON per rollout, written when it ends, read again by the run that goes on.

Owned by `evaluate.py`, in its process. A line that was cut short by a kill is removed; of two lines of one rollout the
later counts; a file of another model, seed, sampling or task set is refused rather than mixed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from shmrl.config import EvalConfig
from shmrl.errors import ConfigError, RunError

_BEGINNING = b'{"source": "'
"""Of every line."""


class Key(NamedTuple):
    """Which rollout: of the task with this number. Example: Key("reverse-text", number=4, rollout=2)"""

    source: str
    number: int
    rollout: int


class _Row(BaseModel):
    """What a line needs to be gone on with."""

    model_config = ConfigDict(strict=True)
    source: str
    number: NonNegativeInt
    rollout: NonNegativeInt
    model: str
    served: dict[str, Any]
    base_seed: int
    env: dict[str, Any]
    sampling: dict[str, Any]
    task: str
    success: bool
    reward: float | None = None


class RolloutFile:
    """The rollouts that are there, as `rows`, and where more are added. Locked: two runs never write one file.

    Attributes: added: rollouts of this run.
    Raises ConfigError for a file that is no such file, or in use.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.added = path, 0
        self.rows: dict[Key, dict[str, Any]] = {}
        self._common: dict[str, Any] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made = not path.exists()
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{path} is in use by another evaluation") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RolloutFile:
        return self

    def __exit__(self, *exc: object) -> None:
        """One that was made here and got no rollout is removed, while it is locked."""
        if self._made and not self.added:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def has(self, key: Key) -> bool:
        """Whether the rollout is there and succeeded."""
        return key in self.rows and bool(self.rows[key]["success"])

    def expect(self, **values: Any) -> None:
        """What all rollouts have in common, as their model: goes into every line; ConfigError if one has another."""
        for row in self.rows.values():
            self._compare(row, values)
        self._common |= values

    def add(self, key: Key, row: Mapping[str, Any], config: EvalConfig) -> None:
        """Write the rollout's line: all of it, or, after a kill, a part that the next run removes.

        RunError if there is no room for it: the file then ends with the line before.
        """
        made = {**key._asdict(), **self._common, **_settings(config), **row}
        fd, line = self._file.fileno(), memoryview(json.dumps(made).encode() + b"\n")
        whole = os.fstat(fd).st_size
        try:
            while line:
                line = line[os.write(fd, line) :]
        except OSError as error:
            os.ftruncate(fd, whole)
            raise RunError(f"{self.path} cannot be written behind its {whole:,} B: {error.strerror}") from error
        self.rows[key] = made
        self.added += 1

    def of(self, source: str, tasks: int, rollouts: int) -> list[dict[str, Any]]:
        """What is there of a source's first tasks and their first rollouts."""
        ours = ((key, row) for key, row in self.rows.items() if key.source == source)
        return [row for key, row in ours if key.number < tasks and key.rollout < rollouts]

    def check(self, config: EvalConfig, task_ids: Sequence[str]) -> None:
        """ConfigError if the file has rollouts of this source with other settings, or of other tasks."""
        for key, row in self.rows.items():
            if key.source != config.name:
                continue
            expected = _settings(config)
            if key.number < len(task_ids):
                expected["task"] = task_ids[key.number]
            self._compare(row, expected)

    def _compare(self, row: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for name, value in expected.items():
            if row[name] != value:
                raise ConfigError(
                    f"{self.path} has rollouts of {row['source']} with {name} = {row[name]!r}, not {value!r}: name "
                    "another file by --out"
                )

    def _read(self) -> None:
        self._file.seek(0)
        kept = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and (self.rows or line.startswith(_BEGINNING[: len(line)])):
                os.ftruncate(self._file.fileno(), kept)
                return
            kept += len(line)
            self._take(number, line)

    def _take(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            known = _Row.model_validate(row)
        except (ValueError, RecursionError):
            known = None
        if known is None or (known.success and known.reward is None) or not line.endswith(b"\n"):
            raise ConfigError(f"{self.path}, line {number}, is no rollout: name another file by --out")
        self.rows[Key(known.source, known.number, known.rollout)] = row


def _settings(config: EvalConfig) -> dict[str, Any]:
    return {
        "env": config.env.without_secrets().model_dump(mode="json"),
        "sampling": config.sampling.model_dump(mode="json"),
    }
