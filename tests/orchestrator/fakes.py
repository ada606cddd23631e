"""Stand-ins for what lies outside the orchestrator: an env server's client with real blocks, and a small run tree."""

import asyncio
import itertools

from shmrl.config import RunTree
from shmrl.orchestrator.replicas import Place, Replica
from shmrl.orchestrator.sources import Source
from shmrl.payload import Branch, encode
from shmrl.types import EpisodeResult, ErrorInfo, Task


def tree(tmp_path, *, sources=("a",), evals=(), ranks=1, **orchestrator):
    """A run over the named sources; orchestrator settings by keyword, without captured fields."""
    settings = {"batch_size": 4, "group_size": 2, "max_off_policy_steps": 0, "seq_len": 64} | orchestrator
    if "token_batch_size" in orchestrator:
        del settings["batch_size"]
    env = {"env": {"id": "reverse-text"}, "sampling": {"max_tokens": 8}}
    train = [env | (item if isinstance(item, dict) else {"name": item}) for item in sources]
    settings |= {"train": {"source": train}, "eval": {"source": [env | item for item in evals]}}
    return RunTree.model_validate(
        {
            "run": {"name": "t", "output_dir": str(tmp_path), "max_steps": 1000},
            "model": {"tiny": {}},
            "orchestrator": settings,
            "trainer": {"ranks": ranks, "router_replay": False, "sampling_replay": False},
        }
    )


def source(tree, index, *clients):
    """Source `index` with a replica per client."""
    replicas = [Replica(client, Place(f"tcp://10.0.0.{n}:5000", f"node{n}")) for n, client in enumerate(clients, 1)]
    return Source(tree, index, replicas, list(tree.inference.engine_urls))


def sample(arena, tag="t/a/g/0", T=10, S=6, version=0, prefix=None):
    """A sample whose block is in the arena, like an env worker leaves it."""
    mask = [0] * (T - S) + [1] * S
    branch = Branch(
        list(range(T)), mask, [-0.5 * bit for bit in mask],
        meta={"version_start": version, "version_end": version, "logprobs_mode": "processed"},
        messages=[{"role": "assistant", "content": "olleh"}],
    )  # fmt: skip
    return encode(arena, branch, tag, prefix)


class Client:
    """One source's server, in this process. `play(call)` says what the call-th episode does: a reward, an exception to
    raise, ErrorInfo to answer, or a coroutine function to await that gives one of these."""

    def __init__(self, arena, play=lambda call: float(call % 2), size=None, T=10, version=None):
        self.arena, self.play, self.size, self.T = arena, play, size, T
        self.version = version  # what the engine says, whatever it was given
        self.calls = itertools.count()
        self.asked = []  # (task id, model, group_id, seed, keep, tag)

    async def tasks(self, split, start, n):
        stop = start + n if self.size is None else min(start + n, self.size)
        return [Task(f"{split}{i}", {}, i) for i in range(start, stop)]

    async def run_rollout(self, task, *, model, group_id, seed, keep, tag, shares=False):
        self.asked.append((task.id, model, group_id, seed, keep, tag))
        outcome = self.play(next(self.calls))
        if asyncio.iscoroutine(outcome):
            outcome = await outcome
        else:
            await asyncio.sleep(0)
        if isinstance(outcome, BaseException):
            raise outcome
        if isinstance(outcome, ErrorInfo):
            return EpisodeResult(success=False, task_id=task.id, error=outcome)
        version = model["version"] if self.version is None else self.version
        made = (sample(self.arena, tag, T=self.T, version=version),)
        return EpisodeResult(
            success=True, task_id=task.id, reward=outcome, samples=made, num_turns=1, num_tokens=self.T,
            version_start=version, version_end=version, wire_bytes=200,
        )  # fmt: skip

    async def run_group(self, task, *, model, group_id, seeds, keep, tag):
        facts = {"model": model, "group_id": group_id, "keep": keep}
        return [await self.run_rollout(task, seed=seed, tag=f"{tag}/{i}", **facts) for i, seed in enumerate(seeds)]

    async def health(self):
        return {"rss_bytes": 1}

    async def close(self):
        pass
