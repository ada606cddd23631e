"""Inside a job: what the sbatch script calls, once on the first node (`open`) and then once on every node.

    python -m shmrl.launcher.job open RUN_DIR [--resume] NODE...     a new attempt; NODE... in the job's order
    python -m shmrl.launcher.job single|inference|trainer RUN_DIR    the launcher of this node

A launcher hosts its node's arena and supervises the roles there, exactly as that of a run on one node does. Addresses
are published (`node.published`), because every server takes a free port. The first trainer node's launcher has the
run's record: what it writes into run.json ends the others. A node that cannot start says so in a file, which ends the
run while it starts; later the run goes on without an inference node.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shmrl.config import JobConfig, RunTree, load_run
from shmrl.config.addresses import node_name
from shmrl.config.rundir import RunDir, open_run_dir, write_atomic
from shmrl.errors import ConfigError, Faults, ProcessFailed, RunError, ShmrlError, told
from shmrl.launcher import preflight, roles
from shmrl.launcher.roles import Role
from shmrl.launcher.run import Hosting, beginning, budget_line, ending, hosting, live_page, run, say
from shmrl.launcher.supervisor import TRAINER, Outcome, Rules, Supervisor
from shmrl.monitor.log import setup
from shmrl.node.host import needs_tiny_model, tiny_model_command
from shmrl.node.ports import free
from shmrl.node.published import Addresses

log = logging.getLogger(__name__)

RUN_FILE = Path("configs", "run.toml")
_JOB_FILE = Path("configs", "job.json")


@dataclass(frozen=True, slots=True)
class Opened:
    """What all nodes of an attempt have to agree on; in a file that this user alone can read."""

    run_id: str
    token: str
    attempt: int
    resume: bool
    nodes: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> Opened:
        found = json.loads((directory / _JOB_FILE).read_text())
        return cls(**found | {"nodes": tuple(found["nodes"])})


def open_job(directory: Path, nodes: Sequence[str], *, resume: bool) -> None:
    """A new attempt of the run in `directory`: logs, id, token, and the model of [model.tiny]. ConfigError when the
    directory was used and `resume` is not given."""
    tree = load_run([directory / RUN_FILE])
    setup("launcher", tree.log)
    if len(nodes) != tree.deployment.nodes:
        raise ConfigError(f"the job has {len(nodes)} nodes, and [deployment] asks for {tree.deployment.nodes}")
    _forget_submission(directory)
    attempt = 0
    if tree.deployment.several:
        rundir = open_run_dir(directory, resume=resume)
        rundir.open_logs()
        attempt = rundir.attempt
        if needs_tiny_model(tree) and (code := subprocess.run(tiny_model_command(directory / RUN_FILE)).returncode):
            raise ProcessFailed("the child that writes the tiny model", code)
    for left in (directory / "drain", *(directory / "addresses").glob("*.failed")):
        left.unlink(missing_ok=True)
    job = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    made = Opened("-".join([*job, secrets.token_hex(4)]), secrets.token_hex(16), attempt, resume, tuple(nodes))
    write_atomic(directory / _JOB_FILE, json.dumps(asdict(made)) + "\n", 0o600)
    log.info("%s: attempt %d on %s", made.run_id, attempt, ", ".join(nodes))


def _forget_submission(directory: Path) -> None:
    """The record that a submission left makes the directory look used."""
    record = _record(directory)
    if record.get("status") == "submitted":
        (directory / "run.json").unlink()


def _record(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------------------- every node


def launch(kind: str, directory: Path) -> int:
    """This node's launcher, until the run ends here; its exit code."""
    tree, opened, me = load_run([directory / RUN_FILE]), Opened.read(directory), node_name()
    setup(f"launcher:{me}" if tree.deployment.several else "launcher", tree.log)
    if kind == "single":
        return run(tree, resume=opened.resume)
    failed = _Failed(directory, opened.run_id)
    try:
        outcome = _Node(tree, opened, kind, opened.nodes.index(me), failed).run()
    except BaseException as error:
        failed.tell(me, "; ".join(error.problems) if isinstance(error, Faults) else f"{error}")
        raise
    say(outcome)
    if outcome.code:
        failed.tell(me, outcome.reason)
    return outcome.code


