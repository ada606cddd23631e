"""The process table of a run: which roles are started, with which command, logging where. Pure data, no process.

Every role is the command a person would type (`shmrl <role> FILE`), so a run by hand and `shmrl run` start the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shmrl.config import RunTree
from shmrl.config.rundir import RunDir
from shmrl.node.host import node_command

SHUTDOWN_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class Role:
    """One process to start and watch.

    Attributes:
        final: its clean exit is part of the run's success; any exit of another role is a failure.
        drains: gets the first Ctrl-C, and takes the run to an orderly end.
        console: its standard output (a line per step) goes to the terminal; logs go to the file in every case.
        restarts: how often it is started again when it dies, before that ends the run. again: what its command then
            has in addition.
        count: processes that do this role's work (ranks, workers); for the table only.

    Example: Role("orchestrator", ["python", "-m", "shmrl", "orchestrator", "o.toml"], Path("o.log"), final=True)
    """

    name: str
    command: Sequence[str]
    log: Path
    address: str = ""
    count: int = 1
    final: bool = False
    drains: bool = False
    console: bool = False
    restarts: int = 0
    again: Sequence[str] = ()


def process_table(tree: RunTree, rundir: RunDir, *, resume: bool = False) -> list[Role]:
    """Every role of a run in the order in which they are started."""
    given, again = (["--resume"], []) if resume else ([], ["--resume"])
    roles = [_env_server(tree, rundir, i) for i, (_, s) in enumerate(tree.sources) if s.serve.address is None]
    roles.append(
        Role(
            "orchestrator",
            [*shmrl("orchestrator", rundir.config("orchestrator")), *given],
            rundir.log("orchestrator"),
            tree.trainer_address,
            final=True,
            drains=True,
            console=True,
            restarts=tree.run.restarts.orchestrator,
            again=again,
        )
    )
    if tree.node.address is not None:
        command, restarts = node_command(rundir), tree.run.restarts.node
        roles.append(Role("node", command, rundir.log("node"), str(tree.node.url), restarts=restarts))
    if not tree.inference.urls:
        command = shmrl("inference", rundir.config("inference"))
        address, restarts = tree.inference.engine_urls[0], tree.run.restarts.inference
        roles.append(Role("inference", command, rundir.log("inference"), address, restarts=restarts))
    command, restarts = [*shmrl("trainer", rundir.config("trainer")), *given], tree.run.restarts.trainer
    log, ranks = rundir.log("trainer"), tree.trainer.ranks
    roles.append(Role("trainer", command, log, count=ranks, final=True, restarts=restarts, again=again))
    return roles


def _env_server(tree: RunTree, rundir: RunDir, index: int) -> Role:
    split, source = tree.sources[index]
    command = shmrl("env-server", rundir.env_config(split, source.name))
    log = rundir.env_log(split, source.name)
    name = f"env-server {split}/{source.name}"
    return Role(name, command, log, tree.env_address(index), count=source.serve.pool.workers)


def shmrl(*arguments: str | Path) -> list[str]:
    """A command of this very installation."""
    return [sys.executable, "-m", "shmrl", *map(str, arguments)]


def torch_command(tree: RunTree, arguments: Sequence[str]) -> list[str]:
    """`shmrl trainer` under torch's launcher, which starts the ranks (PyPI's `torchrun` is another package).

    What it writes about itself goes to the run's socket directory, which is removed at the end, instead of to /tmp.
    """
    ranks, scratch = str(tree.trainer.ranks), str(tree.socket_dir / "torch")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    options = ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S), "--monitor-interval", "0.1", "--log-dir", scratch]
    return [*launcher, *options, "-m", "shmrl", "trainer", *arguments]
