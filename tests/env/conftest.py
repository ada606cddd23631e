"""What the env tests share: a model directory without weights, a fake engine, a running server and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shmrl.arena import Arena
from shmrl.config import EnvServerConfig
from shmrl.env.client import EnvClient
from shmrl.env.server import EnvServer
from shmrl.types import EpisodeResult, Task
from tests.support.fake_engine import FakeEngine
from tests.support.model_dir import write_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
def arena():
    arena = Arena.create(capacity="32MiB", run_id="test")
    yield arena
    arena.close()
    arena.unlink()


@pytest.fixture
def spec(engine, model_dir) -> Callable[..., dict[str, Any]]:
    """The `model` map of a request: spec(max_tokens=4, fields=[...]) overrides."""

    def make(**changes: Any) -> dict[str, Any]:
        sampling = {
            "temperature": 1.0,
            "top_p": 0.9,
            "top_k": 8,
            "min_p": 0.0,
            "max_tokens": changes.pop("max_tokens", 12),
        }
        base = {
            "urls": [engine.url], "tokenizer": str(model_dir), "name": "policy", "version": 0, "cache_salt": "0",
            "fields": ["routing", "head", "mask"], "head": 4, "max_model_len": 512, "sampling": sampling,
        }  # fmt: skip
        return {**base, **changes}

    return make


def server_config(
    address: str | None,
    env_id: str,
    args: dict[str, Any] | None = None,
    *,
    workers: int = 1,
    max_turns: int | None = None,
    **tables: Any,
) -> EnvServerConfig:
    """An env server's configuration on a free port; without an arena's address, it makes its own."""
    where = {"address": address} if address else {"capacity": "8MiB"}
    return EnvServerConfig.model_validate(
        {
            "name": "test",
            "env": {"id": env_id, "args": args or {}, "max_turns": max_turns},
            "serve": {"address": "tcp://127.0.0.1:0", "pool": {"workers": workers}, **tables.pop("serve", {})},
            "arena": where | tables.pop("arena", {}),
            **tables,
        }
    )


@asynccontextmanager
async def serving(config: EnvServerConfig, token: str | None = None) -> AsyncIterator[tuple[EnvClient, EnvServer]]:
    """A server in this process, its workers beside it, and a connected client."""
    server = EnvServer(config.env.id, config.env.args, config=config)
    running = asyncio.create_task(server.run())
    await server.bound.wait()
    client = EnvClient(server.address, token)
    try:
        await client.connect(60)
        yield client, server
    finally:
        await client.close()
        await server.close()
        await running


@pytest.fixture
def hosted(arena):
    """`async with hosted("reverse-text", {...}, workers=2) as (client, server)`: `serving` with the test's arena."""
    return lambda env_id, args=None, **rest: serving(server_config(arena.address, env_id, args, **rest))


def rollout(
    client: EnvClient, task: Task, spec: dict[str, Any], index: int = 0, keep: str = "train"
) -> Coroutine[Any, Any, EpisodeResult]:
    """One episode with a tag of its own."""
    return client.run_rollout(task, model=spec, group_id="g", seed=index, keep=keep, tag=f"run/test/g/{index}")


async def until(condition: Callable[[], Any], timeout_s: float = 90.0) -> None:
    """Wait for something that another process brings about; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