class _Failed:
    """Files with which nodes say that they are out."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._folder, self._run_id = directory / "addresses", run_id

    def tell(self, node: str, why: str) -> None:
        write_atomic(self._folder / f"{node}.failed", json.dumps({"run_id": self._run_id, "why": why}) + "\n")

    def all(self) -> dict[str, str]:
        """Node -> why."""
        found = {}
        for path in sorted(self._folder.glob("*.failed")):
            said = json.loads(path.read_text())
            if said["run_id"] == self._run_id:
                found[path.stem] = str(said["why"])
        return found


def routable(nodes: Sequence[str], index: int) -> str:
    """The address by which this node, number `index`, is reached by the others. RunError when there is no way there."""
    other = next(node for number, node in enumerate(nodes) if number != index)
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"{nodes[index]} finds no way to {other}: {error}") from None


def placed(tree: RunTree, job: JobConfig | None) -> RunTree:
    """The run as one node of it sees it; job: which, None: nobody in particular."""
    host = job.host if job else "<node>"
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    replicas = {"env_server_replicas": tree.deployment.inference_nodes}
    return tree.model_copy(
        update={
            "job": job,
            "node": tree.node.model_copy(update={"address": address}),
            "inference": tree.inference.model_copy(update={"host": host, "port": 0}),
            "orchestrator": tree.orchestrator.model_copy(update=replicas),
        }
    )


class _Node:
    """One node of the job: number `index`, with the roles of `kind`."""

    def __init__(self, tree: RunTree, opened: Opened, kind: str, index: int, failed: _Failed) -> None:
        self._kind, self._index, self._opened, self._failed = kind, index, opened, failed
        directory, name = tree.run.output_dir, opened.nodes[index]
        self._job = JobConfig(
            directory=directory,
            run_id=opened.run_id,
            node=name,
            host=routable(opened.nodes, index),
            trainer_node=index if kind == "trainer" else 0,
        )
        self._tree = placed(tree, self._job)
        self._addresses = Addresses(self._job)
        self._first = index == 0
        self._started = False  # everything was there once: what fails from now on need not end the run
        self._missed: set[str] = set()
        self._record: dict[str, Any] = {}

    def run(self) -> Outcome:
        """Host this node and supervise it. ShmrlError when it cannot start."""
        budget = preflight.check_node(self._tree, "trainer" if self._kind == "trainer" else "inference")
        rundir = RunDir(self._tree.run.output_dir, self._opened.attempt, self._job.node)
        opened = self._opened
        with hosting(self._tree, lambda: rundir, opened.run_id, opened.token) as (host, named), ExitStack() as stack:
            log.info("%s at %s: %s node of %s", self._job.node, self._job.host, self._kind, self._opened.run_id)
            log.info(budget_line(budget))
            rundir.write_configs(named)
            return self._trainer(host, named, stack) if self._kind == "trainer" else self._inference(host, named)

    # ---------------------------------------------------------------------------------------------------- inference

    def _inference(self, host: Hosting, tree: RunTree) -> Outcome:
        """Node server, a replica of every env server and an engine, until the run ends."""
        server, envs = roles.node_server(tree, host.rundir), roles.env_servers(tree, host.rundir)
        engine = roles.engine(tree, host.rundir)

        def served(role: Role) -> bool:
            """A role that never served is a node that cannot start."""
            if role.name == engine.name:
                return self._addresses.port("inference", "inference") != 0
            return role.name != server.name and self._addresses.port("env", role.name.partition(" ")[2]) != 0

        def tick() -> Outcome | None:
            host.tick()
            return self._ended()

        supervisor = Supervisor(host.tag, host.janitor, tick, Rules(spare=served, told=True))
        return host.checked(asyncio.run(supervisor.run(None, [server, *envs, engine])))

    def _ended(self) -> Outcome | None:
        """How the run ended, once the first node's launcher has said so."""
        record = _record(self._job.directory)
        if record.get("run_id") != self._opened.run_id or record["status"] == "running":
            return None
        return Outcome(0, "finished", f"the run is {record['status']}", orderly=record.get("orderly", False))

    # ------------------------------------------------------------------------------------------------------ trainer

    def _trainer(self, host: Hosting, tree: RunTree, stack: ExitStack) -> Outcome:
        """Node server, this node's ranks and, on the first node, the orchestrator; the first decides about the run."""
        servers = [roles.node_server(tree, host.rundir)]
        if self._first:
            host.janitor.tell(record=str(host.rundir.record))
            page = stack.enter_context(live_page(tree.monitor.page))
            servers += [] if page is None else [roles.live_page(host.rundir, page)]
            self._record = beginning(tree, host.rundir, page) | {"run_id": self._opened.run_id}
            host.rundir.write_record(self._record)
        rules = Rules(
            ending=functools.partial(self._ending, host),
            flush_s=tree.slurm.grace_s,
            flushing=lambda role: role != TRAINER or self._writing(),
        )
        supervisor = Supervisor(host.tag, host.janitor, lambda: self._tick(host, supervisor), rules)
        try:
            later = functools.partial(self._roles, host, tree)
            outcome = host.checked(asyncio.run(supervisor.run(None, servers, later)))
        except BaseException as error:
            self._ending(host, Outcome(1, "failed", told(error)))
            raise
        self._ending(host, outcome)
        return outcome

    def _writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self._job.directory / "checkpoints").glob(".step_*"))

    def _ending(self, host: Hosting, outcome: Outcome) -> None:
        """Tell the other nodes how the run ends, and the ranks here that no orchestrator will come back."""
        if outcome.code == 1:
            self._tree.given_up.touch()
        if self._first:
            host.rundir.write_record({**self._record, **ending(outcome), "orderly": outcome.orderly})

    def _tick(self, host: Hosting, supervisor: Supervisor) -> Outcome | None:
        host.tick()
        for node, why in self._failed.all().items():
            if node in self._missed or node == self._job.node:
                continue
            self._missed.add(node)
            log.error("%s is out: %s", node, why)
            if not self._started or self._opened.nodes.index(node) < self._tree.deployment.trainer_nodes:
                return Outcome(1, "failed", f"{node}: {why}")
        if not self._first:
            ended = self._ended()
            return None if ended is None or ended.orderly else Outcome(1, "failed", ended.reason)
        if host.rundir.drain.exists():
            supervisor.drain(str(host.rundir.drain))
        return None

    async def _roles(self, host: Hosting, tree: RunTree) -> list[Role]:
        """The roles that need every server's address, once all are published."""
        tree = await self._connected(tree)
        host.rundir.write_configs(tree)
        self._started = True
        if not self._first:
            return [roles.trainer(tree, host.rundir, resume=self._opened.resume)]
        self._record["addresses"] |= self._where(tree)
        host.rundir.write_record(self._record)
        resume = self._opened.resume
        return [
            roles.orchestrator(tree, host.rundir, resume=resume),
            roles.trainer(tree, host.rundir, resume=resume),
        ]

    async def _connected(self, tree: RunTree) -> RunTree:
        """The tree with the addresses of the engines, of this node's server and of the ranks' rendezvous."""
        found, over, wait_s = self._addresses, tree.deployment, tree.orchestrator.connect_timeout_s
        if self._first and over.trainer_nodes > 1:
            found.publish("rendezvous", "rendezvous", f"tcp://{self._job.host}:{free(self._job.host)}")
        servers = await found.awaited(lambda: found.of("node"), over.nodes, wait_s, "node servers")
        engines = await found.awaited(lambda: found.of("inference"), over.inference_nodes, wait_s, "engines")
        for split, source in tree.sources:
            if source.serve.address is None:
                read = functools.partial(found.envs, split, source.name)
                await found.awaited(read, over.inference_nodes, wait_s, f"replicas of {split}/{source.name}")
        job = self._job
        if over.trainer_nodes > 1:
            (meet,) = await found.awaited(lambda: found.of("rendezvous"), 1, wait_s, "rendezvous")
            job = job.model_copy(update={"rendezvous": meet.address.removeprefix("tcp://")})
        (mine,) = [one for one in servers if one.node == job.node]
        given: dict[str, Any] = {"urls": [one.address for one in engines], "python": None, "vllm": {}}
        return tree.model_copy(
            update={
                "job": job,
                "node": tree.node.model_copy(update={"address": mine.address.partition("://")[2]}),
                "inference": tree.inference.model_copy(update=given),
            }
        )

    def _where(self, tree: RunTree) -> dict[str, Any]:
        """The addresses in run.json."""
        found = self._addresses
        return {
            "nodes": {one.node: one.address for one in found.of("node")},
            "trainer": tree.trainer_address,
            "inference": tree.inference.urls,
            "envs": {
                f"{split}/{source.name}": [one.address for one in found.envs(split, source.name)]
                or [source.serve.address]
                for split, source in tree.sources
            },
        }


def main(arguments: Sequence[str]) -> int:
    """As the `shmrl` command: 2 for a configuration that cannot run, 1 for what failed."""
    kind, directory, *rest = arguments
    try:
        if kind == "open":
            nodes = [name for name in rest if name != "--resume"]
            open_job(Path(directory), nodes, resume="--resume" in rest)
            return 0
        return launch(kind, Path(directory))
    except ConfigError as error:
        print(*(f"shmrl: error: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return 2
    except ShmrlError as error:
        print(f"shmrl: error: {told(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
