"""Payloads: the per-token arrays of a branch, from the engine's answer to the trainer's batch.

An env worker builds a `Branch` (usually with `BranchBuilder`) and `encode`s it into one arena block; the orchestrator
handles `Sample`s and `pack`s them into micro batches without touching an array; a trainer rank `assemble`s those. The
field registry (`register_field`) says what arrays there are. Nothing here imports torch except `TensorBatch.torch`.
"""

from __future__ import annotations

from shmrl.payload.assemble import assemble
from shmrl.payload.batch import TensorBatch, sequence_first
from shmrl.payload.branch import Branch
from shmrl.payload.encode import encode
from shmrl.payload.gather import gather
from shmrl.payload.header import Header, read_header, read_text, read_tokens
from shmrl.payload.ingest import BranchBuilder
from shmrl.payload.pack import pack
from shmrl.payload.plan import TokenRange, zigzag
from shmrl.payload.registry import ragged, register_field
from shmrl.payload.routing import Routing
from shmrl.payload.sharing import SharedRows
from shmrl.payload.wireform import micro_batches_from_wire, micro_batches_to_wire, sample_from_wire, sample_to_wire

__all__ = [
    "Branch",
    "BranchBuilder",
    "Header",
    "Routing",
    "SharedRows",
    "TensorBatch",
    "TokenRange",
    "assemble",
    "encode",
    "gather",
    "micro_batches_from_wire",
    "micro_batches_to_wire",
    "pack",
    "ragged",
    "read_header",
    "read_text",
    "read_tokens",
    "register_field",
    "sample_from_wire",
    "sample_to_wire",
    "sequence_first",
    "zigzag",
]
