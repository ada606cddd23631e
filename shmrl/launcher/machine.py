"""What this machine has, for `shmrl init` and `shmrl doctor`: cores, GPUs, memory. Reads /proc and /dev; no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shmrl.arena import files, memory
from shmrl.units import size


@dataclass(frozen=True, slots=True)
class Machine:
    """Example: Machine(cores=2, gpus=(), shm_free=25 << 30, memory_free=24 << 30)

    Attributes: cores: that this process may use. gpus: names of NVIDIA GPUs. shm_free: bytes; 0 without /dev/shm.
    """

    cores: int
    gpus: tuple[str, ...]
    shm_free: int
    memory_free: int

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        shm = f"{size(self.shm_free)} free in /dev/shm" if self.shm_free else "no /dev/shm"
        return f"{self.cores} cores, {gpus}, {shm}, {size(self.memory_free)} of memory available"


def machine() -> Machine:
    """What there is now."""
    writable = files.SHM.is_dir() and os.access(files.SHM, os.W_OK)
    shm = memory.limits(files.SHM)[0].free if writable else 0
    available = min((limit.free for limit in memory.limits(None)), default=0)
    return Machine(cores(), tuple(gpus()), shm, available)


def cores() -> int:
    """Of this process's affinity, and of its cgroup's quota where that is less."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no such cgroup, or "max"
        return allowed


def gpus(root: Path = Path("/")) -> list[str]:
    """Names of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, as the driver gives them."""
    found = []
    for info in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", info.read_text(), re.MULTILINE)
        found.append(model[1].strip() if model else "NVIDIA GPU")
    if not found:
        found = ["NVIDIA GPU"] * len([path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else found[: len([one for one in visible.split(",") if one.strip()])]
