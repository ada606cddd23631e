"""`shmrl eval`: environments, a model, and how good it is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from shmrl.cli.common import Flags, begin
from shmrl.errors import ConfigError


@dataclass
class Eval:
    """Run n tasks x r rollouts of environments with one model: avg@k and pass@k, and a line of JSON per rollout.

    The same command goes on with a file that is half done.
    """

    environments: Annotated[Positional[tuple[str, ...]], arg(metavar="ENV...", help_behavior_hint="")]
    """Env ids, files of env servers, or a run's file (its eval sources)."""
    model: str
    """A model directory (an engine is started here), or an engine's URL."""
    url: Annotated[tuple[str, ...], arg(metavar="URL...", help_behavior_hint="")] = ()
    """Session servers that someone else runs (`openenv:URL` as an env id); they need --env.max-turns."""
    tasks: Annotated[int, arg(aliases=["-n"])] = 5
    """Tasks per environment."""
    rollouts: Annotated[int, arg(aliases=["-r"])] = 3
    """Rollouts per task."""
    concurrency: Annotated[int, arg(aliases=["-c"])] = 16
    """Rollouts at a time."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("eval.jsonl")
    """The file of rollouts."""
    tokenizer: Path | None = None
    """The model's directory, where an engine elsewhere names none of this machine."""
    seed: int = 0
    """Of the rollouts."""

    def __call__(self, flags: Flags) -> int:
        from shmrl.config import Log, load_eval
        from shmrl.config.addresses import redacted
        from shmrl.launcher.evaluate import Plan, evaluate

        given = [*self.environments, *(f"openenv:{url}" for url in self.url)]
        if not given:
            raise ConfigError("give at least one env id, TOML file or --url")
        if min(self.tasks, self.rollouts, self.concurrency) < 1:
            raise ConfigError(f"-n {self.tasks} -r {self.rollouts} -c {self.concurrency}: each is at least 1")
        if self.url and "env.max-turns" not in {key.replace("_", "-") for key in flags}:
            raise ConfigError(f"--url: {redacted(self.url[0])} is someone else's environment; give --env.max-turns N")
        sources = [source for what in given for source in load_eval(what, flags)]
        begin("eval", Log())
        plan = Plan(
            sources, self.model, self.tasks, self.rollouts, self.concurrency, self.out, self.tokenizer, self.seed
        )
        return evaluate(plan)
