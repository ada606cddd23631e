"""A host of Gym's environment servers in the test's process, and stubs of the servers that it calls."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from shmrl.env.episodes.plan import planned
from shmrl.env.episodes.server import EpisodeHost
from tests.env.episodes.stub import stubbed

DATA = Path(__file__).parents[2] / "data" / "gym"
ENVS = "tests.env.episodes.environments:"


def episode(rollout="0-0", task="t0", *, attempt=0, taskset="shmrl:rev", **task_input) -> dict[str, Any]:
    """The body of a request."""
    return {
        "episode_id": {"rollout_id": rollout, "attempt": attempt},
        "task": {"task_id": {"taskset": taskset, "task_id": task}, "task_input": task_input},
    }


def turn(rollout="0-0", **changes) -> dict[str, Any]:
    """A request of `single_agent_turn`."""
    return episode(rollout, responses_create_params={"input": "how cold is it?"}, task_data={"city": "SF"}, **changes)


class Client:
    """Requests to one instance."""

    def __init__(self, http: aiohttp.ClientSession, host: EpisodeHost) -> None:
        self.http, self.host = http, host

    def url(self, path="", name=None) -> str:
        fronts = self.host.fronts
        return (fronts[name] if name else next(iter(fronts.values()))).url + path

    async def run(self, body, name=None):
        """The answer of `/run`, which must be 200."""
        status, answer = await self.post("/run", body, name)
        assert status == 200, answer
        return answer

    async def post(self, path, body, name=None, **options):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url(path, name), data=io.BytesIO(data), **options) as reply:
            return reply.status, await reply.json()

    async def get(self, path, name=None):
        async with self.http.get(self.url(path, name)) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if reply.content_type == "application/json" else text

    async def head(self, path):
        async with self.http.get(self.host.head_url + path) as reply:
            return reply.status, await reply.json()

    async def count(self, line: str) -> float:
        """A value of /metrics, of the line that starts so; 0 if there is none."""
        page = (await self.get("/metrics"))[1]
        return sum(float(text.rpartition(" ")[2]) for text in page.splitlines() if text.startswith(line))

    async def counted(self, line: str, value: float) -> None:
        """Wait until a value of /metrics is this one."""
        async with asyncio.timeout(20):
            while await self.count(line) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def hosting(plan):
    """The plan, running, when its episodes can run."""
    host = EpisodeHost(plan)
    running = asyncio.create_task(host.run())
    ready = asyncio.create_task(host.ready.wait())
    try:
        async with asyncio.timeout(60):
            await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        async with aiohttp.ClientSession() as http:
            yield Client(http, host)
    finally:
        ready.cancel()
        host.stop()
        await asyncio.wait([running])
    running.result()


@pytest.fixture
def written(tmp_path):
    """written(tree): a file in Gym's nesting."""

    def write(tree, name="gym.yaml"):
        path = tmp_path / name
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
        return path

    return write


@pytest.fixture
def hosted(written):
    """async with hosted(tree) as client: what a file in Gym's nesting starts."""
    return lambda tree: hosting(planned([written(tree)]))


@pytest.fixture
async def stub():
    async with stubbed() as stub:
        yield stub


def nesting(stub, implementation="single_agent_turn", **keys) -> dict[str, Any]:
    """An environment server `turn` in front of the stubs."""
    resources, agent = stub.ports
    given = {"entrypoint": "app.py", "cleanup_timeout_seconds": 5, **keys}
    references = {
        "resources_server": {"type": "resources_servers", "name": "weather"},
        "agent_server": {"type": "responses_api_agents", "name": "agent"},
    }
    if implementation == "legacy_agent":
        del references["resources_server"]
    there = {"entrypoint": "app.py", "host": "127.0.0.1"}
    return {
        "weather": {"resources_servers": {"example": {**there, "port": resources, "domain": "agent"}}},
        "agent": {"responses_api_agents": {"simple_agent": {**there, "port": agent}}},
        "turn": {"environment_servers": {implementation: {**references, **given}}},
        "head_server": {"host": "127.0.0.1", "port": 0},
    }


@pytest.fixture
def turns(hosted, stub):
    """async with turns(**keys) as client: `single_agent_turn` in front of the stubs."""
    return lambda implementation="single_agent_turn", **keys: hosted(nesting(stub, implementation, **keys))


@pytest.fixture
def own(tmp_path, engine, model_dir):
    """async with own(...) as client: an env server's own file with [gym], in front of the fake engine.

    client.runs(): the tasks that the environment ran.
    """

    @asynccontextmanager
    async def start(env_id=f"{ENVS}Recorded", args=None, *, gym="", serve="", token_of=None, split="train", model=None):
        log = tmp_path / "runs"
        args = {"runs": str(log)} if args is None else args
        file = tmp_path / "env.toml"
        file.write_text(f"""
name = "shmrl_env"
split = "{split}"
[env]
id = "{env_id}"
args = {{ {", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())} }}
[serve]
http = "127.0.0.1:0"
protocols = ["gym"]
{serve}
[gym]
head = "127.0.0.1:0"
{gym}
[gym.model]
urls = ["{engine.url}"]
tokenizer = "{model or model_dir}"
fields = ["routing"]
[gym.model.sampling]
max_tokens = 8
[arena]
capacity = "8MiB"
""")
        async with hosting(planned([file])) as client:
            client.runs = lambda: log.read_text().split() if log.exists() else []
            yield client

    return start
