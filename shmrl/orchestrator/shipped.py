"""Shipped steps: what was sent to the ranks, byte for byte, for as long as somebody may ask for it again.

One file per step in the run's socket directory, which lives exactly as long as the arena that the step's references
point into. Written by the orchestrator before a step is sent. A rank that was restarted gets its steps again from
here, a restarted orchestrator finds here where it stood, and `shmrl replay export` reads here what a step was.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shmrl import wire
from shmrl.config.rundir import write_atomic
from shmrl.errors import ProtocolError, RunError, told
from shmrl.payload import micro_batches_from_wire
from shmrl.types import MicroBatch


@dataclass(frozen=True)
class ShippedStep:
    """One step as it was sent.

    Attributes:
        step, run, output_dir, arena: which, of which run, and the address of the arena that has its blocks.
        record: what metrics.jsonl will say of it, as far as it was known before it was trained.
        messages: the packed message of each rank.
        token_file, ca: what the servers of other nodes, which have the other blocks, are asked with; "" for none.

    Example: ShippedStep(7, "run", "/runs/run", "shm:4f...", {"train/reward": 0.4, ...}, (b"...", b"..."))
    """

    step: int
    run: str
    output_dir: str
    arena: str
    record: dict[str, Any]
    messages: tuple[bytes, ...]
    token_file: str = ""
    ca: str = ""

    @cached_property
    def micro_batches(self) -> list[list[MicroBatch]]:
        """Of each rank."""
        return [micro_batches_from_wire(wire.unpack(raw)["micro_batches"]) for raw in self.messages]

    @property
    def nodes(self) -> dict[str, str]:
        """The url of each other node's server that has blocks of it, by `Handle.origin`."""
        return dict(wire.unpack(self.messages[0]).get("nodes", {}))

    @property
    def state(self) -> dict[str, Any]:
        """The orchestrator's part of a checkpoint of this step."""
        return dict(wire.unpack(self.messages[0])["state"])


def read(path: Path) -> ShippedStep:
    """The step of a file. RunError if it is damaged, or not there."""
    try:
        raw = wire.unpack(path.read_bytes())
        return ShippedStep(**{**raw, "messages": tuple(raw["messages"])})
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ProtocolError, KeyError, TypeError) as error:
        raise RunError(f"{path} is no shipped step ({told(error)})") from error


def kept_in(directory: Path) -> list[int]:
    """The steps that have a file there, ascending."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


class ShippedSteps:
    """The steps whose blocks are held: the one being trained and the retained ones before it.

    The newest step's file stays when its blocks are let go: it says where the orchestrator stands.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.last: ShippedStep | None = None
        self._held: list[int] = []

    def load(self, arena: str) -> None:
        """What an orchestrator before this one shipped out of the same arena; what it left of others is removed."""
        steps = kept_in(self._directory)
        self.last = read(self._directory / str(steps[-1])) if steps else None
        if self.last is not None and self.last.arena != arena:
            self.clear()
        self._held = steps if self.last is not None else []

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._held))

    def __contains__(self, step: int) -> bool:
        return step in self._held

    def __getitem__(self, step: int) -> ShippedStep:
        return self.last if self.last is not None and self.last.step == step else read(self._directory / str(step))

    def add(self, step: ShippedStep) -> None:
        """Before it is sent to anybody."""
        before = self.last
        write_atomic(self._directory / str(step.step), wire.pack(asdict(step)))
        self.last = step
        self._held.append(step.step)
        if before is not None and before.step not in self._held:
            (self._directory / str(before.step)).unlink(missing_ok=True)

    def let_go(self, step: int) -> None:
        """Its blocks are not held any more."""
        self._held.remove(step)
        if self.last is None or step != self.last.step:
            (self._directory / str(step)).unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget everything, the files too."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self.last, self._held = None, []
