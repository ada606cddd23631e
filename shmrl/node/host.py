"""What exists once per host and run: the arena, the run's token, the directory of ipc sockets, and `shmrl node`.

`shmrl run` (the launcher) and `shmrl node` (by hand) enter `exclusive` and `hosted`; every other process only reads
what they left: the arena's address and the token's file, both written into the resolved configuration. Whoever hosts
removes everything at the end; when it was killed, the launcher's janitor does, or the next arena sweeps.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from shmrl.config import ArenaConfig, RunTree, parse_bytes
from shmrl.config.rundir import RunDir, make_private, open_run_dir, write_atomic
from shmrl.errors import ArenaError, ConfigError, ProcessFailed, RunError

if TYPE_CHECKING:
    from shmrl.arena import Arena

log = logging.getLogger(__name__)

SHM = Path("/dev/shm")
SWEEP_S = 1.0
GRACE_S = 5.0  # for the node server, until it is killed
_TRAIN = ("torch", "transformers", "safetensors")  # what of the extra `train` is imported
_TOKEN = re.compile(r"[0-9a-f]{32}")
_SOCKET_PATH_LIMIT = 107  # sun_path of a unix socket, without its final zero


def without_torch() -> list[str]:
    """What is wrong where what the engine and the trainer run on is not installed; imports none of it."""
    missing = [name for name in _TRAIN if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    return [
        f"{', '.join(missing)}: not installed; the engine and the trainer need the extra 'train' "
        "(pip install -c constraints.txt -e '.[train]')"
    ]


def require_torch() -> None:
    """ConfigError unless it is installed."""
    if missing := without_torch():
        raise ConfigError(missing)


def require_arena(arena: ArenaConfig) -> str:
    """The address of the arena that somebody hosts for this process; RunError when nobody does."""
    from shmrl.arena import inspect

    if arena.address is None:
        raise RunError(
            "arena.address is not set: `shmrl run` and `shmrl node` create the arena and write it into the files under "
            "<output_dir>/configs/, which a role is started with"
        )
    try:
        inspect.check(arena.address)
    except (ArenaError, ValueError) as error:
        raise RunError(f"arena.address: {error}; is its `shmrl run` or `shmrl node` alive?") from None
    return arena.address


def read_token(arena: ArenaConfig) -> str | None:
    """The run's token: from `arena.token_file`, else from SHMRL_TOKEN, else None (a server that asks for none)."""
    if arena.token_file is None:
        return os.environ.get("SHMRL_TOKEN")
    try:
        return arena.token_file.read_text().strip()
    except OSError as error:
        raise RunError(f"the run's token cannot be read: {error}; is its `shmrl run` or `shmrl node` alive?") from None


def arena_mount(arena: ArenaConfig) -> Path | None:
    """The directory whose mount bounds the arena; None for memfds."""
    return {"shm": SHM, "memfd": None, "file": arena.base}[arena.backing]


def available_memory(arena: ArenaConfig) -> int:
    """Bytes an arena of this backing can take now: the least of its mount, this machine's memory and the cgroups."""
    from shmrl.arena import memory

    return min(limit.free for limit in memory.limits(arena_mount(arena)))


def capacity_bytes(arena: ArenaConfig) -> int:
    """The arena's capacity: as configured, else half of what is available."""
    return available_memory(arena) // 2 if arena.capacity is None else parse_bytes(arena.capacity)


def run_id_of(tree: RunTree) -> str:
    """A new one, by which operators know whose arena it is. Example: "reverse-text-1f0c5e92d3b4a687" """
    return f"{tree.run.name[:40]}-{secrets.token_hex(8)}"


def create_arena(arena: ArenaConfig, run_id: str) -> Arena:
    """The arena that the configuration describes, with this process attached. ArenaFull, ArenaError."""
    from shmrl.arena import Arena

    return Arena.create(
        capacity_bytes(arena),
        run_id=run_id,
        backing=arena.backing,
        base=None if arena.base is None else str(arena.base),
        orphan_ttl_s=arena.orphan_ttl_s,
        preallocate=arena.preallocate,
        huge_pages=arena.huge_pages,
        numa=arena.numa,
        spill_dir=None if arena.spill_dir is None else str(arena.spill_dir),
        shares=arena.guaranteed,
    )


@contextmanager
def exclusive(tree: RunTree) -> Iterator[Path]:
    """The run's socket directory (0700), held by one host process at a time; removed at the end, as are its weights in
    shared memory.

    RunError names the process that holds it: two runs in one output directory would write over each other.
    """
    directory = tree.socket_dir
    if len(str(directory / "trainer.sock")) > _SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"{directory}: too long for a unix socket's path ({_SOCKET_PATH_LIMIT} characters): set TMPDIR"
        )
    lock = _lock(directory, tree.run.output_dir)
    try:
        for leftover in directory.iterdir():
            if leftover.name != "lock":
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if tree.shared_weights is not None:
            shutil.rmtree(tree.shared_weights, ignore_errors=True)
            _private(tree.shared_weights)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if tree.shared_weights is not None:
            shutil.rmtree(tree.shared_weights, ignore_errors=True)
        os.close(lock)


