"""One tiny model for the room's tests, one engine in this process, one server process. All end with the session."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from shmrl.config import TinyModel
from shmrl.inference.client import EngineClient
from shmrl.inference.embedded.engine import Engine
from shmrl.inference.embedded.model import Model
from shmrl.inference.embedded.params import Limits, SamplingParams
from shmrl.inference.embedded.rows import Request, Row, make_rows
from shmrl.inference.embedded.tiny import byte_tokenizer, write_tiny

SHAPE = TinyModel(head_dim=32, vocab=512, max_positions=1024, initializer_range=0.2)  # 0.2: far from uniform
LIMITS = Limits(vocab=512, max_model_len=512, max_logprobs=64)
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(SHAPE, tmp_path_factory.mktemp("models") / "step_0", seed=0)


@pytest.fixture(scope="session")
def other_dir(tiny_dir: Path) -> Path:
    """The same shape with other weights."""
    return write_tiny(SHAPE, tiny_dir.parent / "step_1", seed=1)


class Driver:
    """An engine with blocking calls."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.model = Model(path)
        self.tokenizer = byte_tokenizer()
        self.engine = Engine(self.model, self.tokenizer.backend_tokenizer, max_model_len=512, **options)

    def submit(self, prompt: list[int], **sampling: Any) -> tuple[Request, threading.Event]:
        params = SamplingParams.parse(sampling, LIMITS)
        rows, done = make_rows(prompt, params, max_model_len=512, default_seed=0), threading.Event()
        request = Request("test", rows, lambda _: done.set())
        self.engine.submit(request)
        return request, done

    def rows(self, *asked: tuple[list[int], dict[str, Any]]) -> list[Row]:
        """The first row of each request, run together."""
        pending = [self.submit(prompt, **sampling) for prompt, sampling in asked]
        assert all(done.wait(60) for _, done in pending)
        for request, _ in pending:
            if request.error is not None:
                raise request.error
        return [request.rows[0] for request, _ in pending]


@pytest.fixture(scope="session")
def driver(tiny_dir: Path) -> Iterator[Driver]:
    driver = Driver(tiny_dir)
    yield driver
    driver.engine.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


SERVERS = """
import json, os, signal, sys
import shmrl.inference.embedded.server as server
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        signal.alarm(30)  # ends this process, and with it the test that waits
        print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        signal.alarm(0)
        continue
    pid = os.fork()
    if not pid:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(log, 1), os.dup2(log, 2)
        exec(order["first"])
        server.main(order["arguments"])
        sys.exit(0)
    print(pid, flush=True)
"""


@pytest.fixture(scope="session")
def servers() -> Iterator[Any]:
    """A process that has imported the server and forks one per order: importing takes longer than the tests."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin as orders, process.stdout as answers:

        def order(**what: Any) -> int:
            orders.write(json.dumps(what) + "\n")
            orders.flush()
            return int(answers.readline())

        yield order


class ServerProcess:
    """A server in its own process; `first` is Python that runs there before the server's own main."""

    def __init__(self, order: Any, model: Path, log: Path, *flags: str, first: str = "") -> None:
        self.port, self.log, self._order = free_port(), log, order
        self.url = f"http://127.0.0.1:{self.port}"
        args = ["--model", str(model), "--port", str(self.port), "--served-model-name", "tiny", *flags]
        self._pid = order(log=str(log), first=first, arguments=args)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)

    def wait(self) -> int:
        """Its exit code."""
        return int(self._order(wait=self._pid))


@pytest.fixture(scope="session")
def server(tiny_dir: Path, servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(servers, tiny_dir, tmp_path_factory.mktemp("log") / "server.log", "--max-model-len", "1024")
    yield process
    process.signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM, process.log.read_text()


@pytest.fixture
async def client(server: ServerProcess) -> Any:
    async with EngineClient([server.url], timeout_s=60) as client:
        await client.health(120)
        yield client


@pytest.fixture
async def http(client: EngineClient) -> Any:
    """A bare session at the server: `await http("POST", path, body)` -> (status, parsed body)."""
    async with aiohttp.ClientSession(client.urls[0]) as session:

        async def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            async with session.request(method, path, json=body) as response:
                json = response.content_type == "application/json"
                return response.status, await (response.json() if json else response.text())

        yield call
