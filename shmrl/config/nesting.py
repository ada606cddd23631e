"""Files in NeMo Gym's nesting: `<instance>: {<server type>: {<implementation>: {keys}}}`, and what else they hold.

Read by `shmrl env-server`; the head hands the whole on to collectors. What Gym fills in (`${...}`, `???`,
`_inherit_from`) is not resolved here: `gym env resolve` prints the whole without them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from shmrl.config.gym import SERVER_TYPES, Reference
from shmrl.config.load import put
from shmrl.errors import ConfigError

SUFFIXES = (".yaml", ".yml")
PRIVATE = ("serve", "arena")
RESOLVE = "that is Gym's to resolve: `gym env resolve --config FILE` prints the whole"


@dataclass(frozen=True, slots=True)
class Instance:
    """One server of a nesting, wherever it runs.

    Example: Instance("rev", "environment_servers", "shmrl", {"port": 11051, ...}, "gym.yaml:3")
    """

    name: str
    type: str
    implementation: str
    block: dict[str, Any]
    place: str

    @property
    def path(self) -> str:
        """What its keys are called in messages. Example: gym.yaml:3: rev.environment_servers.shmrl"""
        return f"{self.place}: {self.name}.{self.type}.{self.implementation}"

    @property
    def hosted(self) -> bool:
        """Whether `shmrl env-server` starts servers of its type."""
        return SERVER_TYPES[self.type].hosted


@dataclass(slots=True)
class Nesting:
    """Everything that some files say: the instances, and the other keys as they stand there."""

    instances: dict[str, Instance] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def add(self, instance: Instance) -> None:
        """ConfigError, with both places, if there is one of this name."""
        other = self.instances.get(instance.name)
        if other is not None:
            raise ConfigError(f"{instance.name} is declared twice: {other.place} and {instance.place}")
        self.instances[instance.name] = instance

    @property
    def head(self) -> tuple[str, int] | None:
        """Where the head is to listen, as `head_server` says. ConfigError."""
        given = self.rest.get("head_server")
        if given is None:
            return None
        host, port = (given.get("host", "127.0.0.1"), given.get("port")) if isinstance(given, dict) else (None, None)
        if not isinstance(host, str) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ConfigError(f"head_server = {given!r}: {{host, port}} is expected")
        return host, port

    def url(self, reference: Reference) -> str:
        """Where the server is that `reference` names: its host and port, or a model server's `base_url`.

        ConfigError for one that there is not, that is of another type, or that has no address.
        """
        kind, instance = SERVER_TYPES.get(reference.type), self.instances.get(reference.name)
        if kind is None or instance is None or instance.type != kind.name:
            alike = [name for name, one in self.instances.items() if one.type == reference.type]
            is_another = f"; {reference.name} is one of {instance.type}" if instance else ""
            raise ConfigError(
                f"no {reference.type} is called {reference.name!r}{is_another}; there are: {', '.join(alike) or 'none'}"
            )
        base, port = instance.block.get("base_url"), instance.block.get("port")
        if isinstance(base, str) and base.startswith(("http://", "https://")):
            return base.rstrip("/")
        if not isinstance(port, int) or not 0 < port < 65536:
            raise ConfigError(
                f"{instance.path}.port = {port!r}: this server runs elsewhere, and its host and port must be given"
            )
        host = str(instance.block.get("host", "127.0.0.1"))
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def as_dict(self) -> dict[str, Any]:
        """The whole in the same nesting: what a head answers. What is shmrl's own stays here, with its token."""
        whole = dict(self.rest)
        for one in self.instances.values():
            block = {key: value for key, value in one.block.items() if not (one.hosted and key in PRIVATE)}
            whole[one.name] = {one.type: {one.implementation: block}}
        return whole


def is_nesting(file: Path) -> bool:
    """Whether a file of the command is in Gym's nesting."""
    return file.suffix in SUFFIXES


