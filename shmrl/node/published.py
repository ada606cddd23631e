"""Where the servers of a run over many nodes are: files in the run directory, which every node can read.

A server that took a free port says so in a file that appears whole, and whoever looks for it reads the file:

    <output_dir>/envs/<split>/<source>.<node>.address     an env server's replica
    <output_dir>/addresses/<role>.<node>.address          inference (an engine), node (a node server), trainer (the
                                                          orchestrator's end for the ranks), rendezvous (torch's)

A file is live when it is of this run id, which is new for every job and for every requeue of one. What a job before
left, a node that booted since, a process of this node that is gone, and a file that cannot be read are told from that,
named once in the log, and ignored. A server that dies leaves its file: who connects finds out. One that is started
again in place takes the same port, so that its address stays true.

Used by whoever serves, connects or launches, with the `[job]` table that each node's launcher writes into the resolved
files; needs no server, and asks nothing of the file system but rename. Engines' addresses are `inference.urls` of the
resolved files of the trainer nodes: the launcher there has waited for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil
from pydantic import TypeAdapter

from shmrl.config.deployment import JobConfig
from shmrl.config.rundir import write_atomic
from shmrl.config.tables import reachable
from shmrl.errors import RunError

log = logging.getLogger(__name__)

Role = Literal["env", "inference", "node", "trainer", "rendezvous"]
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Published:
    """One server of one node.

    Attributes:
        name: "<split>/<source>" of an env server, else the role's name. address: tcp://host:port or a url.
        origin: of the node's arena, as `Handle.origin`; "" for servers without one. Together with the node server of
        the same origin it says where a source's blocks are had.

    Example: Published("env", "train/reverse-text", "tcp://10.77.0.12:40123", run_id="9f0c", node="node2",
                       boot_id="6a...", pid=4711, origin="1f2e3d4c5b6a7988")
    """

    role: Role
    name: str
    address: str
    run_id: str
    node: str
    boot_id: str
    pid: int
    origin: str = ""


_record = TypeAdapter(Published)


def boot_id() -> str:
    """Different after every boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Addresses:
    """The addresses of one run, as this process of this node publishes and reads them.

    Example:
        addresses = Addresses(tree.job)
        addresses.publish("env", "train/reverse-text", "tcp://10.77.0.12:40123", origin=arena.origin)
        replicas = await addresses.awaited(lambda: addresses.envs("train", "reverse-text"), 2, 600.0, "replicas")
    """

    def __init__(self, job: JobConfig) -> None:
        self._root, self._run_id, self._node = job.directory, job.run_id, job.node
        self._named: set[tuple[str, str]] = set()

    def publish(self, role: Role, name: str, address: str, *, origin: str = "") -> Published:
        """Tell everyone where this process serves, in place of what was said there before.

        RunError for a wildcard, which nobody can connect to.
        """
        try:
            reachable(urlsplit(address).netloc)
        except ValueError as error:
            raise RunError(f"{address} of {name} is not published: {error}") from None
        ours: dict[str, Any] = {"run_id": self._run_id, "node": self._node, "boot_id": boot_id()}
        made = Published(role, name, address, **ours, pid=os.getpid(), origin=origin)
        write_atomic(self._path(role, name), json.dumps(asdict(made)) + "\n")
        return made

    def withdraw(self, role: Role, name: str) -> None:
        """This node's server is there no more."""
        self._path(role, name).unlink(missing_ok=True)

    def _path(self, role: Role, name: str) -> Path:
        return self._folder(role) / f"{name}.{self._node}.address"

    def _folder(self, role: Role) -> Path:
        return self._root / ("envs" if role == "env" else "addresses")

    def envs(self, split: str, source: str) -> list[Published]:
        """The live replicas of a source, by node."""
        return self._live("env", f"{split}/{source}")

    def of(self, role: Role) -> list[Published]:
        """The live servers of a role other than "env", by node."""
        return self._live(role, role)

    def nodes(self) -> dict[str, str]:
        """The url of each live node server by the origin of its arena."""
        return {one.origin: one.address for one in self.of("node")}

    def port(self, role: Role, name: str) -> int:
        """What a server of this node binds: the port it had before in this run, 0 the first time."""
        before = self._mine(role, name)
        return 0 if before is None else urlsplit(before.address).port or 0

    def _mine(self, role: Role, name: str) -> Published | None:
        """What this node published in this run, whether that server still lives or not."""
        found = self._read(self._path(role, name))
        return found if isinstance(found, Published) and found.run_id == self._run_id else None

    def _live(self, role: Role, name: str) -> list[Published]:
        found = []
        for path in sorted(self._folder(role).glob(f"{name}.*.address")):
            one = self._read(path)
            if isinstance(one, Published) and (one.role, one.name) != (role, name):
                continue  # of a source whose name goes on where this one ends
            why = one if isinstance(one, str) else self._stale(one)
            if why:
                self._ignore(path, why)
            elif isinstance(one, Published):
                found.append(one)
        return found

    @staticmethod
    def _read(path: Path) -> Published | str:
        """The record, or why there is none."""
        try:
            return _record.validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            return f"it cannot be read: {type(error).__name__}: {error}"

    def _stale(self, one: Published) -> str | None:
        if one.run_id != self._run_id:
            return f"it is of run {one.run_id}, and this is {self._run_id}"
        if one.node != self._node:
            return None
        if one.boot_id != boot_id():
            return "this node was started again since"
        return None if psutil.pid_exists(one.pid) else f"its process {one.pid} is gone"

    def _ignore(self, path: Path, why: str) -> None:
        if (str(path), why) not in self._named:
            self._named.add((str(path), why))
            log.warning("%s is ignored: %s", path, why)

    async def awaited(
        self, read: Callable[[], Sequence[Published]], count: int, timeout_s: float, what: str
    ) -> list[Published]:
        """What `read` finds as soon as it is `count` or more. RunError after timeout_s says which nodes have it."""
        until = time.monotonic() + timeout_s
        while len(found := await asyncio.to_thread(read)) < count:
            if time.monotonic() > until:
                have = ", ".join(one.node for one in found) or "no node"
                raise RunError(
                    f"{len(found)} of {count} {what} are published in {self._root} after {timeout_s:g} s: on {have}"
                )
            await asyncio.sleep(POLL_S)
        return list(found)
