"""Adoption: what an orchestrator that died left in the arenas becomes its successor's, or is freed; never both.

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
from typing import Any

from shmrl.errors import LostPayload
from shmrl.node.holdings import Found
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.shipped import ShippedSteps
from shmrl.orchestrator.sinks import Group, TrainSink
from shmrl.orchestrator.sources import Source
from shmrl.types import EpisodeResult, Handle, Task

log = logging.getLogger(__name__)

_GROUP = re.compile(r"[0-9a-f]+-(\d+)(\.\d+)?")
Episodes = dict[int, list[Found]]
"""The blocks of a group's episodes, by the episode's number in the group."""


async def adopt(
    arenas: Arenas, run: str, sources: Iterable[Source], ledger: Ledger, sink: TrainSink, shipped: ShippedSteps
) -> int:
    """Hold the shipped steps, hand finished groups to the sink, free the rest; how many groups were ever started, as
    far as blocks tell."""
    for step in shipped:
        await ledger.resume(step, shipped[step].micro_batches)
    train = {source.name: source for source in sources if source.split == "train"}
    groups, free = _unshipped(await arenas.find(run), train, ledger)
    adopted = 0
    for (name, group_id), episodes in sorted(groups.items(), key=lambda item: number_of(item[0][1])):
        group = _group(train[name], group_id, episodes)
        if group is not None and await _adopted(ledger, run, group):
            sink.add(group)
            adopted += 1
        else:
            free += [found.handle for blocks in episodes.values() for found in blocks]
    free = [handle for handle in free if handle not in ledger.open()]  # what adopted branches share is theirs
    gone = await arenas.adopt(free)  # with a lost sibling
    arenas.free([handle for handle in free if handle not in gone])
    log.info("adopted %d groups that were finished and not shipped; freed %d blocks of others", adopted, len(free))
    return 1 + max((number_of(group_id) for _, group_id in groups), default=-1)


def number_of(group_id: str) -> int:
    """The number in a train group's id. Example: number_of("a3f1-17.2") == 17"""
    match = _GROUP.fullmatch(group_id)
    assert match is not None
    return int(match[1])


def _unshipped(
    blocks: Iterable[Found], train: dict[str, Source], ledger: Ledger
) -> tuple[dict[tuple[str, str], Episodes], list[Handle]]:
    """(blocks of train groups that no shipped step holds, by source and group id; blocks of anything else)."""
    held = ledger.open()
    groups: dict[tuple[str, str], Episodes] = defaultdict(lambda: defaultdict(list))
    others: list[Handle] = []
    for found in blocks:
        parts = found.row["tag"].split("/")
        if found.row["state"] != "ready" or found.handle in held:
            continue
        of_train = len(parts) == 4 and parts[1] in train and _GROUP.fullmatch(parts[2]) and parts[3].isdigit()
        if of_train and found.sample is not None:  # not what branches share: that comes with them
            groups[parts[1], parts[2]][int(parts[3])].append(found)
        else:
            others.append(found.handle)
    return groups, others


def _group(source: Source, group_id: str, episodes: Episodes) -> Group | None:
    """The group as it would have been handed to the sink, None if an episode is missing or does not say what it is."""
    if sorted(episodes) != list(range(source.group_size)):
        return None
    results = [result for index in range(source.group_size) if (result := _result(episodes[index]))]
    if len(results) < source.group_size:
        return None
    task = Task(results[0].task_id, {})
    return Group(source, group_id, number_of(group_id), task, source.group_size, results)


def _result(blocks: Sequence[Found]) -> EpisodeResult | None:
    """The episode of these branches; None if no header has its task, reward and versions."""
    ordered = sorted(blocks, key=lambda found: (found.meta or {}).get("branch", 0))
    metas: list[dict[str, Any]] = [found.meta or {} for found in ordered]
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
        samples=tuple(found.sample for found in ordered if found.sample is not None),
    )


async def _adopted(ledger: Ledger, run: str, group: Group) -> bool:
    """Take every block of the group; if one is lost, none."""
    taken: list[EpisodeResult] = []
    for index, result in enumerate(group.results):
        try:
            await ledger.adopt(result.samples, f"{run}/{group.source.name}/{group.id}/{index}")
        except LostPayload as error:
            log.warning("group %s is not adopted: %s", group.id, error)
            for other in taken:
                ledger.release(other.samples)
            return False
        taken.append(result)
    return True
