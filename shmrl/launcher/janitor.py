"""The janitor: a small process in a session of its own that outlives the launcher by seconds and cleans up after it.

`Janitor` is the launcher's end: it starts the process and tells it, as JSON lines over the death pipe, which pids,
arenas and directories belong to the run. `main` is the process: at the pipe's end without a farewell the launcher was
killed, so it kills what is left of the run, unlinks the arena, removes the sockets and closes run.json. Until then it
only reads, and imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

KILL_TIMEOUT_S = 8.0
CLEAN_TIMEOUT_S = KILL_TIMEOUT_S + 4.0


class Janitor:
    """The launcher's handle on its janitor."""

    def __init__(self, run_id: str, log: Path) -> None:
        read, self._write = os.pipe()
        command = [sys.executable, "-m", "shmrl.launcher.janitor", str(read)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                pass_fds=(read,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        os.close(read)
        self.pid = self._process.pid
        self.tell(run=run_id)

    def tell(self, **facts: Any) -> None:
        """One fact: run, process = [pid, start time], arena, directory or record. A dead janitor is seen by `alive`."""
        try:
            os.write(self._write, json.dumps(facts).encode() + b"\n")
        except BrokenPipeError:
            pass

    def alive(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Janitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Farewell after an orderly end; after an exception the janitor cleans up as after a kill."""
        if kind is None:
            self.tell(farewell=True)
        os.close(self._write)
        if kind is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLEAN_TIMEOUT_S)
        self._process.kill()  # it may have been stopped, and would never end then
        self._process.wait()


def main(descriptor: int) -> int:
    """Read facts until the pipe ends; then clean up unless the launcher said farewell."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(descriptor, "rb") as pipe:
        facts = _listen(pipe)
    if facts is not None:
        _clean(facts)
    return 0


def _listen(pipe: BinaryIO) -> dict[str, list[Any]] | None:
    """Every fact by its name, or None after a farewell."""
    facts: dict[str, list[Any]] = {"run": [], "process": [], "arena": [], "directory": [], "record": []}
    for line in pipe:
        if not line.endswith(b"\n"):  # the launcher died inside a write
            break
        for key, value in json.loads(line).items():
            if key == "farewell":
                return None
            facts[key].append(value)
    return facts


def _clean(facts: dict[str, list[Any]]) -> None:
    import shutil

    from shmrl.launcher.processes import find, kill_all

    roots = [(pid, created) for pid, created in facts["process"]]
    left = kill_all(lambda: find(facts["run"][0], roots), KILL_TIMEOUT_S)
    for process in left:
        print(f"janitor: {process} survived SIGKILL for {KILL_TIMEOUT_S} s", file=sys.stderr)
    for address in facts["arena"]:
        _unlink(address)
    for directory in facts["directory"]:
        shutil.rmtree(directory, ignore_errors=True)
    for record in facts["record"]:
        _close_record(Path(record))
    print("janitor: the launcher died; its processes, arena and sockets are removed", file=sys.stderr)


def _unlink(address: str) -> None:
    from shmrl.arena import unlink
    from shmrl.errors import ShmrlError

    try:
        unlink(address)
    except (ShmrlError, OSError) as error:
        print(f"janitor: {address} was not unlinked: {error}", file=sys.stderr)


def _close_record(path: Path) -> None:
    """run.json of a killed launcher must not say `running` for ever; an ending it wrote itself stays."""
    from shmrl.config.rundir import write_atomic

    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if record["status"] != "running":
        return
    record.update(status="killed", exit_code=137, reason="the launcher was killed")
    write_atomic(path, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
