"""The trainer: one process per rank under torch.distributed.run; the only room but the engine that imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from shmrl.config import RunTree


def main(tree: RunTree, resume: bool, fake_data: bool = False) -> NoReturn:
    """Run this rank to the end of the run, and end its process. Imports torch, so only the trainer's processes call it.

    fake_data: train on invented episodes instead, alone.

    Raises what ended the run. torch's launcher prints it last, as the root cause, for the rank that failed first.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    from shmrl.trainer import fake, loop
    from shmrl.trainer.parallel import leave

    leave((record(fake.main)(tree) if fake_data else record(loop.main)(tree, resume)) or 0)
