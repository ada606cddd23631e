"""Everything that can be known to fail before a process starts: environments, model, ports, shared memory.

Called by `shmrl run` (with --dry-run too) after the configuration was validated; imports no environment and no torch
and takes well under two seconds. All faults are reported at once. Of a run over several nodes, what the files tell is
checked where the job is submitted, and what the machine tells on every node.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from shmrl.config import ArenaConfig, RunTree
from shmrl.config.addresses import redacted
from shmrl.config.budget import bytes_per_token, longest_episode
from shmrl.config.shape import EXPERT_KEYS, ModelShape, model_shape
from shmrl.config.sources import EnvSpec, ServeConfig, Source
from shmrl.errors import ConfigError, PortInUse
from shmrl.node.host import arena_mount, available_memory, capacity_bytes, without_torch
from shmrl.node.ports import free_after, require_free
from shmrl.units import size

Node = Literal["inference", "trainer"]
NODES: tuple[Node, ...] = ("inference", "trainer")


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
    problems = without_torch() + _environments(tree) + _functions(tree) + _remote(tree)
    shape = _shape(tree, problems)
    problems += _engine(tree)
    budget = arena_budget(tree, shape)
    problems += _memory(tree, budget) + _trackers(tree)
    problems += _interpreters(tree)
    if problems:
        raise ConfigError(problems)
    ports(tree)
    return budget


def check_job(tree: RunTree) -> dict[Node, Budget]:
    """The arenas' budgets of a run over several nodes, as far as this machine can tell, which need be none of them.
    ConfigError with every fault."""
    problems = _environments(tree, here=False) + _functions(tree)
    shape = _shape(tree, problems)
    if tree.inference.python is None or tree.inference.python.exists():
        problems += _engine(tree)
    budgets = {node: arena_budget(tree, shape, node) for node in NODES}
    if tree.arena.capacity is not None:
        problems += [f"{node} nodes: {problem}" for node in NODES for problem in _too_small(tree, budgets[node])]
    if problems:
        raise ConfigError(problems)
    return budgets


def check_node(tree: RunTree, node: Node) -> Budget:
    """The budget of this node's arena. ConfigError with everything that it cannot do."""
    serves = node == "inference"
    problems = without_torch()
    problems += _environments(tree) + _remote(tree) if serves else _functions(tree)
    shape = _shape(tree, problems)
    problems += _engine(tree) if serves else []
    budget = arena_budget(tree, shape, node)
    problems += _memory(tree, budget)
    problems += _interpreters(tree) if serves else []
    if problems:
        raise ConfigError(problems)
    return budget


def _environments(tree: RunTree, *, here: bool = True) -> list[str]:
    """here: they will run on this machine."""
    hosted = _hosted(tree)
    return [f"{where}: {why}" for where, source in hosted for why in faults_of(source.env, source.serve, here=here)]


def environments_of(tables: Mapping[str, Any]) -> list[str]:
    """The same of a run that is not whole: of those sources of its tables whose env and serve are."""
    found = []
    for split in ("train", "eval"):
        for source in _sources(tables, split):
            try:
                env = EnvSpec.model_validate(source.get("env"))
                serve = ServeConfig.model_validate(source.get("serve", {}))
            except ValidationError:
                continue
            if serve.address is None:
                found += [f"orchestrator.{split}.source {source.get('name')!r}: {why}" for why in faults_of(env, serve)]
    return found


def _sources(tables: Any, split: str) -> list[Mapping[str, Any]]:
    for key in ("orchestrator", split, "source"):
        tables = tables.get(key) if isinstance(tables, Mapping) else None
    return [one for one in tables if isinstance(one, Mapping)] if isinstance(tables, list) else []


def faults_of(env: EnvSpec, serve: ServeConfig, *, here: bool = True) -> list[str]:
    """What keeps an environment from being hosted so, as far as its files tell. here: on this machine."""
    from shmrl.env.sandbox import problem
    from shmrl.envs.registry import find, misused, unsandboxed

    found = [why] if serve.sandbox and here and (why := problem()) else []
    found += unsandboxed(env.id, serve.sandbox)
    if serve.python is None:  # else that one is asked
        found += [why] if (why := find(env.id)) is not None else misused(env.id, env.args)
    return found


def _hosted(tree: RunTree) -> list[tuple[str, Source]]:
    """(its place in the configuration, source) of those that this run hosts."""
    hosted = [(split, source) for split, source in tree.sources if source.serve.address is None]
    return [(f"orchestrator.{split}.source {source.name!r}", source) for split, source in hosted]


def _interpreters(tree: RunTree) -> list[str]:
    """What other interpreters lack; they are asked, all at once."""
    from shmrl.env import foreign

    sources = [(where, source) for where, source in _hosted(tree) if source.serve.python is not None]
    answers = foreign.problems([(s.serve.python, s.env.id, s.env.args) for _, s in sources if s.serve.python])
    return [f"{where}: {why}" for (where, _), found in zip(sources, answers, strict=True) for why in found]


