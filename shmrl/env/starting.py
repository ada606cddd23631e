"""How both servers of an environment start (`server.py`, `sessions/server.py`): what they tell the processes that run
its code, and what keeps them from listening."""

from __future__ import annotations

import errno
from importlib import import_module
from typing import Any

import zmq

from shmrl.config import EnvServerConfig
from shmrl.config.tables import Log
from shmrl.errors import ConfigError, RunError, ShmrlError
from shmrl.node.ports import free_after, port_in_use


def environment_settings(config: EnvServerConfig) -> dict[str, Any]:
    """What a worker and a session's process have to know: name, env_id, env_args, sandbox, log."""
    return {
        "name": config.name,
        "env_id": config.env.id,
        "env_args": config.env.args,
        "sandbox": config.serve.sandbox,
        "log": config.log.model_dump(mode="json", by_alias=True),
    }


def needs_sandbox(config: EnvServerConfig) -> None:
    """ConfigError for a bundled environment that runs what a model wrote, without a sandbox."""
    registry = import_module("shmrl.envs.registry")  # environments stand above this room: they are met by name only
    if found := registry.unsandboxed(config.env.id, config.serve.sandbox):
        raise ConfigError(found)


def log_of(settings: dict[str, Any]) -> Log:
    """The log of a process with these settings: the server's."""
    return Log.model_validate(settings["log"])


def needs_token(what: str, token: str | None, remedy: str) -> str:
    """The token of a server that others can reach; ConfigError without one."""
    if token is None:
        raise ConfigError(f"{what} can be reached from elsewhere: set {remedy} or SHMRL_TOKEN")
    return token


def cannot_bind(what: str, address: str, error: OSError | zmq.ZMQError, key: str | None = None) -> ShmrlError:
    """PortInUse with its holder, else RunError. key: which says the address; a value that would do now is named.

    Example: cannot_bind("env server words", "tcp://127.0.0.1:5000", error, "serve.address")
    """
    place, _, port = address.rpartition(":")
    if error.errno != errno.EADDRINUSE or not port.isdigit():
        return RunError(f"{what}: cannot bind {address}: {error.strerror}")
    if key is None:
        return port_in_use(int(port), what)
    host = place.rpartition("/")[2].strip("[]")
    free = free_after("" if host == "*" else host, int(port))
    remedy = f"free now: --{key} {place}:{free}" if free else "choose another port"
    return port_in_use(int(port), f"{key} = {address!r}", remedy)
