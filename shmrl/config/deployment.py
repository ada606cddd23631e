"""`[deployment]`: how many nodes a run takes; `[slurm]`: the job that gets them; `[job]`: which of them this is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shmrl.config.tables import Count, Name, Positive, Table

Word = Annotated[str, Field(pattern=r"^[^\s#'\"\\$`;&|<>()]+$")]  # a value on an #SBATCH line
Line = Annotated[str, Field(pattern=r"^[^\n\r]+$")]


class Deployment(Table):
    """`[deployment]`: how many nodes a run takes."""

    kind: Literal["single_node", "multi_node"] = "single_node"
    """multi_node: the first trainer_nodes have the orchestrator and the ranks, the others an engine each and a replica
    of every env server."""
    trainer_nodes: Positive = 1
    """Nodes with ranks."""
    inference_nodes: Count = 0
    """Nodes with an engine."""
    prefill_nodes: Count = 0
    """Of the inference nodes; the others decode. 0: every engine does both. Such a job is written, not submitted: the
    router between them is missing."""

    @property
    def several(self) -> bool:
        """Whether the run is over several nodes."""
        return self.kind == "multi_node"

    @property
    def nodes(self) -> int:
        return self.trainer_nodes + self.inference_nodes if self.several else 1

    @model_validator(mode="after")
    def _counts(self) -> Deployment:
        if not self.several and (self.trainer_nodes > 1 or self.inference_nodes):
            raise ValueError("trainer_nodes and inference_nodes belong to kind = 'multi_node'")
        if self.several and not self.inference_nodes:
            raise ValueError("kind = 'multi_node' needs inference_nodes, at least 1")
        if self.prefill_nodes and self.prefill_nodes >= self.inference_nodes:
            raise ValueError(
                f"prefill_nodes = {self.prefill_nodes} of inference_nodes = {self.inference_nodes}: none is left to "
                "decode"
            )
        return self


class Slurm(Table):
    """`[slurm]`: the job that `shmrl run --slurm` writes and submits. Its nodes are the run's alone."""

    job_name: Word | None = None
    """run.name without it."""
    partition: Word | None = None
    """Of the cluster; its default without it."""
    account: Word | None = None
    """Whom the job is charged to; the user's default without it."""
    time: Annotated[str, Field(pattern=r"^[0-9]+([:-][0-9]+){0,3}$")] | None = None
    """The job's limit as SLURM writes it: minutes, HH:MM:SS or D-HH:MM:SS; the partition's without it."""
    gpus_per_node: Count = 0
    """GPUs that the job asks for on each node; 0: none."""
    extra: list[Annotated[str, Field(pattern=r"^--[^\n\r]+$")]] = Field(default_factory=list)
    """More options of sbatch, a line each: "--constraint=h200"."""
    setup: list[Line] = Field(default_factory=list)
    """Lines of shell before anything starts: `module load`, `source venv/bin/activate`."""
    python: Word | None = None
    """The interpreter that has shmrl, on every node, after `setup`: "python" of a venv there; else the one that
    submits."""
    grace_s: Annotated[int, Field(ge=30, le=65535)] = 120
    """How long before the limit the run is told to finish its step and write a checkpoint; and how long, after trainer
    or orchestrator have failed for good, a checkpoint that is being written may take."""
    requeue: bool = False
    """The job starts again, with --resume, when its limit is reached or its first node is lost."""


class JobConfig(Table):
    """`[job]`: which node of which job this is; written into the resolved files by each node's launcher."""

    directory: Path
    """Where addresses are published, run.output_dir."""
    run_id: str
    """New for every job and every requeue."""
    node: Name
    """This node's name in the job."""
    host: str
    """What other nodes reach this node by; servers bind a free port of it."""
    rendezvous: str | None = None
    """"host:port" where the ranks of several trainer nodes meet."""
    trainer_node: Count = 0
    """Which of the trainer nodes this is, for torch's launcher."""
