"""`shmrl run` from a validated tree to an exit code: preflight, run directory, janitor, arena, supervisor, verdict.

Runs in the launcher, which owns the names of everything it makes: the arena, the socket directory, the run record.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import platform
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shmrl
from shmrl.arena import render
from shmrl.config import RunTree
from shmrl.config.addresses import is_loopback
from shmrl.config.rundir import RunDir, latest_checkpoint, open_run_dir, peek_run_dir, refusal_of
from shmrl.config.tables import Log, Page
from shmrl.errors import ConfigError, told
from shmrl.launcher import preflight
from shmrl.launcher.janitor import Janitor
from shmrl.launcher.preflight import Budget
from shmrl.launcher.roles import Role, process_table
from shmrl.launcher.supervisor import Outcome, Supervisor
from shmrl.monitor import console, metrics
from shmrl.monitor.log import to_file
from shmrl.monitor.page import Listener, listen, missing
from shmrl.monitor.summary import summary
from shmrl.node.host import exclusive, hosted, needs_tiny_model, run_id_of, tiny_model_command
from shmrl.units import size

if TYPE_CHECKING:
    from shmrl.arena import Arena

log = logging.getLogger(__name__)


def run(tree: RunTree, *, resume: bool = False, clean: bool = False) -> int:
    """Start the run, watch it to its end, remove everything it made but its results; the exit code.

    Raises ConfigError before anything was started, PortInUse for a taken port, RunError for a directory in use.
    """
    if tree.deployment.several:
        raise ConfigError("deployment.kind = 'multi_node': `shmrl run FILE --slurm` submits the job that has the nodes")
    budget = preflight.check(tree)
    opened = functools.partial(open_run_dir, tree.run.output_dir, resume=resume, clean=clean)
    with hosting(tree, opened, run_id_of(tree)) as (host, named), ExitStack() as stack:
        rundir = host.rundir
        host.janitor.tell(record=str(rundir.record))
        rundir.drain.unlink(missing_ok=True)
        rundir.write_configs(named)
        page = stack.enter_context(live_page(tree.monitor.page))
        record = beginning(named, rundir, page)
        rundir.write_record(record)
        log.info("%s: attempt %d, logs in %s", tree.run.name, rundir.attempt, rundir.logs)
        log.info(budget_line(budget))
        if resume:
            log.info("resuming from %s", _checkpoint_name(tree))
        if page is not None:
            log.info("live page: %s", page.url)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            log.info("SIGINT is ignored here, as by a script's & or nohup: `touch %s` drains the run", rundir.drain)
        first = None
        if needs_tiny_model(tree):
            first = Role("tiny-model", tiny_model_command(rundir.config("trainer")), rundir.log("launcher"))

        def tick() -> None:
            host.tick()
            if rundir.drain.exists():
                supervisor.drain(str(rundir.drain))

        supervisor = Supervisor(host.tag, host.janitor, tick)
        try:
            roles = process_table(named, rundir, resume=resume, page=page)
            outcome = host.checked(asyncio.run(supervisor.run(first, roles)))
        except BaseException as error:
            rundir.write_record({**record, **ending(Outcome(1, "failed", told(error)))})
            raise
        rundir.write_record({**record, **ending(outcome)})
        say(outcome)
        _summarise(tree, host.arena)
    return outcome.code


@dataclass(frozen=True)
class Hosting:
    """What a launcher has while it hosts a run, or a node of one. tag: is in the environment of all its processes."""

    rundir: RunDir
    janitor: Janitor
    arena: Arena
    tag: str

    def tick(self) -> None:
        """Twice a second: free the blocks of the dead."""
        self.arena.sweep()

    def checked(self, outcome: Outcome) -> Outcome:
        """The outcome; an orderly one must have left nothing in the arena."""
        return _without_leaks(self.arena, outcome) if outcome.orderly else outcome


@contextmanager
def hosting(
    tree: RunTree, opened: Callable[[], RunDir], run_id: str, token: str | None = None
) -> Iterator[tuple[Hosting, RunTree]]:
    """The run's arena on this node, its token and a janitor for both; the tree that names them. opened: the run's
    directory, once nobody else has it."""
    with exclusive(tree) as sockets, ExitStack() as stack:
        rundir, tag = opened(), secrets.token_hex(16)
        rundir.open_logs()
        stack.enter_context(_log_file(rundir.log("launcher"), tree.log))
        janitor = stack.enter_context(Janitor(tag, rundir.log("launcher")))
        janitor.tell(directory=str(sockets))
        if tree.shared_weights is not None:
            janitor.tell(directory=str(tree.shared_weights))
        arena, named = stack.enter_context(hosted(tree, sockets, run_id, token))
        janitor.tell(arena=arena.address)
        yield Hosting(rundir, janitor, arena, tag), named


def say(outcome: Outcome) -> None:
    """How it ended, in the log."""
    level = {"finished": logging.INFO, "interrupted": logging.WARNING}.get(outcome.status, logging.ERROR)
    log.log(level, ": ".join(part for part in (outcome.status, outcome.reason) if part))


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


def _summarise(tree: RunTree, arena: Arena) -> None:
    """What it came to, on the terminal; in JSON logs one more record."""
    output_dir = tree.run.output_dir
    lines = summary(metrics.lines(output_dir / "metrics.jsonl"), output_dir, arena.stats())
    if tree.monitor.console and lines:
        console.show("\n".join(lines), as_json=tree.log.json_lines)


def _checkpoint_name(tree: RunTree) -> str:
    step, last = latest_checkpoint(tree.run.output_dir), tree.run.max_steps
    if step is None:
        return "the start: there is no complete checkpoint yet"
    return f"the checkpoint of step {step} of {last}" + (": there is nothing left to do" if step >= last else "")


@contextmanager
def live_page(config: Page) -> Iterator[Listener | None]:
    """The live page's socket, while entered. Where there can be none the log says why, and the run goes on without."""
    why = missing() if config.enabled else None
    listener = None
    if config.enabled and why is None:
        try:
            listener = listen(config.host, config.port)
        except OSError as error:
            why = f"monitor.page.host = {config.host!r}: {error.strerror or error}"
    if why is not None:
        log.warning("no live page: %s", why)
    elif listener is not None and not is_loopback(listener.socket.getsockname()[0]):
        log.warning("live page: whoever reaches %s reads logs and rollouts there", listener.url)
    try:
        yield listener
    finally:
        if listener is not None:
            listener.socket.close()


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


