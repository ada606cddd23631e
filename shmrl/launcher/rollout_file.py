"""The file of an evaluation: one line of JSON per rollout, written when it ends, read again by the run that goes on.

Owned by `evaluate.py`, in its process. A line that was cut short by a kill is removed; of two lines of one rollout the
later counts; a file of another model, sampling or task set is refused rather than mixed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shmrl.config import EvalConfig
from shmrl.errors import ConfigError


class Key(NamedTuple):
    """Which rollout: of the task with this number. Example: Key("reverse-text", number=4, rollout=2)"""

    source: str
    number: int
    rollout: int


class RolloutFile:
    """The rollouts that are there, as `rows`, and where more are added. Locked: two runs never write one file.

    Raises ConfigError for a file that is no such file, in use, or of another model.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model
        self.rows: dict[Key, dict[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
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
        self._file.close()

    def has(self, key: Key) -> bool:
        """Whether the rollout is there and succeeded."""
        return key in self.rows and bool(self.rows[key]["success"])

    def add(self, key: Key, row: Mapping[str, Any], config: EvalConfig) -> None:
        """Write the rollout's line: all of it, or, after a kill, a part that the next run removes."""
        made = {**key._asdict(), "model": self.model, **_settings(config), **row}
        os.write(self._file.fileno(), json.dumps(made).encode() + b"\n")
        self.rows[key] = made

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
            for name, value in expected.items():
                if row[name] != value:
                    raise ConfigError(
                        f"{self.path} has rollouts of {config.name} with {name} = {row[name]!r}, not {value!r}: name "
                        "another file by --out"
                    )

    def _read(self) -> None:
        self._file.seek(0)
        kept = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                os.ftruncate(self._file.fileno(), kept)
                return
            kept += len(line)
            self._take(number, line)

    def _take(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            key, model, _ = Key(row["source"], row["number"], row["rollout"]), row["model"], row["success"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self.path}, line {number}, is no rollout: name another file by --out") from None
        if model != self.model:
            raise ConfigError(f"{self.path} has rollouts of {model}, not of {self.model}: name another file by --out")
        self.rows[key] = row


def _settings(config: EvalConfig) -> dict[str, Any]:
    return {
        "env": config.env.without_secrets().model_dump(mode="json"),
        "sampling": config.sampling.model_dump(mode="json"),
    }
