"""Env servers: one environment behind one address, its worker processes, and the client the orchestrator uses.

`interface` is what authors write against, `model` what they talk to; `server` and `pool` run in the env-server process,
`worker` in its children, `client` in the orchestrator; `sessions/` is for OpenEnv's clients and servers. Names are
resolved on first use: a worker needs no sockets, the orchestrator no tokenizer.
"""

from __future__ import annotations

from importlib import import_module

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
    "serve_sidecar": "shmrl.env.sidecar",
    "RemoteEnv": "shmrl.env.sessions.remote",
    "resolve_env": "shmrl.env.sessions.hosting",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'shmrl.env' has no attribute {name!r}")
    value = getattr(import_module(where), name)
    globals()[name] = value
    return value
