"""The episode protocols there are, by the name of their implementation in a nesting."""

from __future__ import annotations

from importlib import import_module

from shmrl.config.nesting import Instance
from shmrl.env.episodes.own import OwnEnvironment
from shmrl.env.episodes.protocol import Protocol
from shmrl.env.episodes.relay import LegacyAgent
from shmrl.env.episodes.turn import SingleAgentTurn, SingleAgentTurnLegacy
from shmrl.errors import ConfigError

PROTOCOLS: dict[str, type[Protocol]] = {
    "shmrl": OwnEnvironment,
    "single_agent_turn": SingleAgentTurn,
    "single_agent_turn_legacy": SingleAgentTurnLegacy,
    "legacy_agent": LegacyAgent,
}


def find(instance: Instance) -> type[Protocol] | None:
    """Who runs an instance's episodes: a bundled protocol, or the one that its `entrypoint` names as
    "module:attribute"; None if it is somebody else's. ConfigError for a name that is no protocol."""
    entrypoint = str(instance.block.get("entrypoint", ""))
    if instance.implementation in PROTOCOLS:
        return PROTOCOLS[instance.implementation]
    module, colon, attribute = entrypoint.partition(":")
    if not colon:
        return None
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{instance.path}.entrypoint = {entrypoint!r}: {error}") from None
    if not isinstance(found, type) or not issubclass(found, Protocol):
        raise ConfigError(f"{instance.path}.entrypoint = {entrypoint!r}: not a subclass of {Protocol.__name__}")
    return found
