"""A run over several nodes on this host: every "node" has an arena of its own, a node server and a replica of every env
server, all of them processes; the orchestrator's and the ranks' arena is a further one."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from shmrl.arena import Arena
from shmrl.config import dump_toml, env_server_from
from shmrl.config.deployment import JobConfig
from shmrl.node.published import Addresses
from tests.orchestrator.test_run import Site
from tests.support.runs import free_ports

TOKEN = "0123456789abcdef" * 2


@dataclass
class FakeNode:
    """One node: its arena, its server, its replicas."""

    name: str
    arena: Arena
    port: int
    server: asyncio.subprocess.Process | None = None
    replicas: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


class Cluster(Site):
    """`nodes` of them. patience_s: how long a node may be silent before it is lost."""

    def __init__(self, directory, model, engine, *args, nodes=2, patience_s=60, **flags):
        job = {"directory": str(directory / "out"), "run_id": "r1", "node": "head", "host": "127.0.0.1"}
        table = ", ".join(f'{key} = "{value}"' for key, value in job.items())
        several = {"deployment": f'{{ kind = "multi_node", inference_nodes = {nodes} }}', "job": f"{{ {table} }}"}
        several["orchestrator.env_server_replicas"] = str(nodes)
        super().__init__(directory, model, engine, *args, **several, **flags)
        self.job, self.patience_s = JobConfig(**job), patience_s
        ports = free_ports(nodes * (1 + len(self.tree.sources)))
        self.ports = iter(range(ports, 65536))
        self.nodes = [
            FakeNode(f"node{n}", Arena.create(capacity="64MiB", run_id="orc"), next(self.ports))
            for n in range(1, 1 + nodes)
        ]

    async def __aenter__(self):
        os.environ["SHMRL_TOKEN"] = TOKEN
        for node in self.nodes:
            await self.serve(node)
            for index, (split, source) in enumerate(self.tree.sources):
                config = env_server_from(self.tree, index)
                address = f"tcp://127.0.0.1:{next(self.ports)}"
                arena = config.arena.model_copy(update={"address": node.arena.address})
                serve = config.serve.model_copy(update={"address": address})
                update = {"serve": serve, "arena": arena} | ({"job": None} if hasattr(config, "job") else {})
                file = self.file.with_name(f"env{index}.{node.name}.toml")
                file.write_text(dump_toml(config.model_copy(update=update)))
                node.replicas.append(await self.spawn("-m", "shmrl", "env-server", file))
                self.publish(node, "env", f"{split}/{source.name}", address)
            self.publish(node, "node", "node", node.url)
        return self

    def published(self, number):
        """The address of a node's first replica."""
        split, source = self.tree.sources[0]
        return Addresses(self.job).envs(split, source.name)[number].address

    def publish(self, node, role, name, address):
        job = self.job.model_copy(update={"node": node.name})
        Addresses(job).publish(role, name, address, origin=node.arena.origin)

    async def serve(self, node):
        """Its node server; in place of one that died."""
        node.server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.node.serving", node.arena.address, str(node.port), cwd=os.getcwd(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.children.append(node.server)
        assert await node.server.stdout.readline() == b"up\n"

    async def __aexit__(self, *exc):
        await super().__aexit__(*exc)
        os.environ.pop("SHMRL_TOKEN")
        for node in self.nodes:
            node.arena.close()
            node.arena.unlink()

    async def ranks(self, step=0):
        return [
            await self.spawn("-m", "tests.orchestrator.fake_rank", self.file, rank, step, self.patience_s)
            for rank in range(self.tree.trainer.ranks)
        ]

    async def orchestrator(self, *options):
        return await self.spawn("-m", "tests.orchestrator.impatient", self.patience_s, self.file, *options)

    def kill(self, node, *what):
        """SIGKILL the node's "server", its "replicas" with all their workers, or both."""
        for process in [*([node.server] if "server" in what else []), *(node.replicas if "replicas" in what else [])]:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    def counts(self):
        """(blocks, created - freed) of every arena."""
        for arena in (self.arena, *(node.arena for node in self.nodes)):
            arena.sweep()
        found = [arena.stats(exact=True) for arena in (self.arena, *(node.arena for node in self.nodes))]
        return [(stats["blocks"], stats["created"] - stats["freed"]) for stats in found]
