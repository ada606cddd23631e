"""Everything that can be known to fail before a process starts: environments, model, ports, shared memory.

Called by `shmrl run` (with --dry-run too) after the configuration was validated; imports no environment and no torch
and takes well under two seconds. All faults are reported at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shmrl.config import ArenaConfig, RunTree
from shmrl.config.addresses import redacted
from shmrl.config.budget import bytes_per_token, longest_episode
from shmrl.config.shape import EXPERT_KEYS, ModelShape, model_shape
from shmrl.errors import ConfigError, PortInUse
from shmrl.node.host import arena_mount, available_memory, capacity_bytes, require_torch
from shmrl.node.ports import require_free
from shmrl.units import size


@dataclass(frozen=True, slots=True)
class Budget:
    """The arena against what can be in flight; sizes in bytes.

    Attributes:
        per_token: bytes of one token by column; an upper bound (sampling masks count their top_k).
        in_flight: episodes x tokens that can be open at once. retained: steps x tokens that are kept after their use.
    """

    per_token: dict[str, float]
    in_flight: tuple[int, int]
    retained: tuple[int, int]
    capacity: int
    free: int

    @property
    def bytes_per_token(self) -> float:
        return sum(self.per_token.values())

    @property
    def needed(self) -> int:
        (episodes, longest), (steps, tokens) = self.in_flight, self.retained
        return int((episodes * longest + steps * tokens) * self.bytes_per_token)


def check(tree: RunTree) -> Budget:
    """The arena's budget of a run that can start. ConfigError with every fault, or PortInUse naming the holder."""
    require_torch()
    problems = _environments(tree) + _remote(tree)
    shape = _shape(tree, problems)
    problems += _engine(tree)
    budget = arena_budget(tree, shape)
    problems += _memory(tree, budget)
    if problems:
        raise ConfigError(problems)
    _ports(tree)
    return budget


def _environments(tree: RunTree) -> list[str]:
    from shmrl.env.sandbox import problem
    from shmrl.envs.registry import find

    problems = []
    for split, source in tree.sources:
        if source.serve.address is None:
            found = [find(source.env.id), problem() if source.serve.sandbox else None]
            problems += [f"orchestrator.{split}.source {source.name!r}: {why}" for why in found if why]
    return problems


def _remote(tree: RunTree) -> list[str]:
    """Servers of sessions that say how many they have, where that cannot suffice. Others are asked when it runs."""
    problems = []
    for urls in {tuple(source.env.urls): None for _, source in tree.sources if source.env.urls}:
        most = [_max_sessions(url) for url in urls]
        train, evaluation = tree.remote_sessions(list(urls))
        if None not in most and (total := sum(filter(None, most))) < train + evaluation:
            problems.append(
                f"{redacted(', '.join(urls))}: {total} sessions (max_concurrent_envs), and this run opens up to "
                f"{train + evaluation}: {train} (orchestrator.max_inflight) and {evaluation} for evaluation"
            )
    return problems


def _max_sessions(url: str) -> int | None:
    """What a server of ours says about itself; None for others, and where there is none yet."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/healthz", timeout=1) as reply:
            return int(json.load(reply)["max_sessions"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ------------------------------------------------------------------------------------------------------------ model


def _shape(tree: RunTree, problems: list[str]) -> ModelShape:
    """The model's shape; adds what cannot work with it to `problems`."""
    try:
        shape = model_shape(tree)
    except ConfigError as error:
        problems += error.problems
        return ModelShape(0, (), 0, 0, 0, 0)
    if tree.model.tiny is not None:
        return shape  # its numbers are in the file, and were checked with it
    path = Path(str(tree.model.path)) / "config.json"
    if tree.trainer.router_replay and not shape.experts:
        problems.append(
            f"trainer.router_replay captures the field 'routing', but {path} describes a dense model (looked for "
            f"{', '.join(EXPERT_KEYS)}): set trainer.router_replay = false"
        )
    if tree.trainer.head > shape.vocab:
        problems.append(f"trainer.head = {tree.trainer.head} exceeds the vocabulary of {path}, {shape.vocab}")
    if tree.inference.max_model_len > shape.max_positions:
        problems.append(
            f"inference.max_model_len = {tree.inference.max_model_len} exceeds max_position_embeddings = "
            f"{shape.max_positions} of {path}"
        )
    return shape


def _engine(tree: RunTree) -> list[str]:
    """What the vLLM to be started cannot do for this run. Engines behind `urls` are asked when they are up."""
    if tree.inference.backend != "vllm" or tree.inference.urls:
        return []
    from shmrl.inference.vllm import launch, versions

    try:
        launch.checked_plan(tree, versions.installed(launch.interpreter(tree)))
    except ConfigError as error:
        return error.problems
    return []


