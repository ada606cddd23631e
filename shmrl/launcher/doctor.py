"""`shmrl doctor`: what this machine can and cannot do for a run, a line each, and advice where something is off.

The arena's part (shared memory, limits, huge pages, NUMA, locks) is `arena/doctor.py`; here is what runs need beside
it: Python and torch, GPUs, a vLLM, bubblewrap, ports. Imports none of what it looks for. Called by the CLI.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from shmrl.arena import doctor as arena
from shmrl.arena.doctor import Finding, finding
from shmrl.config import load_run
from shmrl.errors import ConfigError, PortInUse
from shmrl.launcher.machine import cores, gpus
from shmrl.node.ports import free_after, holder, is_free

DEFAULT_PORTS = {"inference.port": 8000, "orchestrator.env_server_base_port": 5000}


def doctor(
    files: Sequence[Path] = (), flags: Mapping[str, str] | None = None, vllm: Path | None = None
) -> list[Finding]:
    """Findings: {"name", "status": "ok" | "warn" | "fail", "detail", "fix"}; fix is "" when there is nothing to do.

    files: of a run: whether it would start here, as its dry run says. vllm: the interpreter to ask for a vLLM.
    """
    tree = load_run(files, flags) if files else None
    python = vllm or (tree.inference.python if tree else None)
    ours = [_python(), _torch(), _cores(), *_gpus(), _vllm(python), _sandbox()]
    backing = "shm" if tree is None else tree.arena.backing
    return [*ours, *(_default_ports() if tree is None else _run(tree)), *arena.doctor(backing)]


def render(findings: Sequence[Finding]) -> str:
    """One line per finding, advice below, and what it comes to at the end."""
    width = max(len(one["name"]) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{one['status']:<5} {one['name']:<{width}}  {one['detail']}")
        lines += [f"      {'':<{width}}  -> {one['fix']}"] if one["fix"] else []
    bad = {status: [one["name"] for one in findings if one["status"] == status] for status in ("fail", "warn")}
    told = [f"{len(names)} {status}: {', '.join(names)}" for status, names in bad.items() if names]
    return "\n".join([*lines, "", "; ".join(told) or "nothing is in the way of a run"])


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return finding("python", ok, f"{platform.python_version()} ({sys.executable})", "Python 3.11 or later", bad="fail")


def _torch() -> Finding:
    """What the engine of our own and the trainer run on."""
    found, missing = [], []
    for name in ("torch", "transformers", "safetensors"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    detail = ", ".join([*found, *(f"no {name}" for name in missing)])
    fix = "pip install -c constraints.txt -e '.[train]': without it nothing trains here (env servers need none of it)"
    return finding("torch", not missing, detail, fix)


def _cores() -> Finding:
    count = cores()
    fix = "a run has 5 processes or more: it works, and takes its time; OMP_NUM_THREADS=1 keeps them apart"
    return finding("cores", count >= 2, str(count), fix)


def _gpus() -> Iterator[Finding]:
    names = gpus()
    detail = (
        ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        or "none: the CPU trains small models"
    )
    yield finding("GPU", True, detail)
    if names and "+cpu" in _version("torch"):
        yield finding("torch for GPU", False, _version("torch"), "install a torch built for CUDA: pytorch.org")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _vllm(python: Path | None) -> Finding:
    from shmrl.inference.vllm import versions

    try:
        found = versions.installed(python or Path(sys.executable))
    except ConfigError as error:
        if python is None:
            return finding("vLLM", True, "none in this interpreter; inference.python or --vllm names another")
        return finding("vLLM", False, f"none at {python}", str(error), bad="fail")
    detail = f"{found.version} for {found.device}" + (f" at {python}" if python else "")
    return finding("vLLM", found.release >= versions.OLDEST, detail, "0.27 or later is needed")


def _sandbox() -> Finding:
    """Needed by environments that run what a model wrote, by none else."""
    from shmrl.env.sandbox import problem

    why = problem()
    return (
        finding("bwrap", why is None, shutil.which("bwrap") or "", "")
        if why is None
        else finding("bwrap", False, "no sandbox for what a model wrote", why)
    )


def _default_ports() -> Iterator[Finding]:
    for key, port in DEFAULT_PORTS.items():
        free = is_free("127.0.0.1", port)
        detail = f"{port} is free" if free else f"{port} is taken by {holder(port)}"
        fix = f"the default of {key}: give a run --{key.replace('_', '-')} {free_after('127.0.0.1', port, 10)}"
        yield finding(f"port {port}", free, detail, fix)


def _run(tree: Any) -> Iterator[Finding]:
    """What keeps this run from starting here."""
    from shmrl.launcher import preflight

    try:
        (preflight.check_job if tree.deployment.several else preflight.check)(tree)
    except (ConfigError, PortInUse) as error:
        name = "ports" if isinstance(error, PortInUse) else "run"
        for problem in error.problems:
            detail, _, fix = problem.partition("; ") if "; " in problem else problem.rpartition(": ")
            yield finding(name, False, detail or problem, fix, bad="fail")
    else:
        yield finding("run", True, "it would start here")
