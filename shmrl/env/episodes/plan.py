"""What `shmrl env-server` starts for NeMo Gym, from its files: everything is checked here, before anything listens.

TOML is an env server's own file (one environment, `[gym]`); YAML is Gym's nesting. Together they are one nesting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shmrl.config import EnvServerConfig, Log, load_env_server
from shmrl.config.gym import EpisodeTable
from shmrl.config.load import validated
from shmrl.config.nesting import Instance, Nesting, is_nesting, read_nesting, unresolved
from shmrl.env.episodes.own import OwnTable
from shmrl.env.episodes.protocol import Protocol
from shmrl.env.episodes.protocols import PROTOCOLS, find
from shmrl.errors import ConfigError

OWN_TYPE = "environment_servers"


@dataclass(frozen=True, slots=True)
class Hosted:
    """An instance that is started here: what runs its episodes, and its keys."""

    instance: Instance
    protocol: type[Protocol]
    table: EpisodeTable

    @property
    def token(self) -> str | None:
        """What its routes ask for (`serve.token`)."""
        return self.table.serve.get("token") if isinstance(self.table, OwnTable) else None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started here, where the head listens, and all that the files say."""

    nesting: Nesting
    hosted: tuple[Hosted, ...]
    head: tuple[str, int] | None
    log: Log


def planned(files: Sequence[Path], flags: Mapping[str, str] | None = None) -> Plan:
    """The plan of some files; ConfigError. Flags are of the TOML files where there are some, else of the YAML files."""
    nested, own = [file for file in files if is_nesting(file)], [file for file in files if not is_nesting(file)]
    nesting = read_nesting(nested, {} if own else flags)
    head, log = nesting.head, Log()
    if own:
        config = load_env_server(own, flags)
        if config.gym is None:
            raise ConfigError(f'{own[-1]}: beside Gym\'s files, [gym] and serve.protocols = ["gym"] are needed')
        nesting.add(instance_of(config, ", ".join(map(str, own))))
        head, log = _place(config.gym.head) or head, config.log
    hosted = tuple(one for instance in nesting.instances.values() if (one := _hosted(instance, nesting)))
    if not hosted:
        listed = ", ".join(f"{one.name} ({one.type})" for one in nesting.instances.values()) or "no server"
        raise ConfigError(
            f"{', '.join(map(str, files))}: nothing to start here. That would be an instance of {OWN_TYPE}, of "
            f"{', '.join(PROTOCOLS)} or with an entrypoint module:attribute; there is {listed}"
        )
    return Plan(nesting, hosted, head, log)


def instance_of(config: EnvServerConfig, place: str) -> Instance:
    """An env server's own file as an instance of a nesting."""
    return Instance(config.name, OWN_TYPE, "shmrl", OwnTable.block_of(config), place)


def _hosted(instance: Instance, nesting: Nesting) -> Hosted | None:
    """How an instance is started here; None for one that runs elsewhere. ConfigError, every fault with its key."""
    protocol = find(instance) if instance.hosted else None
    if protocol is None:
        return None
    if problems := unresolved(instance.block, instance.path):
        raise ConfigError(problems)
    try:
        table = validated(protocol.Table, instance.block)
        for reference in protocol.references(table):
            nesting.url(reference)
        if isinstance(table, OwnTable):
            table.env_server_config(instance, nesting)
        elif (table.num_workers or 1) > 1:
            raise ConfigError(f"num_workers = {table.num_workers}: one process serves all its episodes, and joins them")
    except ConfigError as error:
        prefix = f"{instance.path}: "
        raise ConfigError([prefix + problem.removeprefix(prefix) for problem in error.problems]) from None
    return Hosted(instance, protocol, table)


def _place(address: str | None) -> tuple[str, int] | None:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
