"""What `shmrl replay show` and `shmrl replay assemble` say of a step's file: plain data, and its lines for people.

Runs in the CLI's process; needs the file alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmrl.arena.memory import human
from shmrl.errors import RunError
from shmrl.payload.assemble import assemble
from shmrl.payload.header import Header, name_of
from shmrl.payload.stepfile import StepFile
from shmrl.types import MicroBatch, Sample

SAMPLE_META = ("task", "reward", "version_start", "version_end", "stop_reason")


def show(path: Path) -> dict[str, Any]:
    """What is in the file; every block is checked."""
    with StepFile(path) as file:
        return {
            "file": str(path),
            "nbytes": file.nbytes,
            "run": file.run,
            "step": file.step,
            "blocks": len(file.blocks),
            "block_nbytes": sum(nbytes for _, nbytes, _ in file.blocks.values()),
            "columns": _columns(file),
            "micro_batches": [
                {"rank": rank, "number": number, **_described(micro)}
                for (rank, number), micro in file.micro_batches.items()
            ],
        }


def _columns(file: StepFile) -> dict[str, int]:
    """Bytes by column, over all blocks."""
    found: dict[str, int] = {}
    for handle in file.blocks:
        with file.get(handle) as view:
            for column in Header.unpack(view, repr(handle)).columns.values():
                found[column.name] = found.get(column.name, 0) + column.nbytes
    return found


def _described(micro: MicroBatch) -> dict[str, Any]:
    return {
        "tokens": micro.num_tokens,
        "padding": micro.padding,
        "fields": list(micro.fields),
        "samples": [_sample(sample) for sample in micro.samples],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    meta = {key: sample.meta[key] for key in SAMPLE_META if key in sample.meta}
    counts = {"T": sample.T, "S": sample.S, "R": sample.R}
    return {"name": name_of(sample), **counts, "advantage": sample.advantage, **meta}


def shown(found: dict[str, Any]) -> str:
    """The lines of `show`."""
    micros = found["micro_batches"]
    lines = [
        f"step {found['step']} of run {found['run']}: {len(micros)} micro batches, {found['blocks']} blocks of "
        f"{human(found['block_nbytes'])}; {found['file']} has {human(found['nbytes'])}",
        "columns: " + ", ".join(f"{name} {human(nbytes)}" for name, nbytes in found["columns"].items()),
    ]
    for micro in micros:
        lines.append(
            f"rank {micro['rank']}, micro batch {micro['number']}: {len(micro['samples'])} samples, "
            f"{micro['tokens']:,} tokens ({micro['padding']} padding), fields {', '.join(micro['fields']) or 'none'}"
        )
        for sample in micro["samples"]:
            lines.append("    " + ", ".join(f"{key} {_word(value)}" for key, value in sample.items()))
    return "\n".join(lines)


def _word(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------------------------------- assemble


def assembled(path: Path, npz: Path | None = None) -> dict[str, Any]:
    """SHA-256 of every array of every micro batch, and of all of them; `npz`: write the arrays there, too.

    An array's digest is that of its bytes in C order, the whole one's that of the lines `shown` says. Arrays in the
    .npz are called `<rank>:<number>/<name>`.
    """
    rows: list[dict[str, Any]] = []
    kept: dict[str, NDArray[Any]] = {}
    with StepFile(path) as file:
        for (rank, number), micro in file.micro_batches.items():
            for name, array in assemble(file, micro).arrays().items():
                label = f"{rank}:{number}/{name}"
                digest = hashlib.sha256(array.tobytes()).hexdigest()
                rows.append({"array": label, "dtype": str(array.dtype), "shape": list(array.shape), "sha256": digest})
                if npz is not None:
                    kept[label] = array
        found = {"file": str(path), "run": file.run, "step": file.step, "arrays": rows}
    whole = hashlib.sha256("".join(f"{_line(row)}\n" for row in rows).encode()).hexdigest()
    if npz is not None:
        _save(npz, kept)
    return {**found, "sha256": whole}


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    try:
        with path.open("wb") as file:  # an open file, because numpy would add .npz to a name
            np.savez(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error


def _line(row: dict[str, Any]) -> str:
    return f"{row['sha256']}  {row['array']}  {row['dtype']}  {'x'.join(map(str, row['shape']))}"


def assembled_lines(found: dict[str, Any]) -> str:
    """A line per array, then one for all."""
    return "\n".join([*map(_line, found["arrays"]), f"{found['sha256']}  step {found['step']} of run {found['run']}"])
