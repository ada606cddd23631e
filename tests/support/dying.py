"""A custom loss for ranks that write down all they read, of which one dies once between assembly and release.

`trainer.loss.path = "tests.support.dying:record"` imports this into every rank. SHMRL_TEST_READ is the directory to
write to, SHMRL_TEST_DIES the place of the death as "step:rank".
"""

import os
import signal
from pathlib import Path

import numpy as np
import torch

from shmrl.trainer.losses import LossOutput
from shmrl.trainer.step import Stepper

_assemble = Stepper._assemble


def _recorded(self, step, *given):
    share = _assemble(self, step, *given)
    directory, rank = Path(os.environ["SHMRL_TEST_READ"]), self._ranks.rank
    for number, (_, batch) in enumerate(share.work):
        np.savez(directory / f"{step}-{rank}-{number}-{os.getpid()}.npz", **batch.arrays())
    marker = directory / "died"
    if os.environ["SHMRL_TEST_DIES"] == f"{step}:{rank}" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return share


Stepper._assemble = _recorded


def record(x):
    """Plain policy gradient: what the weights become depends on what was read."""
    return LossOutput(-(x.advantages * x.logprobs).sum(), torch.zeros_like(x.logprobs, dtype=torch.bool))
