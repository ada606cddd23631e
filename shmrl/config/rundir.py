"""The run directory: what lies where under `run.output_dir`, whether it may be used, and how files appear in it whole.

The launcher and `shmrl node` open it (`open_run_dir`) and are the only writers of configs/, logs/ and run.json. The
orchestrator and the trainer's ranks only ask for `latest_checkpoint`. Imports nothing heavy: every process may.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shmrl.config.load import dump_toml, env_server_from
from shmrl.config.tree import RunTree
from shmrl.errors import ConfigError

_RESULTS = ("run.json", "metrics.jsonl", "warmup.json", "weights", "checkpoints", "rollouts", "tensorboard", "wandb")
_PREPARED = ("configs", "job.sbatch")  # what a dry run leaves
_OURS = (*_RESULTS, *_PREPARED, "logs", "node.toml", "envs", "addresses", "drain")
_STEP = re.compile(r"step_(\d+)")


def latest_checkpoint(output_dir: Path) -> int | None:
    """The highest step whose checkpoint is complete (its `STABLE` file is written last); None without one."""
    found = (output_dir / "checkpoints").glob("step_*/STABLE")
    steps = [int(match[1]) for path in found if (match := _STEP.fullmatch(path.parent.name))]
    return max(steps, default=None)


def make_private(directory: Path) -> None:
    """Make a directory and those above it that are missing, all for our uid alone."""
    for missing in reversed([one for one in (directory, *directory.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Put a whole file in place; a reader sees the old content or the new one. mode: of the file, less the umask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


@dataclass(frozen=True)
class RunDir:
    """Paths of one run; of a run over several nodes, as `node` writes them.

    Example: RunDir(Path("runs/x"), attempt=2).env_log("train", "a") is runs/x/logs/attempt_2/envs/train/a.log, and
    RunDir(Path("runs/x"), 2, "node3").env_log("train", "a") is runs/x/logs/attempt_2/envs/train/a.node3.log
    """

    root: Path
    attempt: int
    node: str = ""

    @property
    def logs(self) -> Path:
        return self.root / "logs" / f"attempt_{self.attempt}"

    def log(self, role: str) -> Path:
        """Log of launcher, orchestrator, trainer, inference or node. Of orchestrators there is only one."""
        return self.logs / self._of_node(role if role != "orchestrator" else "", f"{role}.log")

    def env_log(self, split: str, name: str) -> Path:
        return self.logs / "envs" / split / self._of_node(name, f"{name}.log")

    def _of_node(self, replicated: str, single: str) -> str:
        return f"{replicated}.{self.node}.log" if self.node and replicated else single

    def config(self, role: str) -> Path:
        """Resolved file of orchestrator, trainer or inference."""
        return self.root / "configs" / self.node / f"{role}.toml"

    def env_config(self, split: str, name: str) -> Path:
        return self.root / "configs" / self.node / "envs" / split / f"{name}.toml"

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def drain(self) -> Path:
        """Whoever makes this file asks the run to finish its step, write a checkpoint and end."""
        return self.root / "drain"

    def write_configs(self, tree: RunTree) -> None:
        """The resolved configuration of every role, as `shmrl <role> FILE` reads it, for this user alone: an env
        server's has the tokens of its sessions."""
        files: dict[Path, BaseModel] = {
            self.config(role): tree.without_secrets() for role in ("orchestrator", "trainer", "inference")
        }
        for index, (split, source) in enumerate(tree.sources):
            files[self.env_config(split, source.name)] = env_server_from(tree, index)
        for path, config in files.items():
            write_atomic(path, dump_toml(config), 0o600)

    def open_logs(self) -> None:
        """Directories of this attempt's logs, and `latest` and `envs` pointing at them."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for split in ("train", "eval"):
            (self.logs / "envs" / split).mkdir(parents=True, exist_ok=True)
        _link(self.root / "logs" / "latest", self.logs.name)
        _link(self.root / "logs" / "envs", "latest/envs")

    def write_record(self, record: Mapping[str, Any]) -> None:
        """run.json: status, exit_code, reason, versions, seeds, addresses."""
        write_atomic(self.record, json.dumps(record, indent=2, default=str) + "\n")


def open_run_dir(output_dir: Path, *, resume: bool = False, clean: bool = False) -> RunDir:
    """The directory of a new attempt. ConfigError when it was used and neither --resume nor --clean is given, and when
    it is to be cleaned of what no run has written.

    Resuming drops weights newer than the checkpoint (they belong to steps that will be trained again), all of them
    when there is no checkpoint yet.
    """
    _require_usable(output_dir, resume, clean)
    if clean:
        for name in _OURS:
            _remove(output_dir / name)
    if resume:
        _drop_weights_after(output_dir, latest_checkpoint(output_dir))
    return RunDir(output_dir, _next_attempt(output_dir))


def refusal_of(output_dir: Path, *, resume: bool = False, clean: bool = False) -> ConfigError | None:
    """What `open_run_dir` would raise (for --dry-run). Makes the directory, and changes nothing in it."""
    try:
        _require_usable(output_dir, resume, clean)
    except ConfigError as refusal:
        return refusal
    return None


def _require_usable(output_dir: Path, resume: bool, clean: bool) -> None:
    if resume and clean:
        raise ConfigError("--resume continues a run and --clean removes it: give one of them")
    _require_writable(output_dir)
    if not (resume or clean) and (refusal := _used_before(output_dir)):
        raise ConfigError(refusal)
    if clean:
        _require_ours(output_dir)


def _require_ours(output_dir: Path) -> None:
    """A run writes run.json, and `shmrl node` node.toml, before all but what a dry run leaves; who has neither may have
    named his own things as we name ours."""
    there = [name for name in _OURS if (output_dir / name).exists()]
    if set(there) <= {*_PREPARED} or "node.toml" in there:
        return
    try:
        if "status" in json.loads((output_dir / "run.json").read_text()):
            return
    except (OSError, ValueError, TypeError):
        pass
    raise ConfigError(
        f"{output_dir} has {', '.join(there)}, but no run.json of a run: --clean leaves them alone; remove them, "
        "or write elsewhere with --run.output-dir DIR"
    )


def _used_before(output_dir: Path) -> str | None:
    """Why a new run may not start in this directory, or None."""
    used = [name for name in _RESULTS if (output_dir / name).exists()]
    if not used:
        return None
    return (
        f"{output_dir} was used before (it has {', '.join(used)}): continue it with --resume, remove it with --clean, "
        "or write elsewhere with --run.output-dir DIR"
    )


def peek_run_dir(output_dir: Path) -> RunDir:
    """Paths of the next attempt, whatever state the directory is in (for --dry-run)."""
    _require_writable(output_dir)
    return RunDir(output_dir, _next_attempt(output_dir))


def _require_writable(output_dir: Path) -> None:
    """Make the directory; ConfigError when it cannot be made or written to."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(output_dir, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        reason = str(error.strerror)
    if reason is not None:
        raise ConfigError(f"run.output_dir = {str(output_dir)!r}: {reason}")


def _next_attempt(output_dir: Path) -> int:
    names = [path.name.removeprefix("attempt_") for path in (output_dir / "logs").glob("attempt_*")]
    return 1 + max((int(name) for name in names if name.isdigit()), default=0)


def _drop_weights_after(output_dir: Path, step: int | None) -> None:
    for path in (output_dir / "weights").glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if step is None or match is None or int(match[1]) > step:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(path: Path, target: str) -> None:
    """A relative link, replaced atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
