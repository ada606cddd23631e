"""The process table of a run: which roles are started, with which command, logging where. Pure data, no process.

Every role is the command a person would type (`shmrl <role> FILE`), so a run by hand and `shmrl run` start the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from shmrl.config import RunTree
from shmrl.config.rundir import RunDir
from shmrl.monitor.page import Listener
from shmrl.node.host import node_command

SHUTDOWN_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class Role:
    """One process to start and watch.

    Attributes:
        final: its clean exit is part of the run's success; any exit of another role is a failure.
        drains: gets the first Ctrl-C, and takes the run to an orderly end; it starts with SIGINT blocked.
        console: its standard output (a line per step) goes to the terminal; logs go to the file in every case.
        restarts: how often it is started again when it dies, before that ends the run. again: what its command then
            has in addition.
        socket: it is started whenever somebody connects to this listening socket, which it inherits; its end, however
            it comes, changes nothing for the run.
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
    socket: socket | None = None


def process_table(tree: RunTree, rundir: RunDir, *, resume: bool = False, page: Listener | None = None) -> list[Role]:
    """Every role of a run on one node in the order in which they are started. page: the live page's socket, if it has
    one."""
    roles = [*env_servers(tree, rundir), orchestrator(tree, rundir, resume=resume)]
    if tree.node.address is not None:
        roles.append(node_server(tree, rundir))
    if not tree.inference.urls:
        roles.append(engine(tree, rundir))
    roles.append(trainer(tree, rundir, resume=resume))
    return roles if page is None else [*roles, live_page(rundir, page)]


def env_servers(tree: RunTree, rundir: RunDir) -> list[Role]:
    """A server for every source that nobody else serves."""
    return [_env_server(tree, rundir, i) for i, (_, s) in enumerate(tree.sources) if s.serve.address is None]


def orchestrator(tree: RunTree, rundir: RunDir, *, resume: bool = False) -> Role:
    given, again = _resuming(resume)
    return Role(
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


def node_server(tree: RunTree, rundir: RunDir) -> Role:
    command, restarts = node_command(rundir), tree.run.restarts.node
    return Role("node", command, rundir.log("node"), str(tree.node.url), restarts=restarts)


def engine(tree: RunTree, rundir: RunDir) -> Role:
    command = shmrl("inference", rundir.config("inference"))
    address, restarts = tree.inference.engine_urls[0], tree.run.restarts.inference
    return Role("inference", command, rundir.log("inference"), address, restarts=restarts)


def trainer(tree: RunTree, rundir: RunDir, *, resume: bool = False) -> Role:
    """torch's launcher with the ranks of this node."""
    given, again = _resuming(resume)
    command, restarts = [*shmrl("trainer", rundir.config("trainer")), *given], tree.run.restarts.trainer
    log, ranks = rundir.log("trainer"), tree.trainer.ranks // tree.deployment.trainer_nodes
    return Role("trainer", command, log, count=ranks, final=True, restarts=restarts, again=again)


def _resuming(resume: bool) -> tuple[list[str], list[str]]:
    """(what a command has at first, what it has in addition when it is started again)."""
    return (["--resume"], []) if resume else ([], ["--resume"])


def live_page(rundir: RunDir, page: Listener) -> Role:
    command = shmrl("page", rundir.root, "--fd", str(page.socket.fileno()))
    return Role("page", command, rundir.log("page"), page.url, socket=page.socket)


def _env_server(tree: RunTree, rundir: RunDir, index: int) -> Role:
    split, source = tree.sources[index]
    command = shmrl("env-server", rundir.env_config(split, source.name))
    log = rundir.env_log(split, source.name)
    name = f"env-server {split}/{source.name}"
    return Role(name, command, log, tree.env_address(index), count=source.serve.pool.most)


def shmrl(*arguments: str | Path) -> list[str]:
    """A command of this very installation."""
    return [sys.executable, "-m", "shmrl", *map(str, arguments)]


def torch_command(tree: RunTree, arguments: Sequence[str]) -> list[str]:
    """`shmrl trainer` under torch's launcher, which starts the ranks (PyPI's `torchrun` is another package).

    What it writes about itself goes to the run's socket directory, which is removed at the end, instead of to /tmp.
    """
    nodes, scratch = tree.deployment.trainer_nodes, str(tree.socket_dir / "torch")
    ranks, meet = str(tree.trainer.ranks // nodes), ["--standalone"]
    if tree.job is not None and tree.job.rendezvous is not None:
        host, _, port = tree.job.rendezvous.rpartition(":")
        meet = ["--nnodes", str(nodes), "--node-rank", str(tree.job.trainer_node)]
        meet += ["--master-addr", host, "--master-port", port]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", ranks]
    options = ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S), "--monitor-interval", "0.1", "--log-dir", scratch]
    return [*launcher, *options, "-m", "shmrl", "trainer", *arguments]