def beginning(tree: RunTree, rundir: RunDir, page: Listener | None) -> dict[str, Any]:
    """What run.json says while the run goes on."""
    servers: dict[str, Any] = {
        f"{split}/{source.name}": tree.env_address(i) for i, (split, source) in enumerate(tree.sources)
    }
    addresses = {
        "arena": tree.arena.address,
        "trainer": tree.trainer_address,
        "inference": tree.inference.engine_urls,
        "envs": servers,
        "node": tree.node.url,
        "page": page and page.url,
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


def ending(outcome: Outcome) -> dict[str, Any]:
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

    As of the run itself, ConfigError where the directory is none for it, and RunError when a run is going on in it: the
    configs there are not ours to write.
    """
    budget = preflight.check(tree)
    refusal = refusal_of(tree.run.output_dir, resume=resume, clean=clean)
    with exclusive(tree):
        rundir = peek_run_dir(tree.run.output_dir)
        if refusal is None:
            rundir.write_configs(tree)
    print_table([("role", "count", "address", "log")], process_table(tree, rundir))
    if refusal is None:
        print(f"configs: {rundir.root / 'configs'}")
    if tree.monitor.page.enabled:
        why = missing()
        print(f"live page: {f'none: {why}' if why else f'port {tree.monitor.page.port}, or the next that is free'}")
    print(budget_line(budget))
    print_per_token(budget)
    if refusal is not None:
        raise refusal
    return 0


def print_table(head: list[tuple[str, ...]], roles: Sequence[Role]) -> None:
    rows = [*head, *((role.name, str(role.count), role.address, str(role.log)) for role in roles)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_per_token(budget: Budget) -> None:
    parts = ", ".join(f"{name} {nbytes:,.1f}" for name, nbytes in budget.per_token.items())
    print(f"bytes per token: {budget.bytes_per_token:,.1f} ({parts})")


def budget_line(budget: Budget) -> str:
    (episodes, longest), (steps, tokens) = budget.in_flight, budget.retained
    retained = f" and {steps:,} steps x {tokens:,} tokens retained," if steps else ""
    return (
        f"arena: {size(budget.capacity)} of {size(budget.free)} available; at most {size(budget.needed)} in "
        f"flight ({episodes:,} episodes x {longest:,} tokens{retained} x {budget.bytes_per_token:,.1f} B)"
    )
