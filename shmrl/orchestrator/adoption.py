"""Adoption: what an orchestrator that died left in the arena becomes its successor's, or is freed; never both.

Runs once in a restarted orchestrator, after the env servers have ended whatever its predecessor had asked for, so that
nobody else frees or writes blocks of the run any more. Blocks of shipped steps are held as they were. A group whose
episodes are all there, finished and not shipped, is read off their headers and scored again; a group of which one is
missing is not: those that are done first are the short ones. Everything else is freed.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shmrl.errors import ArenaError, LostPayload, PayloadError
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.shipped import ShippedSteps
from shmrl.orchestrator.sinks import Group, TrainSink
from shmrl.orchestrator.sources import Source
from shmrl.payload import Header, read_header
from shmrl.types import EpisodeResult, Handle, Task

if TYPE_CHECKING:
    from shmrl.arena import Arena

log = logging.getLogger(__name__)

_GROUP = re.compile(r"[0-9a-f]+-(\d+)(\.\d+)?")
Episodes = dict[int, list[tuple[Handle, Header]]]
"""The blocks of a group's episodes, by the episode's number in the group."""


def adopt(
    arena: Arena, run: str, sources: Iterable[Source], ledger: Ledger, sink: TrainSink, shipped: ShippedSteps
) -> int:
    """Hold the shipped steps, hand finished groups to the sink, free the rest; how many groups were ever started, as
    far as blocks tell."""
    for step in shipped:
        ledger.resume(step, shipped[step].micro_batches)
    train = {source.name: source for source in sources if source.split == "train"}
    groups, free = _unshipped(arena, run, train, ledger)
    adopted = 0
    for (name, group_id), episodes in sorted(groups.items(), key=lambda item: number_of(item[0][1])):
        blocks = [handle for blocks in episodes.values() for handle, _ in blocks]
        group = _group(train[name], group_id, episodes)
        if group is not None and _adopted(ledger, run, group):
            sink.add(group)
            adopted += 1
        else:
            free += blocks
    free = [handle for handle in free if handle not in ledger.open()]  # what adopted branches share is theirs
    for handle in free:
        with suppress(ArenaError):  # gone with a lost sibling
            arena.adopt([handle])
            arena.free([handle])
    log.info("adopted %d groups that were finished and not shipped; freed %d blocks of others", adopted, len(free))
    return 1 + max((number_of(group_id) for _, group_id in groups), default=-1)


def number_of(group_id: str) -> int:
    """The number in a train group's id. Example: number_of("a3f1-17.2") == 17"""
    match = _GROUP.fullmatch(group_id)
    assert match is not None
    return int(match[1])


def _unshipped(
    arena: Arena, run: str, train: dict[str, Source], ledger: Ledger
) -> tuple[dict[tuple[str, str], Episodes], list[Handle]]:
    """(blocks of train groups that no shipped step holds, by source and group id; blocks of anything else)."""
    held = ledger.open()
    groups: dict[tuple[str, str], Episodes] = defaultdict(lambda: defaultdict(list))
    others: list[Handle] = []
    for row in arena.ls():
        handle, parts = Handle.parse(row["handle"]), row["tag"].split("/")
        if parts[0] != run or row["state"] != "ready" or handle in held:
            continue
        header = _header(arena, handle)
        of_train = len(parts) == 4 and parts[1] in train and _GROUP.fullmatch(parts[2]) and parts[3].isdigit()
        if of_train and header and "branch" in header.meta:  # not what branches share: that comes with them
            groups[parts[1], parts[2]][int(parts[3])].append((handle, header))
        else:
            others.append(handle)
    return groups, others


def _header(arena: Arena, handle: Handle) -> Header | None:
    try:
        return read_header(arena, handle)
    except (LostPayload, PayloadError):
        return None


def _group(source: Source, group_id: str, episodes: Episodes) -> Group | None:
    """The group as it would have been handed to the sink, None if an episode is missing or does not say what it is."""
    if sorted(episodes) != list(range(source.group_size)):
        return None
    results = [result for index in range(source.group_size) if (result := _result(episodes[index]))]
    if len(results) < source.group_size:
        return None
    task = Task(results[0].task_id, {})
    return Group(source, group_id, number_of(group_id), task, source.group_size, results)


def _result(blocks: Sequence[tuple[Handle, Header]]) -> EpisodeResult | None:
    """The episode of these branches; None if no header has its task, reward and versions."""
    ordered = sorted(blocks, key=lambda block: block[1].meta.get("branch", 0))
    metas: list[dict[str, Any]] = [header.meta for _, header in ordered]
    versions = [(meta["version_start"], meta["version_end"]) for meta in metas if "version_start" in meta]
    if not versions or not {"task", "reward"} <= metas[0].keys():
        return None
    return EpisodeResult(
        success=True,
        task_id=metas[0]["task"],
        reward=metas[0]["reward"],
        rewards=metas[0].get("rewards", {}),
        stop_reason=metas[0].get("stop_reason", ""),
        version_start=min(first for first, _ in versions),
        version_end=max(last for _, last in versions),
        samples=tuple(header.sample(handle) for handle, header in ordered),
    )


def _adopted(ledger: Ledger, run: str, group: Group) -> bool:
    """Take every block of the group; if one is lost, none."""
    taken: list[EpisodeResult] = []
    for index, result in enumerate(group.results):
        try:
            ledger.adopt(result.samples, f"{run}/{group.source.name}/{group.id}/{index}")
        except LostPayload as error:
            log.warning("group %s is not adopted: %s", group.id, error)
            for other in taken:
                ledger.release(other.samples)
            return False
        taken.append(result)
    return True