def read_nesting(files: Sequence[Path], flags: Mapping[str, str] | None = None) -> Nesting:
    """What all files say together. ConfigError: no YAML, an instance declared twice, a type that is none."""
    nesting = Nesting()
    for file in files:
        tree, lines = _parsed(file)
        for dotted, raw in (flags or {}).items():
            if dotted.split(".")[0] in tree:
                put(tree, dotted, raw)
        for name, value in tree.items():
            instance = _instance(name, value, f"{file}:{lines.get(name, 1)}")
            if instance is None:
                nesting.rest[name] = value
            else:
                nesting.add(instance)
    unknown = [key for key in flags or {} if key.split(".")[0] not in {**nesting.instances, **nesting.rest}]
    if unknown:
        raise ConfigError([f"--{key}: {', '.join(map(str, files))} has no {key.split('.')[0]}" for key in unknown])
    return nesting


def _instance(name: str, value: Any, place: str) -> Instance | None:
    """The instance that a top-level key declares, or None: it is something else."""
    if not isinstance(value, dict):
        return None
    types = [key for key in value if key in SERVER_TYPES]
    if not types:
        _refuse_strangers(name, value, place)
        return None
    if "_inherit_from" in value:
        raise ConfigError(f"{place}: {name}._inherit_from = {value['_inherit_from']!r}: {RESOLVE}")
    if len(value) > 1:
        raise ConfigError(f"{place}: {name} has {', '.join(value)}: an instance has one server type, and nothing else")
    group = value[types[0]]
    if not isinstance(group, dict) or len(group) != 1 or not isinstance(next(iter(group.values())), dict):
        raise ConfigError(f"{place}: {name}.{types[0]}: exactly one implementation with its keys is expected")
    implementation, block = next(iter(group.items()))
    return Instance(name, types[0], str(implementation), block, place)


def _refuse_strangers(name: str, value: dict[str, Any], place: str) -> None:
    """A table that looks like an instance of a type that is none: Gym would start it, so it is not passed over."""
    for key, group in value.items():
        blocks = group.values() if isinstance(group, dict) else ()
        if any(isinstance(block, dict) and "entrypoint" in block for block in blocks):
            close = difflib.get_close_matches(key, SERVER_TYPES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(SERVER_TYPES)}"
            raise ConfigError(f"{place}: {name}.{key}: unknown server type; {hint}")


def unresolved(block: Any, path: str) -> list[str]:
    """A line for every value in a block that Gym would fill in."""
    if isinstance(block, dict):
        return [line for key, value in block.items() for line in unresolved(value, f"{path}.{key}")]
    if isinstance(block, list):
        return [line for index, value in enumerate(block) for line in unresolved(value, f"{path}.{index}")]
    return [f"{path} = {block!r}: {RESOLVE}"] if isinstance(block, str) and ("${" in block or block == "???") else []


def server_url(text: str) -> str:
    """A model server's `base_url` without OpenAI's /v1, which engines' other routes do not stand under."""
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


# ------------------------------------------------------------------------------------------------------------ YAML


class _Loader(yaml.SafeLoader):
    """YAML as Gym reads it, but for a key that stands twice in a map: one of them would be lost."""


def _construct(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    first: dict[Any, int] = {}
    for key_node, _ in node.value:
        key, line = getattr(key_node, "value", None), key_node.start_mark.line + 1
        if key in first and key_node.tag != "tag:yaml.org,2002:merge":
            file = node.start_mark.name
            raise ConfigError(f"{key} is declared twice: {file}:{first[key]} and {file}:{line}")
        first[key] = line
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct)


def _parsed(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A file's top-level map, and the line of each of its keys."""
    try:
        text = file.read_text()
        loader = _Loader(text)
        loader.name = str(file)
        root = loader.get_single_node()
        tree = {} if root is None else loader.construct_document(root)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{file}: a map of server instances is expected")
    nodes = root.value if isinstance(root, yaml.MappingNode) else []
    return tree, {key.value: key.start_mark.line + 1 for key, _ in nodes}
