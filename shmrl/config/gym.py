"""NeMo Gym's configuration: its types of servers, its nesting in YAML, and `[gym]` of an env server's own file.

`SERVER_TYPES` is the one list of types. Whatever deals with a type asks it: which keys of a file make an instance,
which references there are, what is started here, where an instance is reached, what the head lists and what a metric's
`server_type` label can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from shmrl.config.sources import Sampling
from shmrl.config.tables import HostPort, Name, Positive, Table, Url

Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class ServerType:
    """A type of server: the key that its instances stand under in Gym's nesting.

    hosted: `shmrl env-server` starts instances of it. Others run elsewhere, and are only talked to.
    """

    name: str
    hosted: bool = False


SERVER_TYPES = {
    kind.name: kind
    for kind in (
        ServerType("responses_api_models"),
        ServerType("responses_api_agents"),
        ServerType("resources_servers"),
        ServerType("environment_servers", hosted=True),
    )
}


def _known(name: str) -> str:
    if name not in SERVER_TYPES:
        raise ValueError(f"unknown server type; there are {', '.join(SERVER_TYPES)}")
    return name


TypeName = Annotated[str, AfterValidator(_known)]


class Reference(Table):
    """How one server names another. Example: {type: resources_servers, name: weather}"""

    type: TypeName
    name: Name


class Limits(Table):
    """What bounds an episode: Gym's own keys, with its values as far as it has some."""

    max_concurrent_episodes: Positive | None = None
    """Episodes of this server at a time; it needs queue_timeout_seconds."""
    queue_timeout_seconds: Seconds | None = None
    """How long one more waits for a place, before it is a failure of the stage admission."""
    default_episode_timeout_seconds: Seconds | None = 21600.0
    """From an episode's admission to its result."""
    cleanup_timeout_seconds: Seconds = 180.0
    """For all that has to be closed after an episode, together."""

    @model_validator(mode="after")
    def _queue(self) -> Limits:
        if self.max_concurrent_episodes is not None and self.queue_timeout_seconds is None:
            raise ValueError("max_concurrent_episodes needs queue_timeout_seconds: how long one more may wait")
        return self


class GymModel(Table):
    """`gym.model`: the policy that an environment of shmrl talks to, since a `/run` request does not name one."""

    urls: Annotated[list[Url], Field(min_length=1)]
    """Engines, on vLLM's routes."""
    tokenizer: str
    """The model's directory."""
    name: str = "policy"
    """What the engines call it."""
    max_model_len: Positive = 1024
    """Tokens of a conversation, replies included."""
    fields: list[Literal["routing", "head", "mask"]] = Field(default_factory=list)
    """What is captured for training, beside tokens and log-probabilities."""
    head: Annotated[int, Field(ge=0)] = 0
    """Ids of the captured head, per token."""
    sampling: Sampling = Sampling()
    """How tokens are drawn; a request's responses_create_params win."""


class GymConfig(Limits):
    """`gym`: NeMo Gym's episodes at serve.http, for protocols = ["gym"]."""

    model: GymModel
    head: HostPort | None = None
    """Where collectors and `gym env status` ask what there is; Gym's own default is 127.0.0.1:11000."""
    blocks: HostPort | None = None
    """Where collectors on other hosts fetch the blocks that results refer to, with the run's token."""


class EpisodeTable(Limits):
    """What every instance of `environment_servers` may say in Gym's nesting."""

    entrypoint: str = "app.py"
    """Gym's own (`app.py`) is only handed on; "module:attribute" names a protocol that is not bundled."""
    host: str = "127.0.0.1"
    """Where it listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """On which port; 0 takes a free one."""
    num_workers: Positive | None = None
    """Worker processes of an environment of shmrl."""
    datasets: list[dict[str, Any]] | None = None
    """Handed on to collectors."""
