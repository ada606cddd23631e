"""`shmrl run`, `node`, and every role of a run started by hand."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shmrl.cli.common import Files, Flags, Switch, begin, given, located, run_tree
from shmrl.errors import ConfigError


@dataclass
class _Output:
    """What a command that may find its output directory used has in common with others."""

    files: Files
    resume: Switch = False
    """Continue a used output directory from its last checkpoint."""
    clean: Switch = False
    """Remove what an earlier run left in the output directory."""
    slurm: Switch = False
    """Submit it as a SLURM job, as [slurm] and [deployment] say; with --dry-run print its script."""


@dataclass
class Run(_Output):
    """Check everything, start every process of a run, watch them, tear all of it down."""

    dry_run: Switch = False
    """Write the resolved configs and print what would be started; start nothing."""

    def __call__(self, flags: Flags) -> int:
        try:
            tree = run_tree("launcher", self.files, flags)
        except ConfigError as wrong:
            raise ConfigError([*wrong.problems, *_wrong_environments(self.files, flags)]) from wrong
        from shmrl.launcher import run, slurm

        options = {"resume": self.resume, "clean": self.clean}
        do = slurm.submit if self.slurm else run.dry_run if self.dry_run else run.run
        if self.dry_run and (self.slurm or tree.deployment.several):
            do = functools.partial(slurm.dry_run, slurm=self.slurm)
        with located(self.files, flags):
            return do(tree, **options)


def _wrong_environments(files: Sequence[Path], flags: Flags) -> list[str]:
    """What is wrong with the environments of a run with which other things are wrong: said with those."""
    from shmrl.config import RunTree, faults
    from shmrl.config.load import read_layers
    from shmrl.launcher.preflight import environments_of

    try:
        tables, origin = read_layers(files, flags)
    except (ConfigError, OSError):  # which was said
        return []
    return [faults.located(problem, origin, RunTree.model_fields) for problem in environments_of(tables)]


@dataclass
class Node(_Output):
    """Create the arena, the token and the initial model of a run whose roles are started by hand."""

    def __call__(self, flags: Flags) -> int:
        tree = run_tree("node", self.files, flags)
        from shmrl.monitor.exposition import exposed
        from shmrl.node import host

        serves = tree.arena.address is not None  # a node server; else it hosts the run, and makes the directory
        with exposed("node", tree.metrics_dir if serves else None):
            return host.main(tree, resume=self.resume, clean=self.clean)


@dataclass
class Orchestrator:
    """Dispatch episodes, pack references, ship steps to the trainer."""

    files: Files
    resume: Switch = False
    """Continue from the last checkpoint."""

    def __call__(self, flags: Flags) -> int:
        tree = run_tree("orchestrator", self.files, flags)
        from shmrl import orchestrator
        from shmrl.monitor.exposition import exposed

        with exposed("orchestrator", tree.metrics_dir):
            return orchestrator.main(tree, self.resume)


@dataclass
class Trainer:
    """Train: starts its ranks under torch.distributed.run, and is one of them when RANK is set."""

    files: Files
    resume: Switch = False
    """Continue from the last checkpoint."""
    fake_data: Switch = False
    """Train on invented episodes for run.max_steps steps, without an orchestrator, and print how fast that goes."""

    def __call__(self, flags: Flags) -> int:
        rank = os.environ.get("RANK")
        tree = run_tree(f"trainer:{rank}" if rank else "trainer", self.files, flags)
        if rank is None:
            from shmrl.launcher.roles import torch_command
            from shmrl.node.host import require_arena, require_torch

            require_torch()
            if not self.fake_data:
                require_arena(tree.arena)
            again = [*map(str, self.files), *(f"--{key}={value}" for key, value in flags.items())]
            switches = {"--resume": self.resume, "--fake-data": self.fake_data}
            command = torch_command(tree, [*again, *(name for name, on in switches.items() if on)])
            os.execv(command[0], command)
        from shmrl import trainer
        from shmrl.monitor.exposition import exposed

        with exposed(f"trainer:{rank}", tree.metrics_dir if rank == "0" else None):
            return trainer.main(tree, self.resume, self.fake_data)


@dataclass
class Inference:
    """Serve the policy: with the embedded engine, on vLLM's HTTP routes, or by becoming a vLLM server."""

    files: Files

    def __call__(self, flags: Flags) -> int:
        tree = run_tree("inference", self.files, flags)
        if tree.inference.backend == "vllm":
            from shmrl.inference.vllm import launch

            launch.run(tree)
        from shmrl.node.host import require_torch

        require_torch()
        from shmrl.inference.embedded import server
        from shmrl.node.published import Addresses

        engine, port, publish = tree.inference, tree.inference.port, None
        if tree.job is not None:
            addresses = Addresses(tree.job)
            port = addresses.port("inference", "inference")
            publish = functools.partial(addresses.publish, "inference", "inference")
        server.run(
            tree.newest_weights,
            engine.host,
            port,
            served_name=tree.model.name,
            dtype=engine.dtype,
            device=engine.device,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_logprobs=engine.max_logprobs,
            logprobs_mode=engine.logprobs_mode,
            return_routed_experts="routing" in tree.captured,
            return_sampling_mask="mask" in tree.captured,
            seed=tree.run.seed,
            publish=publish,
        )
        return 0


@dataclass
class EnvServer:
    """Serve one environment: a pool of worker processes behind one address. With [gym], or with YAML files in NeMo
    Gym's nesting: environment servers of NeMo Gym."""

    files: Files

    def __call__(self, flags: Flags) -> int:
        from shmrl.config import load_env_server
        from shmrl.config.nesting import is_nesting

        files = given(self.files)
        config = None if any(map(is_nesting, files)) else load_env_server(files, flags)
        if config is None or config.gym is not None:
            from shmrl.env.episodes.plan import planned
            from shmrl.env.episodes.server import main

            plan = planned(files, flags)
            begin("env-server:gym", plan.log)
            return main(plan)
        begin(f"env-server:{config.name}", config.log)
        from shmrl.env import running
        from shmrl.monitor.exposition import exposed

        with exposed(f"env-server {config.split}/{config.name}", config.metrics_dir):
            running.main(config)
        return 0