def _lock(directory: Path, output_dir: Path) -> int:
    """A descriptor that holds `directory`/lock; the kernel lets go of it when the process ends, however it ends."""
    while True:
        _private(directory.parent)
        _private(directory)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode() or "unknown"
            os.close(lock)
            raise RunError(f"{output_dir} is in use by another run (pid {pid})") from None
        if os.fstat(lock).st_nlink:  # else: its last holder removed the directory between our open and our lock
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            return lock
        os.close(lock)


def _private(directory: Path) -> None:
    """Make a directory only we can enter; refuse one that somebody else put there."""
    make_private(directory)
    stat = directory.lstat()
    if directory.is_symlink() or stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise RunError(f"{directory} is not a private directory of uid {os.getuid()}: remove it")


@contextmanager
def hosted(tree: RunTree, directory: Path, run_id: str, token: str | None = None) -> Iterator[tuple[Arena, RunTree]]:
    """The run's arena and token, and the tree that names both; the arena is unlinked at the end.

    token: the one that all nodes of a run have.
    """
    token_file = directory / "token"
    _write_token(token_file, token or os.environ.get("SHMRL_TOKEN") or secrets.token_hex(16))
    arena = create_arena(tree.arena, run_id)
    try:
        named = tree.arena.model_copy(update={"address": arena.address, "token_file": token_file})
        yield arena, tree.model_copy(update={"arena": named})
    finally:
        arena.unlink()
        arena.close()


def _write_token(path: Path, token: str) -> None:
    """32 hexadecimal digits, readable by us alone; SHMRL_TOKEN when it is set, so that several hosts can agree."""
    if not _TOKEN.fullmatch(token):
        raise ConfigError("SHMRL_TOKEN must be 32 lower-case hexadecimal digits")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)


def tiny_model_command(config: Path) -> list[str]:
    """The short child that writes the model of `[model.tiny]` and its tokenizer to weights/step_0."""
    return [sys.executable, "-m", "shmrl.inference.embedded.tiny", str(config)]


def needs_tiny_model(tree: RunTree) -> bool:
    """True when the initial weights are made on the spot and are not there yet."""
    return tree.model.tiny is not None and not (tree.weights_dir(0) / "config.json").exists()


# --------------------------------------------------------------------------------------------------- `shmrl node`


def main(tree: RunTree, *, resume: bool = False, clean: bool = False) -> int:
    """Host a run whose roles are started by hand, until SIGTERM or Ctrl-C (143, 130); prints their commands.

    With an address in its files the arena is hosted already, and this is its node server.
    """
    if tree.arena.address is not None:
        from shmrl.node import server

        return server.run(tree)
    if needs_tiny_model(tree):
        require_torch()
    stop = threading.Event()
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    with exclusive(tree) as directory:
        rundir = open_run_dir(tree.run.output_dir, resume=resume, clean=clean)
        with hosted(tree, directory, run_id_of(tree)) as (arena, named):
            override = rundir.root / "node.toml"
            rundir.write_configs(named)
            beside = _Server(named, rundir)
            write_atomic(override, tomli_w.dumps({"arena": _override(named.arena)}))
            try:
                _write_tiny_model(named, rundir)
                print(_instructions(named, rundir), flush=True)
                while not stop.wait(SWEEP_S):
                    beside.watch()
                    arena.sweep()
            finally:
                beside.close()
                override.unlink(missing_ok=True)
    return 128 + received[0]


class _Server:
    """The node server beside a run by hand, where node.address asks for one: started again when it dies."""

    def __init__(self, tree: RunTree, rundir: RunDir) -> None:
        self._wanted, self._left = tree.node.address is not None, tree.run.restarts.node
        self._command = node_command(rundir)
        self._process = subprocess.Popen(self._command) if self._wanted else None

    def watch(self) -> None:
        """ProcessFailed when it died more often than run.restarts.node allows."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        if not self._left:
            raise ProcessFailed("the node server", code)
        self._left -= 1
        log.warning("the node server exited with %d and is started again; %d restarts are left", code, self._left)
        self._process = subprocess.Popen(self._command)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                log.warning("the node server did not end within %g s of SIGTERM and is killed", GRACE_S)
                self._process.kill()
                self._process.wait()


def node_command(rundir: RunDir) -> list[str]:
    """The node server of an arena that is hosted already: every resolved file names the arena."""
    return [sys.executable, "-m", "shmrl", "node", str(rundir.config("orchestrator"))]


def _override(arena: ArenaConfig) -> dict[str, str]:
    return {"address": str(arena.address), "token_file": str(arena.token_file)}


def _write_tiny_model(tree: RunTree, rundir: RunDir) -> None:
    if needs_tiny_model(tree):
        code = subprocess.run(tiny_model_command(rundir.config("trainer")), check=False).returncode
        if code:
            raise ProcessFailed("the child that writes the tiny model", code)


def _instructions(tree: RunTree, rundir: RunDir) -> str:
    """The commands that start the other roles, each in a terminal of its own."""
    lines = [f"arena {tree.arena.address} is up. Start, each in a terminal of its own:"]
    if not tree.inference.urls:
        lines.append(f"  shmrl inference {rundir.config('inference')}")
    for split, source in tree.sources:
        if source.serve.address is None:
            lines.append(f"  shmrl env-server {rundir.env_config(split, source.name)}")
    lines.append(f"  shmrl trainer {rundir.config('trainer')}")
    lines.append(f"  shmrl orchestrator {rundir.config('orchestrator')}")
    return "\n".join([*lines, f"Other files take the arena from {rundir.root / 'node.toml'} as one more file."])
