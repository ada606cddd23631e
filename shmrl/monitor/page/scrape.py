"""The page's /metrics: what every process of the run says at its unix socket, its engines at their HTTP port, and the
arena, as one Prometheus text. Each sample has the label `process`; asked for when somebody scrapes, and never else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from shmrl.monitor.exposition import families

if TYPE_CHECKING:
    from prometheus_client import Metric

TIMEOUT_S = 8.0  # under the ten seconds that Prometheus itself waits
ARENA = (
    *("used_bytes", "peak_bytes", "committed_bytes", "capacity_bytes", "blocks", "created", "freed", "orphaned"),
    *("orphaned_bytes", "spilled", "spilled_bytes", "waits", "waiting", "oldest_wait_s"),
)
_STALE = "shmrl_arena_"  # of the step's end; the arena itself is asked
_HEADER = re.compile(r"# (?:HELP|TYPE) ([a-zA-Z_:][\w:]*)(?: .*)?", re.ASCII)
_LABELS = r'(?:[a-zA-Z_]\w*="(?:[^"\\]|\\.)*",?)*'
_VALUE = r"[-+]?(?:[\d.]+(?:e[-+]?\d+)?|inf|nan)(?: -?\d+)?"  # and when it was so
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{({_LABELS})\}})? ({_VALUE})", re.ASCII | re.IGNORECASE)
_OWN_LABEL = re.compile(r'(?:^|,)process="')


async def everything(sockets: Path, engines: Sequence[str], arena: Mapping[str, Any]) -> bytes:
    """The text. sockets: the directory of the processes' sockets; engines: base URLs; arena: as `arena.picture` has it.

    shmrl_up says of every socket and engine whether it answered.
    """
    paths = _sockets(sockets)
    local = [_ask("http://process/metrics", path) for path in paths]
    remote = [_ask(f"{url.rstrip('/')}/metrics", None) for url in engines]
    answers = await asyncio.gather(*local, *remote)
    names = [None] * len(paths) + [_engine(number, engines) for number in range(len(engines))]
    return await asyncio.to_thread(_merged, answers, names, arena)


def _sockets(directory: Path) -> list[str]:
    return sorted(map(str, directory.glob("*.sock"))) if directory.is_dir() else []


def _engine(number: int, engines: Sequence[str]) -> str:
    return "inference" if len(engines) == 1 else f"inference:{number}"


async def _ask(url: str, path: str | None) -> str | None:
    """What is answered, or None. path: of the unix socket that is asked instead of a port."""
    connector = aiohttp.UnixConnector(path) if path is not None else None
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(TIMEOUT_S), trust_env=False
            ) as session,
            session.get(url) as reply,
        ):
            return await reply.text() if reply.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):  # the last is a body that is no text
        return None


def _merged(answers: Sequence[str | None], names: Sequence[str | None], arena: Mapping[str, Any]) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import GaugeMetricFamily

    up = GaugeMetricFamily("shmrl_up", "Whether a process of the run answered.", labels=["process"])
    found: dict[str, list[str]] = {}
    for answer, name in zip(answers, names, strict=True):
        process = name or _role(answer or "")
        if process is not None:  # one that died and left its socket has no name to be called by
            up.add_metric([process], float(answer is not None))
        _add(found, answer or "", process or "")
    own: list[Metric] = [up]
    if arena.get("state") == "alive":
        own += families({f"arena/{name}": arena[name] for name in ARENA})
    registry = CollectorRegistry()
    registry.register(_Found(own))
    lines = (line for family in found.values() for line in family)
    return generate_latest(registry) + "".join(f"{line}\n" for line in lines).encode()


def _role(text: str) -> str | None:
    found = re.search(r'^shmrl_process_info\{role="([^"]+)"\} ', text, re.MULTILINE)
    return found and found[1]


def _add(found: dict[str, list[str]], text: str, process: str) -> None:
    """Puts the lines of one process to their families, each sample with the label. A line that is none is left out.

    Lines, not parsed metrics: the parser of prometheus_client takes ten times as long, and an engine has a thousand.
    """
    name, family, is_first = "", [""], False
    for line in text.splitlines():
        if header := _HEADER.fullmatch(line):
            if header[1] != name:
                name, is_first = header[1], header[1] not in found
                family = [] if name.startswith(_STALE) else found.setdefault(name, [])
            if is_first:
                family.append(line)
        elif (sample := _SAMPLE.fullmatch(line)) and sample[1].startswith(name) and name:
            family.append(f"{sample[1]}{{{_labelled(sample[2] or '', process)}}} {sample[3]}")


def _labelled(labels: str, process: str) -> str:
    if _OWN_LABEL.search(labels):
        return labels
    return ",".join(filter(None, (f'process="{process}"', labels)))


class _Found:
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
