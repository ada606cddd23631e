"""`shmrl eval`: n tasks x r rollouts of some environments with one model; avg@k and pass@k, and a file of all rollouts.

Runs in its own process, with an env server per environment beside it (`serve_sidecar`) and, for a model directory, an
embedded engine. Every finished rollout is a line of the file at once (`rollout_file.py`), so that the same command goes
on where one before it stopped. An evaluation captures nothing: no payload stays in an arena, which is checked at the
end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmrl.config import ArenaConfig, EnvServerConfig, EvalConfig
from shmrl.env.child import Child
from shmrl.env.death import PDEATHSIG, prctl
from shmrl.env.sidecar import announced, serve_sidecar
from shmrl.errors import ConfigError, ProcessFailed, RunError, TasksetError
from shmrl.inference.client import EngineClient
from shmrl.launcher.meter import Meter
from shmrl.launcher.preflight import faults_of
from shmrl.launcher.rollout_file import Key, RolloutFile
from shmrl.node.host import require_torch
from shmrl.types import EpisodeResult, ErrorInfo

if TYPE_CHECKING:
    from shmrl.env.client import EnvClient
    from shmrl.types import Task

log = logging.getLogger(__name__)
PASSED = 1.0
"""Reward from which a rollout counts as passed."""
ANSWER_S = 10.0
"""How long an engine that serves, or is said to, may take to answer."""
PAGE = 1024
"""Tasks that are asked for at a time."""
_SERVING = re.compile(r"serving .* on port (\d+)")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to evaluate. Example: Plan([EvalConfig(...)], "runs/run/weights/step_30", 5, 3, 16, Path("eval.jsonl"))

    Attributes:
        sources: environments. model: a model directory, or an engine's URL. tasks: the first n of each environment.
        rollouts: per task. concurrency: rollouts at a time, over all environments. tokenizer: a model directory, where
        an engine elsewhere does not name one of this machine. seed: of the rollouts.
    """

    sources: Sequence[EvalConfig]
    model: str
    tasks: int
    rollouts: int
    concurrency: int
    out: Path
    tokenizer: Path | None = None
    seed: int = 0


def evaluate(plan: Plan) -> int:
    """Run it, print the table; 1 if a rollout failed. ConfigError before anything starts."""
    names = [source.name for source in plan.sources]
    if len({*names}) < len(names):
        raise ConfigError(f"two environments have the same name: {', '.join(names)}")
    if faults := [f"{source.name}: {why}" for source in plan.sources for why in faults_of(source.env, source.serve)]:
        raise ConfigError(faults)
    with RolloutFile(plan.out) as file:
        file.expect(model=plan.model, base_seed=plan.seed)
        for source in plan.sources:
            file.check(source, [])
        if not _is_url(plan.model):
            require_torch()
            file.expect(served={"weights": _fingerprint(_directory(plan))})
        if file.rows:
            log.info("%s has %d rollouts: going on with it", plan.out, len(file.rows))
        try:
            asyncio.run(_run(plan, file))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        table = [summary(name, file.of(name, plan.tasks, plan.rollouts)) for name in names]
    print(render(table, plan.rollouts))
    print(f"rollouts: {plan.out}")
    done, failed = (sum(line[key] for line in table) for key in ("rollouts", "failed"))
    if not file.added:
        log.warning("nothing was run: %s had all of these %d rollouts", plan.out, done)
    if failed:
        log.warning("%d of %d rollouts failed and count as 0: the same command tries them again", failed, done)
    return int(failed > 0)


async def _run(plan: Plan, file: RolloutFile) -> None:
    meter = Meter()
    async with AsyncExitStack() as stack:
        stack.enter_context(_interruptible(plan, meter))
        await stack.enter_async_context(meter.shown())
        engine: subprocess.Popen[str] | None = None
        model: dict[str, Any] = {}
        if _is_url(plan.model):
            meter.awaits(f"the engine ({plan.model})")
            model, served = await _spec(plan.model.rstrip("/"), plan.tokenizer)
            file.expect(served=served)
        meter.awaits(f"the environments ({', '.join(source.name for source in plan.sources)})")
        clients = [await stack.enter_async_context(_hosted(source, plan.concurrency)) for source in plan.sources]
        hosted = [*zip(plan.sources, clients, strict=True)]
        sources = [_Source(plan, source, client, file, meter) for source, client in hosted]
        missing = [await source.missing() for source in sources]
        if not _is_url(plan.model) and any(missing):
            meter.awaits(f"the engine ({plan.model})")
            engine, model = await stack.enter_async_context(_engine(plan))
        free = asyncio.Semaphore(plan.concurrency)
        await _while_lives(engine, _together(source.run(model, free) for source in sources))
        for source, client in hosted:
            if blocks := (await client.health())["arena"]["blocks"]:
                raise RunError(f"{source.name}: {blocks} blocks were left in the arena")


