"""`shmrl run --slurm`: writes the sbatch script of a run as text that can be read, and submits it.

Runs where jobs are submitted, which need not be one of the nodes. The template is `job.sbatch.j2`; what it starts on
the nodes is `job`.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

from shmrl.config import RunTree, dump_toml
from shmrl.config.rundir import RunDir, open_run_dir, refusal_of, write_atomic
from shmrl.env.sandbox import Limits
from shmrl.errors import ConfigError, RunError
from shmrl.launcher import preflight, roles
from shmrl.launcher.job import RUN_FILE, placed
from shmrl.launcher.preflight import NODES
from shmrl.launcher.run import budget_line, print_per_token, print_table
from shmrl.units import size

log = logging.getLogger(__name__)

LEAVE_S = 60  # for the launchers of the other nodes, once the run has ended
SCRIPT = "job.sbatch"


@dataclass(frozen=True, slots=True)
class Group:
    """One srun: a launcher on each of `count` nodes from number `first` on. name: a variable of the script."""

    name: str
    role: str
    first: int
    count: int
    what: str


def groups(tree: RunTree) -> list[Group]:
    """Who runs where; the trainer's nodes come first, because the script runs on the first node. Inference starts
    first: the trainer's launchers wait for its addresses."""
    over = tree.deployment
    if not over.several:
        return [Group("trainer", "single", 0, 1, "the whole run")]
    at, prefill = over.trainer_nodes, over.prefill_nodes
    trainer = Group("trainer", "trainer", 0, at, "the orchestrator (on the first) and the ranks")
    replicas = "an engine and a replica of every env server on each"
    if not prefill:
        return [Group("inference", "inference", at, over.inference_nodes, replicas), trainer]
    return [
        Group("prefill", "prefill", at, prefill, f"{replicas}: prompts"),
        Group("decode", "decode", at + prefill, over.inference_nodes - prefill, f"{replicas}: replies"),
        trainer,
    ]


def render(tree: RunTree, *, resume: bool = False) -> str:
    """The sbatch script."""
    over = tree.deployment
    summary = "one node"
    if over.several:
        inference = f"{over.inference_nodes} inference"
        if over.prefill_nodes:
            inference = f"{over.prefill_nodes} prefill + {over.inference_nodes - over.prefill_nodes} decode"
        summary = f"{over.trainer_nodes} trainer + {inference} nodes"
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    gpus = f" --gpus-per-node={tree.slurm.gpus_per_node}" if tree.slurm.gpus_per_node else ""
    return environment.get_template("job.sbatch.j2").render(
        name=tree.run.name,
        summary=summary,
        run_dir=_plain(tree.run.output_dir),
        nodes=over.nodes,
        slurm=tree.slurm,
        python=tree.slurm.python or sys.executable,
        resume=resume,
        groups=groups(tree),
        others=" ".join(f'"${group.name}"' for group in groups(tree) if group.name != "trainer"),
        gpus=gpus,
        leave_s=LEAVE_S,
    )


def _plain(path: Path) -> str:
    """The path; ConfigError for one that an #SBATCH line, which nobody can quote, would not take as it is."""
    if shlex.quote(str(path)) != str(path) or "%" in str(path):
        raise ConfigError(f"run.output_dir = {str(path)!r}: a job's directory has no spaces, quotes, % or the like")
    return str(path)


def submit(tree: RunTree, *, resume: bool = False, clean: bool = False) -> int:
    """Write the script and the resolved run, and submit; prints the job's id and where its logs are; 0.

    ConfigError for what cannot run, and a directory that was used; RunError when SLURM refuses.
    """
    _check(tree)
    if tree.deployment.prefill_nodes:
        raise ConfigError(
            f"deployment.prefill_nodes = {tree.deployment.prefill_nodes}: nothing here starts the router between "
            "prefill and decode, so such a job is written (--slurm --dry-run) but not submitted; set it to 0"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError("--slurm: there is no sbatch here; --slurm --dry-run writes the script without it")
    rundir = open_run_dir(tree.run.output_dir, resume=resume, clean=clean)
    script = _write(tree, rundir, resume)
    (rundir.root / "logs").mkdir(exist_ok=True)
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"sbatch refused {script}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    rundir.write_record({"name": tree.run.name, "status": "submitted", "exit_code": None, "reason": "", "job": job})
    print(f"job {job}: {script}")
    print(f"logs: {rundir.root}/logs/job-{job}.log, of each role in {rundir.root}/logs/latest/")
    print(f"to stop it with a checkpoint: touch {rundir.root}/drain")
    return 0


def dry_run(tree: RunTree, *, slurm: bool, resume: bool = False, clean: bool = False) -> int:
    """Check everything that this machine can, write the script and the resolved run, print what would be started where,
    and with `slurm` the script; submits nothing. As of the run itself, ConfigError where the directory is none for it:
    then nothing is written there."""
    _check(tree)
    rundir = RunDir(tree.run.output_dir, 1, "<node>" if tree.deployment.several else "")
    refusal = refusal_of(tree.run.output_dir, resume=resume, clean=clean)
    script = _write(tree, rundir, resume) if refusal is None else None
    if tree.deployment.several:
        print_nodes(tree, rundir)
    if slurm:
        where = f"script: {script}\n\n" if script is not None else ""
        print(f"{where}{render(tree, resume=resume)}", end="")
    if refusal is not None:
        raise refusal
    return 0


def _check(tree: RunTree) -> None:
    if tree.deployment.several:
        preflight.check_job(tree)
    _plain(tree.run.output_dir)


def _write(tree: RunTree, rundir: RunDir, resume: bool) -> Path:
    """The whole run for this user alone, with the tokens of its sessions, and the script beside."""
    write_atomic(rundir.root / RUN_FILE, dump_toml(tree), 0o600)
    script = rundir.root / SCRIPT
    write_atomic(script, render(tree, resume=resume))
    return script


def print_nodes(tree: RunTree, rundir: RunDir) -> None:
    """What is started on which node, what replicas come to together, and the arenas' budgets."""
    over, here = tree.deployment, placed(tree, None)
    on_inference = [roles.node_server(here, rundir), *roles.env_servers(here, rundir), roles.engine(here, rundir)]
    on_trainer = [roles.node_server(here, rundir), roles.trainer(here, rundir)]
    print(f"{over.inference_nodes} inference nodes, each:")
    print_table([("role", "count", "address", "log")], on_inference)
    print(f"{over.trainer_nodes} trainer nodes, each, and the orchestrator on the first:")
    print_table([("role", "count", "address", "log")], [roles.orchestrator(here, rundir), *on_trainer])
    for line in totals(tree):
        print(line)
    budgets = preflight.check_job(tree)
    for node in NODES:
        print(f"{node} nodes: {budget_line(budgets[node])}")
    print_per_token(budgets["inference"])


def totals(tree: RunTree) -> list[str]:
    """What limits that count per replica come to over all nodes, a line per source."""
    lines, nodes = [], tree.deployment.inference_nodes
    for split, source in tree.sources:
        if source.serve.address is not None:
            continue
        workers, most = source.serve.pool.most, source.serve.max_concurrent
        line = (
            f"{split}/{source.name}: {nodes} replicas x {workers} workers = {nodes * workers:,}; "
            f"serve.max_concurrent {nodes} x {most:,} = {nodes * most:,} episodes"
        )
        if source.serve.sandbox is not None:
            memory = Limits().memory
            line += f"; sandboxes of {size(memory)}, {size(nodes * most * memory)} at most"
        lines.append(line)
    return lines
