"""What `shmrl replay export` does: a step of a run on this host, live or dead, into a file of its own.

Runs in the CLI's process. It needs the step's file (`shipped`) and the run's arena with the step's blocks, nobody's
help: it attaches, reads and leaves. Blocks of other nodes come from those nodes' servers, into an arena of this process
alone: the run's own has no room to lend, and nobody who would free them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmrl.arena import Arena, span_bytes
from shmrl.arena.memory import human
from shmrl.config import ArenaConfig, socket_dir, socket_root
from shmrl.config.addresses import node_name
from shmrl.errors import ConfigError, LostPayload, NodeError, RunError
from shmrl.node.host import read_token
from shmrl.node.transfer import fetch
from shmrl.orchestrator.shipped import ShippedStep, kept_in, read
from shmrl.payload import stepfile
from shmrl.payload.header import Blocks
from shmrl.types import Handle, MicroBatch

PATIENCE_S = 10.0  # with another node's server; a step that is retained can be exported again later
KEPT = "arena.retain_steps says how many are kept, as long as a run goes on or when it was killed"
SPARE_NBYTES = 1 << 20  # of the arena that blocks are fetched into: what its allocator rounds up


@dataclass(frozen=True, slots=True)
class Gathered:
    """The blocks of a step: those of the run's arena in place, others as `copies` in `fetched`."""

    arena: Arena
    fetched: Arena
    copies: Mapping[Handle, Handle]

    def get(
        self, handle: Handle, verify: bool = False, field: str | None = None, rows: tuple[int, int] | None = None
    ) -> Any:
        """As `Arena.get`."""
        place, here = (self.fetched, self.copies[handle]) if handle in self.copies else (self.arena, handle)
        return place.get(here, verify, field, rows)


def export(step: int, run: Path | None, out: Path | None, micro_batch: str | None) -> dict[str, Any]:
    """Write a step's file. run: the output directory (None: the only run here that has the step). out: the file
    (None: step_<step>.shmrl). micro_batch: "rank:number", to write that one alone.

    RunError: no such step or micro batch, or its blocks are gone, or on a node that cannot be reached; ForeignArena:
    the arena is gone.
    """
    found = read(_find(step, run))
    chosen = _chosen(found, micro_batch)
    path = out or Path(f"step_{step}.shmrl")
    handles = {handle for micro in chosen.values() for handle in micro.handles}
    try:
        with _blocks(found, handles) as blocks:
            nbytes = stepfile.write(path, blocks, found.run, step, chosen)
    except LostPayload as error:
        raise RunError(f"step {step} of {found.output_dir} is not held any more: {error}") from error
    except NodeError as error:
        urls = ", ".join(sorted(found.nodes.values())) or "unknown"
        raise RunError(f"step {step} of {found.output_dir} has blocks on other nodes ({urls}): {error}") from error
    return {"file": str(path), "run": found.run, "step": step, "micro_batches": len(chosen), "blocks": len(handles)} | {
        "nbytes": nbytes
    }


@contextmanager
def _blocks(found: ShippedStep, handles: Iterable[Handle]) -> Iterator[Blocks]:
    """Where the blocks of a step are read. LostPayload, NodeError; ArenaFull when others' do not fit into memory."""
    with Arena.attach(found.arena) as arena:
        elsewhere = sorted({handle for handle in handles if handle.origin != arena.origin})
        if not elsewhere:
            yield arena
            return
        nodes = found.nodes
        if unknown := {handle.origin for handle in elsewhere} - nodes.keys():
            raise NodeError(f"no server is known for those of {', '.join(sorted(unknown))}")
        token = read_token(ArenaConfig(token_file=Path(found.token_file) if found.token_file else None))
        if token is None:
            raise NodeError("their servers want the run's token: set SHMRL_TOKEN")
        capacity = sum(span_bytes(handle.nbytes) for handle in elsewhere) + SPARE_NBYTES
        with Arena.create(capacity, backing="memfd") as fetched:
            ca = Path(found.ca) if found.ca else None
            copies = fetch(fetched, elsewhere, nodes, timeout_s=PATIENCE_S, token=token, ca=ca)
            yield Gathered(arena, fetched, dict(zip(elsewhere, copies, strict=True)))


def exported(found: dict[str, Any]) -> str:
    """The line of `export`."""
    what = f"{found['micro_batches']} micro batches, {found['blocks']} blocks, {human(found['nbytes'])}"
    return f"step {found['step']} of run {found['run']}: {what} in {found['file']}"


def _find(step: int, run: Path | None) -> Path:
    """The file of a shipped step."""
    if run is not None:
        directories = [socket_dir(run, node) / "steps" for node in (node_name(), "")]
        directory = next(filter(Path.exists, directories), directories[0])
        if step not in (kept := kept_in(directory)):
            there = f"there are {', '.join(map(str, kept))}" if kept else "there is none"
            raise RunError(f"{run} has no step {step} now, {there}: {KEPT}")
        return directory / str(step)
    found = sorted(socket_root().glob(f"*/steps/{step}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunError(f"no run on this host has a step {step} now: {KEPT}")
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