@contextmanager
def _interruptible(plan: Plan, meter: Meter) -> Iterator[None]:
    """SIGINT says what becomes of what there is, and cancels the block; further ones wait for its end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            log.warning("still ending the processes of this evaluation")
            return
        interrupted = True
        log.warning("interrupted: %s", meter.interrupted(plan.out))
        running.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:  # a terminal's SIGINT reaches every process: what they say of it is not why this ends
        if interrupted:
            raise asyncio.CancelledError from error
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@asynccontextmanager
async def _hosted(source: EvalConfig, concurrency: int) -> AsyncIterator[EnvClient]:
    """A client of the environment's own server. A remote environment has a session per rollout at a time."""
    args = {**source.env.args, **({"evaluation_sessions": concurrency} if source.env.urls else {})}
    arena = ArenaConfig(capacity="16MiB")  # nothing goes into it
    serve = source.serve.model_copy(update={"http": None, "protocols": []})
    config = EnvServerConfig(
        name=source.name, split=source.split, env=source.env, serve=serve, arena=arena, log=source.log
    )
    async with serve_sidecar(source.env.id, args, config=config) as client:
        yield client


async def _together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it; at the first error the rest is cancelled."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _while_lives(engine: subprocess.Popen[str] | None, work: Coroutine[Any, Any, None]) -> None:
    """The work; ProcessFailed as soon as the engine that was started for it is gone."""
    if engine is None:
        await work
        return
    working, ended = asyncio.create_task(work), asyncio.create_task(asyncio.to_thread(engine.wait))
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ProcessFailed("engine", ended.result())
        working.result()
    finally:
        working.cancel()
        ended.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------------- engine


def _is_url(model: str) -> bool:
    return re.match(r"https?://", model) is not None


@asynccontextmanager
async def _engine(plan: Plan) -> AsyncIterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """An engine for the model's directory, which answers, and the `model` map of requests without their sampling."""
    command = [sys.executable, "-m", "shmrl.inference.embedded.server", "--model", plan.model, "--port", "0"]
    command += ["--max-num-seqs", str(plan.concurrency), "--seed", str(plan.seed)]
    engine = Child("engine", command, _SERVING, {}, preexec_fn=_die_with_parent)
    async with announced(engine) as found:
        model, _ = await _spec(f"http://127.0.0.1:{int(found[1])}", plan.tokenizer or Path(plan.model))
        yield engine.process, model


def _directory(plan: Plan) -> Path:
    directory = Path(plan.model)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"--model {plan.model}: neither an engine's URL nor a directory with a config.json")
    return directory


def _fingerprint(directory: Path) -> str:
    """A digest of the names, sizes and times of a model's files."""
    files = sorted((file.name, file.stat()) for file in directory.iterdir() if file.is_file())
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    return hashlib.blake2s(repr(facts).encode(), digest_size=8).hexdigest()


async def _spec(url: str, tokenizer: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the `model` map, the served model's id, root and weight version)."""
    async with EngineClient([url], timeout_s=ANSWER_S) as engine:
        await engine.health(ANSWER_S)
        (card,) = await engine.cards()
        (version,) = await engine.labels()
    directory = tokenizer or Path(card.get("root") or "")
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            f"{url} serves {card['id']} of {card.get('root')!r}, and {directory} has no tokenizer.json: name a copy of "
            "the model's directory by --tokenizer"
        )
    tokenizer_dir, longest = str(directory.resolve()), card["max_model_len"]
    model = {"urls": [url], "name": card["id"], "tokenizer": tokenizer_dir, "max_model_len": longest}
    return model, {"id": card["id"], "root": card.get("root"), "version": version}


