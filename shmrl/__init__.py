"""shmrl: a shared-memory runtime for the per-token arrays of reinforcement-learning post-training.

Importing this package is light (no numpy, no torch): names are resolved on first use (PEP 562), so an environment
worker pays for the arena alone and a trainer for what it touches.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
LAYOUT_VERSION = 6  # of an arena: SRL_VERSION in csrc/arena_layout.h; processes of another one are refused

_WHERE = {
    "Arena": "shmrl.arena",
    "Handle": "shmrl.types",
    "Sample": "shmrl.types",
    "Slice": "shmrl.types",
    "MicroBatch": "shmrl.types",
    "Branch": "shmrl.payload",
    "Routing": "shmrl.payload",
    "TensorBatch": "shmrl.payload",
    "encode": "shmrl.payload",
    "pack": "shmrl.payload",
    "assemble": "shmrl.payload",
    "register_field": "shmrl.payload",
    "ragged": "shmrl.payload",
    "ShmrlError": "shmrl.errors",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from shmrl.arena import Arena as Arena
    from shmrl.errors import ShmrlError as ShmrlError
    from shmrl.payload import Branch as Branch
    from shmrl.payload import Routing as Routing
    from shmrl.payload import TensorBatch as TensorBatch
    from shmrl.payload import assemble as assemble
    from shmrl.payload import encode as encode
    from shmrl.payload import pack as pack
    from shmrl.payload import ragged as ragged
    from shmrl.payload import register_field as register_field
    from shmrl.types import Handle as Handle
    from shmrl.types import MicroBatch as MicroBatch
    from shmrl.types import Sample as Sample
    from shmrl.types import Slice as Slice


def __getattr__(name: str) -> object:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'shmrl' has no attribute {name!r}")
    value = getattr(import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
