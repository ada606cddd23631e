"""`[orchestrator]`: batches, concurrency, staleness, and the sources that it draws from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shmrl.config.sources import EvalSources, TrainSources
from shmrl.config.tables import Count, Port, Positive, Problems, Table

Range = tuple[float, float]


class Filters(Table):
    """`[orchestrator.filters]`: which groups are not worth a gradient."""

    zero_advantage: bool = True
    """Episodes that are as good as the mean of their group are not trained on."""
    advantage_range: Range | None = None
    """[low, high]: episodes whose advantage lies in it are not trained on."""
    difficulty: Range | None = None
    """[low, high]: tasks whose mean reward, over their episodes in this attempt, lies outside are not trained on."""

    @model_validator(mode="after")
    def _ranges(self) -> Filters:
        for name, given in (("advantage_range", self.advantage_range), ("difficulty", self.difficulty)):
            if given is not None and given[0] > given[1]:
                raise ValueError(f"{name} = [{given[0]:g}, {given[1]:g}] ends before it begins")
        return self


class Advantage(Table):
    """`[orchestrator.advantage]`: how good an episode is against its group."""

    kind: Literal["grpo", "custom"] = "grpo"
    """grpo: the reward less the group's mean. custom: the function at path."""
    std: bool = False
    """Divide by the group's standard deviation."""
    leave_one_out: bool = False
    """The mean of the others instead of the group's."""
    length_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Taken off the reward, for an episode's length against its group's."""
    path: str | None = None
    """With kind = "custom": module:function."""

    @model_validator(mode="after")
    def _custom(self) -> Advantage:
        if (self.kind == "custom") != (self.path is not None):
            raise ValueError("advantage.path belongs to kind = 'custom', and only there")
        return self


class Orchestrator(Table):
    """`[orchestrator]`: batches, concurrency, staleness, sources."""

    batch_size: Positive | None = None
    """Episodes of a step, a multiple of the group sizes; this or token_batch_size."""
    token_batch_size: Positive | None = None
    """Tokens of a step; this or batch_size."""
    group_size: Positive = 8
    """Episodes per task, scored against each other."""
    seq_len: Positive = 1024
    """Tokens of a micro batch; what of an episode is longer is cut before it is trained on."""
    max_inflight: Positive | None = None
    """Episodes under way at a time; two batches without it."""
    max_off_policy_steps: Count = 1
    """Versions that an episode may be older than the one that trains on it; 0: strictly synchronous."""
    env_server_base_port: Port = 5000
    """The first source's server; source i listens at this + i. Runs on one host need different ones."""
    env_server_replicas: Positive = 1
    """Servers of each source; the launcher of a run over several nodes sets it to the number of inference nodes."""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long the start waits for env servers, engines and ranks."""
    filters: Filters = Filters()
    advantage: Advantage = Advantage()
    train: TrainSources
    eval: EvalSources = EvalSources()

    @property
    def inflight(self) -> int:
        """Permits for episodes: max_inflight, else one batch ahead of the one being collected."""
        return self.max_inflight or 2 * (self.batch_size or 64 * self.group_size)

    @model_validator(mode="after")
    def _batches(self) -> Orchestrator:
        problems = []
        if (self.batch_size is None) == (self.token_batch_size is None):
            problems.append("give exactly one of batch_size and token_batch_size")
        for source in self.train.source:
            size = source.group_size or self.group_size
            if self.batch_size and self.batch_size % size:
                problems.append(
                    f"batch_size = {self.batch_size} is not a multiple of {source.name}'s group_size = {size}"
                )
            if size > self.inflight:
                problems.append(f"{source.name}'s group_size = {size} exceeds max_inflight = {self.inflight}")
        names = [source.name for source in (*self.train.source, *self.eval.source)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            problems.append(f"two sources are called {name!r}; names must differ across train and eval")
        if self.env_server_base_port + len(names) - 1 > 65535:
            problems.append(
                f"env_server_base_port = {self.env_server_base_port} leaves no room for {len(names)} servers"
            )
        Problems.check(problems)
        return self