def _die_with_parent() -> None:
    prctl(PDEATHSIG, signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------------- rollouts


class _Source:
    """The rollouts of one environment."""

    def __init__(
        self,
        plan: Plan,
        config: EvalConfig,
        client: EnvClient,
        file: RolloutFile,
        meter: Meter,
    ) -> None:
        self._plan, self._config, self._client, self._file, self._meter = plan, config, client, file, meter
        self._tasks: list[Task] = []
        self._keys: list[Key] = []

    async def missing(self) -> bool:
        """Whether there are rollouts that the file does not have yet; it is of these tasks."""
        tasks = self._tasks = await self._read()
        self._file.check(self._config, [task.id for task in tasks])
        name, rollouts = self._config.name, range(self._plan.rollouts)
        self._keys = [Key(name, number, k) for number in range(len(tasks)) for k in rollouts]
        return not all(self._file.has(key) for key in self._keys)

    async def run(self, model: Mapping[str, Any], free: asyncio.Semaphore) -> None:
        """All rollouts that the file does not have yet, after `missing`."""
        plan = self._plan
        model = {**model, "sampling": self._config.sampling.model_dump()}
        self._meter.expect(self._config.name, len(self._keys))
        for row in self._file.of(self._config.name, plan.tasks, plan.rollouts):
            if row["success"]:
                self._meter.ended(self._config.name, row["reward"])

        async def one(key: Key) -> None:
            async with free:
                await self._rollout(key, self._tasks[key.number], model)

        await _together(one(key) for key in self._keys if not self._file.has(key))

    async def _read(self) -> list[Task]:
        found: list[Task] = []
        while len(found) < self._plan.tasks:
            page = await self._client.tasks(self._config.split, len(found), min(PAGE, self._plan.tasks - len(found)))
            if not page:
                break
            found += page
        if not found:
            raise TasksetError(f"{self._config.name} has no {self._config.split} tasks")
        return found

    async def _rollout(self, key: Key, task: Task, model: Mapping[str, Any]) -> None:
        name = "/".join(map(str, key))
        digest = hashlib.blake2s(f"{self._plan.seed}/{name}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little") >> 1
        limit_s = self._config.serve.request_timeout_s
        with self._meter.running(self._config.name, task.id, limit_s):
            try:
                async with asyncio.timeout(limit_s or None) as deadline:
                    result = await self._client.run_rollout(
                        task, model=model, group_id=str(key.number), seed=seed, keep="eval", tag=f"eval/{name}"
                    )
            except TimeoutError:
                if not deadline.expired():
                    raise
                result = EpisodeResult(success=False, task_id=task.id, error=ErrorInfo.timeout(limit_s))
        row = {"task": task.id, "seed": seed, **_row(result)}
        self._file.add(key, row, self._config)
        self._meter.ended(self._config.name, row.get("reward"))


def _row(result: EpisodeResult) -> dict[str, Any]:
    if result.error is not None:
        where = {"where": result.error.where} if result.error.where else {}
        return {"success": False, "error": f"{result.error.type}: {result.error.message}", **where}
    return {
        "success": True,
        "reward": result.reward,
        "rewards": result.rewards,
        "metrics": result.metrics,
        "stop_reason": result.stop_reason,
        "turns": result.num_turns,
        "tokens": result.num_tokens,
        "messages": result.messages,
    }


# ------------------------------------------------------------------------------------------------------------ summary


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One source: avg@k, the mean reward of its rollouts, and pass@k, the share of its tasks of which a rollout passed.

    Both are over all rollouts and tasks: a rollout that failed has reward 0 and did not pass.
    """
    passed = {row["number"] for row in rows if row["success"] and row["reward"] >= PASSED}
    tasks = {row["number"] for row in rows}
    return {
        "source": name,
        "tasks": len(tasks),
        "rollouts": len(rows),
        "failed": sum(not row["success"] for row in rows),
        "avg": sum(row["reward"] for row in rows if row["success"]) / len(rows),
        "pass": len(passed) / len(tasks),
    }


def render(table: Sequence[Mapping[str, Any]], k: int) -> str:
    """The table as text: a header and a line per source."""
    header = ["source", "tasks", "rollouts", "failed", f"avg@{k}", f"pass@{k}"]
    shares = [[f"{line[key]:.4f}" for key in ("avg", "pass")] for line in table]
    counts = [[str(line[key]) for key in header[:4]] for line in table]
    lines = [header, *(count + share for count, share in zip(counts, shares, strict=True))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    shapes = [f"{{:{side}{width}}}" for side, width in zip("<>>>>>", widths, strict=True)]
    return "\n".join("  ".join(shape.format(cell) for shape, cell in zip(shapes, line, strict=True)) for line in lines)
