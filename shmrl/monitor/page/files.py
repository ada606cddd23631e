"""The run directory as the page shows it: run.json, metrics from a place on, rollouts, log tails. Reads, never writes.

Nothing is kept between two looks but the few values of the resolved configuration: a browser says how much of
metrics.jsonl it has, and gets the rest.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmrl.config import socket_dir
from shmrl.config.addresses import redacted
from shmrl.config.tree import METRICS
from shmrl.errors import ConfigError

CHUNK = 2 << 20  # bytes of metrics.jsonl in one answer
LOG_BYTES = 96 << 10
PREVIEW = 160  # characters of a rollout in the list
ROLLOUT_FILE_BYTES = 64 << 20
_STEP = re.compile(r"step_(\d+)\.jsonl")
_SHOWN = (
    *("step", "train/", "eval/", "off_policy/", "episodes/", "time/"),
    *("arena/used_bytes", "arena/peak_bytes", "payload/", "orchestrator/"),
)


class RunFiles:
    """A run's directory. ConfigError where it is none."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not any((self.root / name).exists() for name in ("run.json", "metrics.jsonl", "node.toml")):
            raise ConfigError(f"{root} is not the directory of a run: it has no run.json and no metrics.jsonl")
        self._config: tuple[int, dict[str, Any]] = (-1, {})

    # ------------------------------------------------------------------------------------------------------- run

    def record(self) -> dict[str, Any]:
        """run.json, its addresses without what is secret in them; {} while there is none."""
        found = _json(self.root / "run.json")
        if isinstance(addresses := found.get("addresses"), dict):
            found["addresses"] = json.loads(redacted(json.dumps(addresses)))
        return found

    def config(self) -> dict[str, Any]:
        """The orchestrator's resolved configuration, which has no secrets; {} while there is none."""
        path = self.root / "configs" / "orchestrator.toml"
        try:
            changed = path.stat().st_mtime_ns
            if changed != self._config[0]:
                self._config = changed, tomllib.loads(path.read_text())
        except (OSError, ValueError):  # no TOML, or no UTF-8
            return {}
        return self._config[1]

    def _configured(self, table: str) -> dict[str, Any]:
        found = self.config().get(table)
        return found if isinstance(found, dict) else {}

    def arena_address(self) -> str | None:
        """Of the run's arena, while it goes on."""
        found = self._configured("arena").get("address")
        return found if isinstance(found, str) else None

    def retained_steps(self) -> int:
        """How many steps keep their blocks after their use."""
        found = self._configured("arena").get("retain_steps")
        return found if isinstance(found, int) else 0

    def metrics_dir(self) -> Path:
        """Where the run's processes on this node answer for Prometheus."""
        node = self._configured("job").get("node", "")
        return socket_dir(self.root, str(node)) / METRICS

    def engines(self) -> list[str]:
        """Base URLs of the run's engines."""
        addresses = self.record().get("addresses")
        found = addresses.get("inference") if isinstance(addresses, dict) else None
        return [url for url in found if isinstance(url, str)] if isinstance(found, list) else []

    def summary(self) -> dict[str, Any]:
        """What the head of the page says."""
        record = self.record()
        shown = ("name", "status", "exit_code", "reason", "attempt", "started", "ended")
        return {
            **{key: record.get(key) for key in shown},
            "versions": record.get("versions", {}),
            "addresses": record.get("addresses", {}),
            "directory": str(self.root),
            "max_steps": self._configured("run").get("max_steps"),
            "warmup": _json(self.root / "warmup.json") or None,
        }

    # --------------------------------------------------------------------------------------------------- metrics

    def metrics(self, start: int, file_id: str) -> dict[str, Any]:
        """Lines of metrics.jsonl from byte `start` on, as far as they are whole: {"file", "next", "more", "lines"}.

        file: which file it is. When that is not `file_id` (a resumed run writes a new one), or it has become shorter,
        the lines are those from its beginning. A line that is longer than a part is none of ours, and is left out.
        """
        path = self.root / "metrics.jsonl"
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                here = f"{stat.st_dev}-{stat.st_ino}"
                if here != file_id or start > stat.st_size:
                    start = 0
                file.seek(start)
                raw = file.read(CHUNK)
        except FileNotFoundError:
            return {"file": "", "next": 0, "more": False, "lines": []}
        whole = raw[: raw.rfind(b"\n") + 1] or (raw if len(raw) == CHUNK else b"")
        lines = [shown for text in whole.splitlines() if (shown := _metrics_line(text)) is not None]
        return {"file": here, "next": start + len(whole), "more": start + len(raw) < stat.st_size, "lines": lines}

    # -------------------------------------------------------------------------------------------------- rollouts

    def rollout_steps(self) -> list[int]:
        """Steps of which rollouts are there, ascending."""
        directory = self.root / "rollouts"
        names = os.listdir(directory) if directory.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """What the list says of each rollout of a step: all but messages and tokens, and how it ends."""
        rows = []
        for index, row in enumerate(self._rollout_rows(step)):
            messages, row["per_token"] = row.pop("messages", None), None
            last = messages[-1] if isinstance(messages, list) and messages else {}
            text = last.get("content") if isinstance(last, dict) else None
            rows.append({**row, "index": index, "preview": text[:PREVIEW] if isinstance(text, str) else ""})
        return rows

    def rollout(self, step: int, index: int) -> dict[str, Any] | None:
        """One rollout as it was written; None if there is none."""
        return next((row for at, row in enumerate(self._rollout_rows(step)) if at == index), None)

    def _rollout_rows(self, step: int) -> Iterator[dict[str, Any]]:
        path = self.root / "rollouts" / f"step_{step}.jsonl"
        if not path.is_file() or path.stat().st_size > ROLLOUT_FILE_BYTES:
            return
        with path.open("rb") as file:
            for text in file:
                if isinstance(row := _parsed(text), dict):
                    yield row

    # ------------------------------------------------------------------------------------------------------ logs

    def logs(self) -> dict[str, dict[str, Any]]:
        """{"orchestrator": {"bytes", "changed"}, "envs/train/words": ...} of the last attempt's logs."""
        found = {}
        for path in sorted(self._log_root().rglob("*.log")):
            if path.is_file() and not path.is_symlink():
                stat = path.stat()
                name = str(path.relative_to(self._log_root()))[: -len(".log")]
                found[name] = {"bytes": stat.st_size, "changed": stat.st_mtime}
        return found

    def log_tail(self, name: str) -> str | None:
        """The end of a log that `logs` lists; None of any other."""
        if name not in self.logs():
            return None
        with (self._log_root() / f"{name}.log").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode(errors="replace")
        return text if size <= LOG_BYTES else text.partition("\n")[2]

    def _log_root(self) -> Path:
        return (self.root / "logs" / "latest").resolve()

    # ------------------------------------------------------------------------------------------------- tokenizer

    def tokenizer_file(self) -> Path | None:
        """The model's tokenizer, where it was or where the run wrote it."""
        given = self._configured("model").get("path")
        written = (path for kind in ("weights", "checkpoints") for path in sorted((self.root / kind).glob("step_*")))
        for directory in [*([Path(given)] if isinstance(given, str) else []), *written]:
            if (file := directory / "tokenizer.json").is_file():
                return file
        return None


def _metrics_line(text: bytes) -> dict[str, Any] | None:
    line = _parsed(text)
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return {key: value for key, value in line.items() if key.startswith(_SHOWN)}


def _parsed(text: bytes) -> Any:
    """A value of JSON, with None for a number that is none there: a browser reads no NaN. None for anything else."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = _parsed(path.read_bytes())
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}
