"""`shmrl run` from a validated tree to an exit code: preflight, run directory, janitor, arena, supervisor, verdict.

Runs in the launcher, which owns the names of everything it makes: the arena, the socket directory, the run record.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shmrl
from shmrl.arena import render
from shmrl.config import RunTree
from shmrl.config.rundir import RunDir, latest_checkpoint, open_run_dir, peek_run_dir, used_before
from shmrl.config.tables import Log
from shmrl.launcher import preflight
from shmrl.launcher.janitor import Janitor
from shmrl.launcher.preflight import Budget
from shmrl.launcher.roles import Role, process_table
from shmrl.launcher.supervisor import Outcome, Supervisor
from shmrl.monitor.log import to_file
from shmrl.node.host import exclusive, hosted, needs_tiny_model, tiny_model_command
from shmrl.units import size

if TYPE_CHECKING:
    from shmrl.arena import Arena

log = logging.getLogger(__name__)


def run(tree: RunTree, *, resume: bool = False, clean: bool = False) -> int:
    """Start the run, watch it to its end, remove everything it made but its results; the exit code.

    Raises ConfigError before anything was started, PortInUse for a taken port, RunError for a directory in use.
    """
    budget = preflight.check(tree)
    with exclusive(tree) as sockets, ExitStack() as stack:
        rundir = open_run_dir(tree.run.output_dir, resume=resume, clean=clean)
        rundir.open_logs()
        stack.enter_context(_log_file(rundir.log("launcher"), tree.log))
        run_id = secrets.token_hex(16)
        janitor = stack.enter_context(Janitor(run_id, rundir.log("launcher")))
        janitor.tell(directory=str(sockets), record=str(rundir.record))
        if tree.shared_weights is not None:
            janitor.tell(directory=str(tree.shared_weights))
        arena, named = stack.enter_context(hosted(tree, sockets, run_id))
        janitor.tell(arena=arena.address)
        rundir.write_configs(named)
        record = _record(named, rundir)
        rundir.write_record(record)
        log.info("%s: attempt %d, logs in %s", tree.run.name, rundir.attempt, rundir.logs)
        log.info(_budget_line(budget))
        if resume:
            log.info("resuming from %s", _checkpoint_name(tree))
        try:
            outcome = _supervise(named, rundir, arena, Supervisor(run_id, janitor, arena.sweep), resume)
        except BaseException as error:
            rundir.write_record({**record, **_ending(Outcome(1, "failed", f"{type(error).__name__}: {error}"))})
            raise
        rundir.write_record({**record, **_ending(outcome)})
        level = {"finished": logging.INFO, "interrupted": logging.WARNING}.get(outcome.status, logging.ERROR)
        log.log(level, ": ".join(part for part in (outcome.status, outcome.reason) if part))
    return outcome.code


def _supervise(tree: RunTree, rundir: RunDir, arena: Arena, supervisor: Supervisor, resume: bool) -> Outcome:
    """Run the process table to its end; an orderly one must have left nothing in the arena."""
    first = None
    if needs_tiny_model(tree):
        first = Role("tiny-model", tiny_model_command(rundir.config("trainer")), rundir.log("launcher"))
    outcome = asyncio.run(supervisor.run(first, process_table(tree, rundir, resume=resume)))
    return _without_leaks(arena, outcome) if outcome.orderly else outcome


def _without_leaks(arena: Arena, outcome: Outcome) -> Outcome:
    """The outcome, unless blocks are left or more were created than freed."""
    arena.sweep()
    stats = arena.stats(exact=True)
    if stats["blocks"] == 0 and stats["created"] == stats["freed"]:
        return outcome
    for row in arena.ls()[:20]:
        log.error("left in the arena: %s", render.leak(row))
    counts = f"{stats['blocks']} blocks left, {stats['created']} created, {stats['freed']} freed"
    return Outcome(1, "failed", f"every role finished, but the arena leaks: {counts}")


def _checkpoint_name(tree: RunTree) -> str:
    step, last = latest_checkpoint(tree.run.output_dir), tree.run.max_steps
    if step is None:
        return "the start: there is no complete checkpoint yet"
    return f"the checkpoint of step {step} of {last}" + (": there is nothing left to do" if step >= last else "")


@contextmanager
def _log_file(path: Path, config: Log) -> Iterator[None]:
    """While entered, what the launcher logs goes to its file too."""
    handler = to_file(path, "launcher", config)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


# ------------------------------------------------------------------------------------------------------ run.json


def _record(tree: RunTree, rundir: RunDir) -> dict[str, Any]:
    """What run.json says while the run goes on."""
    servers = {f"{split}/{source.name}": tree.env_address(i) for i, (split, source) in enumerate(tree.sources)}
    addresses = {
        "arena": tree.arena.address,
        "trainer": tree.trainer_address,
        "inference": tree.inference.engine_urls,
        "envs": servers,
        "node": tree.node.url,
    }
    return {
        "name": tree.run.name,
        "status": "running",
        "exit_code": None,
        "reason": "",
        "attempt": rundir.attempt,
        "started": time.time(),
        "versions": _versions(),
        "seeds": {"run": tree.run.seed},
        "addresses": addresses,
    }


def _ending(outcome: Outcome) -> dict[str, Any]:
    return {"status": outcome.status, "exit_code": outcome.code, "reason": outcome.reason, "ended": time.time()}


def _versions() -> dict[str, str]:
    """Versions of ourselves, the interpreter and the libraries that decide numbers; nothing is imported for it."""
    versions = {"shmrl": shmrl.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


# ------------------------------------------------------------------------------------------------------ dry run


def dry_run(tree: RunTree, *, resume: bool = False, clean: bool = False) -> int:
    """Check everything, write the resolved configs, print what would be started; starts nothing.

    RunError when a run is going on in the directory: its configs are not ours to write.
    """
    budget = preflight.check(tree)
    with exclusive(tree):
        rundir = peek_run_dir(tree.run.output_dir)
        rundir.write_configs(tree)
    roles = process_table(tree, rundir)
    rows = [("role", "count", "address", "log")]
    rows += [(role.name, str(role.count), role.address, str(role.log)) for role in roles]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"configs: {rundir.root / 'configs'}")
    print(_budget_line(budget))
    parts = ", ".join(f"{name} {nbytes:,.1f}" for name, nbytes in budget.per_token.items())
    print(f"bytes per token: {budget.bytes_per_token:,.1f} ({parts})")
    if not (resume or clean) and (refusal := used_before(tree.run.output_dir)):
        print(f"note: {refusal}")
    return 0


def _budget_line(budget: Budget) -> str:
    (episodes, longest), (steps, tokens) = budget.in_flight, budget.retained
    retained = f" and {steps:,} steps x {tokens:,} tokens retained," if steps else ""
    return (
        f"arena: {size(budget.capacity)} of {size(budget.free)} available; at most {size(budget.needed)} in "
        f"flight ({episodes:,} episodes x {longest:,} tokens{retained} x {budget.bytes_per_token:,.1f} B)"
    )