# ----------------------------------------------------------------------------------------------------------- memory


def arena_budget(tree: RunTree, shape: ModelShape) -> Budget:
    """What one token takes in the arena, and how many can be there."""
    config, longest = tree.orchestrator, longest_episode(tree)
    step = config.token_batch_size or (config.batch_size or 0) * longest
    open_at_once, retained = (config.inflight, longest), (tree.arena.retain_steps, step)
    sizes = capacity_bytes(tree.arena), available_memory(tree.arena)
    return Budget(bytes_per_token(tree, shape), open_at_once, retained, *sizes)


def _memory(tree: RunTree, budget: Budget) -> list[str]:
    from shmrl.arena import memory
    from shmrl.arena.placement import Pages

    config, mount = tree.arena, arena_mount(tree.arena)
    asked = f"arena.capacity = {config.capacity!r}: "
    problems = [asked + refusal for refusal in memory.refusals(mount, budget.capacity)]
    try:
        Pages.chosen(config.huge_pages, config.numa, mount)
    except ValueError as error:
        problems.append(f"arena.{error}")
    if config.spill_dir is not None and not os.access(config.spill_dir, os.W_OK | os.X_OK):
        problems.append(f"arena.spill_dir = {str(config.spill_dir)!r} is missing or cannot be written to")
    disk = _spill_bytes(config)
    if budget.needed > budget.capacity + disk:
        (episodes, longest), (steps, tokens) = budget.in_flight, budget.retained
        retained = f" and retain_steps {steps} x {tokens:,} tokens," if steps else ""
        spill = f", arena.spill_dir has {size(disk)} free" if config.spill_dir else ""
        problems.append(
            f"the arena is too small: max_inflight {episodes:,} x {longest:,} tokens{retained} x "
            f"{budget.bytes_per_token:,.1f} B = {size(budget.needed)}, arena.capacity is {size(budget.capacity)} "
            f"({_default(tree)}){spill}: raise it, or lower orchestrator.max_inflight, orchestrator.seq_len"
            f"{', arena.retain_steps' if steps else ''} or trainer.head"
            + ("" if spill else ", or let what does not fit go to a disk: arena.on_full = 'spill' with arena.spill_dir")
        )
    return problems + _weights(tree, budget)


def _spill_bytes(config: ArenaConfig) -> int:
    """What the spill directory can take now; 0 where there is none, or none that can be read (said elsewhere)."""
    if config.spill_dir is not None:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(config.spill_dir).free
    return 0


def _weights(tree: RunTree, budget: Budget) -> list[str]:
    """Two versions of the weights, which the ranks write in float32, fit in shared memory beside the arena."""
    path, shared = tree.model.path, tree.shared_weights
    if path is None or shared is None or not (path / "config.json").exists():
        return []
    config = json.loads((path / "config.json").read_text())
    widened = 2 if config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16") else 1
    needed = 2 * widened * sum(file.stat().st_size for file in path.glob("*.safetensors"))
    taken = budget.capacity if arena_mount(tree.arena) == shared.parent else 0
    free = shutil.disk_usage(shared.parent).free - taken
    if needed <= free:
        return []
    return [
        f"two versions of the weights in {path} take {size(needed)} of {shared.parent} while one replaces the other, "
        f"which has {size(max(free, 0))} free beside the arena: enlarge it, or lower arena.capacity"
    ]


def _default(tree: RunTree) -> str:
    return "half of what is free" if tree.arena.capacity is None else "configured"


# ------------------------------------------------------------------------------------------------------------ ports


def _ports(tree: RunTree) -> None:
    """Every port this run would bind is free now."""
    wanted: dict[int, str] = {}
    for index, (split, source) in enumerate(tree.sources):
        if source.serve.address is None:
            _want(wanted, tree.env_address(index), f"env-server {split}/{source.name}")
            if source.serve.http is not None:
                _want(wanted, f"http://{source.serve.http}", f"sessions of {split}/{source.name}")
    if tree.node.url is not None:
        _want(wanted, tree.node.url, "the node server")
    if not tree.inference.urls:
        _want(wanted, tree.inference.engine_urls[0], "inference")


def _want(wanted: dict[int, str], address: str, who: str) -> None:
    url = urlsplit(address)
    port = int(url.port or 0)
    if port and port in wanted:
        raise PortInUse(f"{who} and {wanted[port]} would both bind port {port}: change one of the two")
    wanted[port] = who
    require_free(str(url.hostname), port, who)
