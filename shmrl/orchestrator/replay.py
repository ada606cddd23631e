"""What `shmrl replay export` does: a step of a run on this host, live or dead, into a file of its own.

Runs in the CLI's process. It needs the step's file (`shipped`) and the run's arena with the step's blocks, nobody's
help: it attaches, reads and leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shmrl.arena import Arena
from shmrl.arena.memory import human
from shmrl.config import socket_dir, socket_root
from shmrl.errors import ConfigError, LostPayload, RunError
from shmrl.orchestrator.shipped import ShippedStep, kept_in, read
from shmrl.payload import stepfile
from shmrl.types import MicroBatch


def export(step: int, run: Path | None, out: Path | None, micro_batch: str | None) -> dict[str, Any]:
    """Write a step's file. run: the output directory (None: the only run here that has the step). out: the file
    (None: step_<step>.shmrl). micro_batch: "rank:number", to write that one alone.

    RunError: no such step or micro batch, or its blocks are gone; ForeignArena: the arena is.
    """
    found = read(_find(step, run))
    chosen = _chosen(found, micro_batch)
    path = out or Path(f"step_{step}.shmrl")
    with Arena.attach(found.arena) as arena:
        try:
            nbytes = stepfile.write(path, arena, found.run, step, chosen)
        except LostPayload as error:
            raise RunError(f"step {step} of {found.output_dir} is not held any more: {error}") from error
    handles = {handle for micro in chosen.values() for handle in micro.handles}
    return {"file": str(path), "run": found.run, "step": step, "micro_batches": len(chosen), "blocks": len(handles)} | {
        "nbytes": nbytes
    }


def exported(found: dict[str, Any]) -> str:
    """The line of `export`."""
    what = f"{found['micro_batches']} micro batches, {found['blocks']} blocks, {human(found['nbytes'])}"
    return f"step {found['step']} of run {found['run']}: {what} in {found['file']}"


def _find(step: int, run: Path | None) -> Path:
    """The file of a shipped step."""
    if run is not None:
        directory = socket_dir(run) / "steps"
        if step not in (kept := kept_in(directory)):
            there = f"there are {', '.join(map(str, kept))}" if kept else "there is none"
            raise RunError(f"{run} has no step {step} now, {there}: arena.retain_steps says how many are kept")
        return directory / str(step)
    found = sorted(socket_root().glob(f"*/steps/{step}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunError(f"no run on this host has a step {step} now: arena.retain_steps says how many are kept")
    raise RunError(f"these runs have a step {step}, name one: {', '.join(read(path).output_dir for path in found)}")


def _chosen(found: ShippedStep, wanted: str | None) -> dict[stepfile.Place, MicroBatch]:
    places = {
        (rank, number): micro for rank, micros in enumerate(found.micro_batches) for number, micro in enumerate(micros)
    }
    if wanted is None:
        return places
    rank, _, number = wanted.partition(":")
    if not (rank.isdigit() and number.isdigit()):
        raise ConfigError(f"micro-batch {wanted!r}: rank:number, as in 0:3")
    place = int(rank), int(number)
    if place not in places:
        ranks, each = len(found.micro_batches), len(found.micro_batches[0])
        raise RunError(f"step {found.step} has no micro batch {wanted}: {ranks} ranks with {each} each, from 0:0")
    return {place: places[place]}
