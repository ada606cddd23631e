"""Env servers: one environment behind one address, its worker processes, and the client the orchestrator uses.

`interface` is what authors write against, `model` what they talk to; `server` and `pool` run in the env-server process,
`worker` in its children, `client` in the orchestrator; `sessions/` is for OpenEnv's clients and servers. Names are
resolved on first use: a worker needs no sockets, the orchestrator no tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_WHERE = {
    "Environment": "shmrl.env.interface",
    "SessionEnvironment": "shmrl.env.interface",
    "Episode": "shmrl.env.interface",
    "Step": "shmrl.env.interface",
    "Generated": "shmrl.env.interface",
    "Rubric": "shmrl.env.interface",
    "reward": "shmrl.env.interface",
    "metric": "shmrl.env.interface",
    "task_seed": "shmrl.env.interface",
    "EnvServer": "shmrl.env.server",
    "EnvClient": "shmrl.env.client",
    "Delta": "shmrl.types",
    "EpisodeResult": "shmrl.types",
    "Task": "shmrl.types",
    "serve_sidecar": "shmrl.env.sidecar",
    "RemoteEnv": "shmrl.env.sessions.remote",
    "resolve_env": "shmrl.env.sessions.hosting",
}

__all__ = list(_WHERE)


if TYPE_CHECKING:
    from shmrl.env.client import EnvClient as EnvClient
    from shmrl.env.interface import Environment as Environment
    from shmrl.env.interface import Episode as Episode
    from shmrl.env.interface import Generated as Generated
    from shmrl.env.interface import Rubric as Rubric
    from shmrl.env.interface import SessionEnvironment as SessionEnvironment
    from shmrl.env.interface import Step as Step
    from shmrl.env.interface import metric as metric
    from shmrl.env.interface import reward as reward
    from shmrl.env.interface import task_seed as task_seed
    from shmrl.env.server import EnvServer as EnvServer
    from shmrl.env.sessions.hosting import resolve_env as resolve_env
    from shmrl.env.sessions.remote import RemoteEnv as RemoteEnv
    from shmrl.env.sidecar import serve_sidecar as serve_sidecar
    from shmrl.types import Delta as Delta
    from shmrl.types import EpisodeResult as EpisodeResult
    from shmrl.types import Task as Task


def __getattr__(name: str) -> object:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'shmrl.env' has no attribute {name!r}")
    value = getattr(import_module(where), name)
    globals()[name] = value
    return value