def _functions(tree: RunTree) -> list[str]:
    """Functions of the user's own are where the configuration says they are."""
    from shmrl.envs.registry import source_faults

    paths = {
        "trainer.loss.path": tree.trainer.loss.path,
        "orchestrator.advantage.path": tree.orchestrator.advantage.path,
    }
    return [f"{key} = {path!r}: {why}" for key, path in paths.items() if path for why in source_faults(path)]


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


def _trackers(tree: RunTree) -> list[str]:
    """Libraries that the configuration wants and nobody installed."""
    wanted = {"tensorboard": tree.monitor.tensorboard, "wandb": tree.monitor.wandb}
    return [
        f"monitor.{name}: {name} is not installed (pip install -c constraints.txt -e '.[monitor]')"
        for name, on in wanted.items()
        if on and importlib.util.find_spec(name) is None
    ]


# ----------------------------------------------------------------------------------------------------------- memory


def arena_budget(tree: RunTree, shape: ModelShape, node: Node | None = None) -> Budget:
    """What one token takes in the arena, and how many can be there. node: of a run over several: what is under way is
    spread over the inference nodes, and the trainer nodes have copies of their share of a step."""
    config, longest, over = tree.orchestrator, longest_episode(tree), tree.deployment
    step = config.token_batch_size or (config.batch_size or 0) * longest
    open_at_once, retained = (config.inflight, longest), (tree.arena.retain_steps, step)
    if node == "inference":
        open_at_once = (-(-config.inflight // over.inference_nodes), longest)
        retained = (tree.arena.retain_steps, -(-step // over.inference_nodes))
    elif node == "trainer":
        open_at_once, retained = (-(-step // longest // over.trainer_nodes), longest), (0, step)
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
    return problems + _too_small(tree, budget) + _weights(tree, budget)


def _too_small(tree: RunTree, budget: Budget) -> list[str]:
    config = tree.arena
    disk = _spill_bytes(config)
    if budget.needed <= budget.capacity + disk:
        return []
    (episodes, longest), (steps, tokens) = budget.in_flight, budget.retained
    retained = f" and retain_steps {steps} x {tokens:,} tokens," if steps else ""
    spill = f", arena.spill_dir has {size(disk)} free" if config.spill_dir else ""
    return [
        f"the arena is too small: max_inflight {episodes:,} x {longest:,} tokens{retained} x "
        f"{budget.bytes_per_token:,.1f} B = {size(budget.needed)}, arena.capacity is {size(budget.capacity)} "
        f"({_default(tree)}){spill}: raise it, or lower orchestrator.max_inflight, orchestrator.seq_len"
        f"{', arena.retain_steps' if steps else ''} or trainer.head"
        + ("" if spill else ", or let what does not fit go to a disk: arena.on_full = 'spill' with arena.spill_dir")
    ]


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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A port that the run would bind, who binds it, and the key it comes from; `base`: it is this port + i."""

    who: str
    host: str
    port: int
    key: str
    base: int
    count: int = 1


def ports(tree: RunTree) -> None:
    """Every port this run would bind is free now. PortInUse names each that is not, its holder and a way out."""
    seen: dict[int, _Wanted] = {}
    problems = []
    for one in _wanted(tree):
        if one.port in seen:
            other = seen[one.port]
            keys = f"{one.key} or {other.key}"
            problems.append(f"{one.who} and {other.who} would both bind port {one.port}: change {keys}")
            continue
        seen[one.port] = one
        try:
            require_free(one.host, one.port, one.who)
        except PortInUse as error:
            problems.append(f"{error} ({_way_out(one)})")
    if problems:
        raise PortInUse(problems)


def _wanted(tree: RunTree) -> Iterator[_Wanted]:
    derived = [i for i, (_, source) in enumerate(tree.sources) if source.serve.address is None]
    for index in derived:
        split, source = tree.sources[index]
        base, count = tree.orchestrator.env_server_base_port, derived[-1] + 1
        key = "orchestrator.env_server_base_port"
        yield _on(tree.env_address(index), f"env-server {split}/{source.name}", key, base, count)
        if source.serve.http is not None:
            key = f"{tree.source_key(index)}.serve.http"
            yield _on(f"http://{source.serve.http}", f"sessions of {split}/{source.name}", key)
    if tree.node.url is not None:
        yield _on(tree.node.url, "the node server", "node.address")
    if not tree.inference.urls:
        yield _on(tree.inference.engine_urls[0], "inference", "inference.port")


def _on(address: str, who: str, key: str, base: int | None = None, count: int = 1) -> _Wanted:
    url = urlsplit(address)
    port = int(url.port or 0)
    return _Wanted(who, str(url.hostname), port, key, port if base is None else base, count)


def _way_out(one: _Wanted) -> str:
    """The key that decides the port, and a value that would do now."""
    offset = f" + {one.port - one.base}" if one.port != one.base else ""
    free = free_after(one.host, one.base, one.count)
    shown = free if one.key.endswith("port") else f"{one.host}:{free}"
    flag = f"; free now: --{one.key.replace('_', '-')} {shown}" if free else ""
    return f"{one.key} = {one.base}{offset}{flag}"
