"""`StepBlocks`: the blocks of a step as one rank can read them, those of its own node in place, others after a fetch.

Called by the trainer before a step's first `assemble` and after the ranks have agreed. A run whose blocks are all in
the rank's own arena passes through without a thread, a connection or a copy of anything.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shmrl.arena import Arena
from shmrl.config.host import ArenaConfig, NodeConfig
from shmrl.errors import RunError
from shmrl.node.client import Client
from shmrl.node.copies import Copies, RemoteCopies
from shmrl.types import Handle, MicroBatch, Sample

log = logging.getLogger(__name__)

WAIT_S = 10.0  # one look at what has arrived; well below what a connection may be silent


class StepBlocks:
    """Makes the blocks of micro batches readable for rank `reader`, and lets go of them.

    config, node: the run's tables. token: the run's, or None (nothing can be fetched).
    """

    def __init__(self, arena: Arena, reader: int, config: ArenaConfig, node: NodeConfig, token: str | None) -> None:
        self._arena, self._reader, self._config, self._node, self._token = arena, reader, config, node, token
        self._copies: Copies | RemoteCopies | None = None
        self._telling: defaultdict[str, ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1, "shmrl-done"))
        self._seen: set[str] = set()
        self._nodes: dict[str, str] = {}

    def here(self, micro_batches: Sequence[MicroBatch], nodes: Mapping[str, str]) -> list[MicroBatch]:
        """The same micro batches, with handles that this rank can read; blocks of other nodes are fetched at once.

        nodes: the url of each node's server by `Handle.origin`, "" of one that is lost: nobody waits for it. A block
        that cannot be had keeps its handle, of which `assemble` says that it is lost. RunError where arena.transport =
        "required" forbids it, or nothing serves it.
        """
        foreign = self._foreign(micro_batches)
        if not foreign:
            return list(micro_batches)
        self._nodes |= {origin: url for origin, url in nodes.items() if url}
        lost = {origin for origin, url in nodes.items() if not url}
        for origin in {handle.origin for handle in foreign} - lost - self._seen:
            self._meet(origin)
        found: dict[Handle, Handle] = {}
        missing = [handle for handle in foreign if handle.origin not in lost]
        if len(missing) < len(foreign):
            log.error("%d blocks are not fetched: their nodes are lost", len(foreign) - len(missing))
        while missing:
            outcomes = self._source().want(missing, self._nodes, self._reader, WAIT_S)
            for handle, outcome in outcomes.items():
                if isinstance(outcome, Handle):
                    found[handle] = outcome
                else:
                    log.error("block %r was not fetched: %s: %s", handle, type(outcome).__name__, outcome)
            missing = [handle for handle in missing if handle not in outcomes]
        return [moved(micro_batch, found) for micro_batch in micro_batches]

    def _foreign(self, micro_batches: Sequence[MicroBatch]) -> list[Handle]:
        own = self._arena.origin
        handles = dict.fromkeys(handle for micro_batch in micro_batches for handle in micro_batch.handles)
        return [handle for handle in handles if handle.origin != own]

    def _meet(self, origin: str) -> None:
        """The first block of another node: says how its blocks will come, or refuses."""
        if self._config.transport == "required":
            raise RunError(
                f"blocks of {origin} are not in this rank's arena ({self._arena.origin}), and arena.transport = "
                "'required' allows shared memory alone"
            )
        if origin not in self._nodes or self._token is None:
            missing = "no node server is known for it" if self._token is not None else "this rank has no token"
            raise RunError(f"blocks of {origin} are not in this rank's arena ({self._arena.origin}): {missing}")
        through = f"this node's server at {self._node.url}" if self._node.url else "this rank itself"
        log.info("transport of %s: http from %s, fetched by %s", origin, self._nodes[origin], through)
        self._seen.add(origin)

    def _source(self) -> Copies | RemoteCopies:
        if self._copies is None:
            assert self._token is not None
            client = Client(self._token, ca=self._node.ca)
            if self._node.url:
                self._copies = RemoteCopies(client, self._node.url)
            else:
                self._copies = Copies(self._arena, client, whose=str(self._reader))
        return self._copies

    def done(self, micro_batches: Sequence[MicroBatch]) -> None:
        """This rank needs the blocks of the micro batches, as they were given to here(), no more. Waits for no other
        node: what is told there is told in the background, to each on its own."""
        foreign = self._foreign(micro_batches)
        handles = {handle for micro_batch in micro_batches for handle in micro_batch.handles}
        self._arena.done(list(handles.difference(foreign)), reader=self._reader)
        for origin in {handle.origin for handle in foreign}.intersection(self._nodes):
            theirs = [handle for handle in foreign if handle.origin == origin]
            self._telling[origin].submit(self._tell, theirs)

    def _tell(self, handles: list[Handle]) -> None:
        try:
            self._source().done(handles, self._nodes, self._reader)
        except Exception:
            log.exception("it could not be told that %d blocks are done", len(handles))

    def close(self) -> None:
        """Waits until everything is told, then lets go of the connections."""
        for telling in self._telling.values():
            telling.shutdown()
        if self._copies is not None:
            self._copies.close()


def moved(micro_batch: MicroBatch, found: Mapping[Handle, Handle]) -> MicroBatch:
    """The micro batch with the copies' handles."""
    if not any(handle in found for handle in micro_batch.handles):
        return micro_batch
    return replace(micro_batch, samples=tuple(_moved_sample(sample, found) for sample in micro_batch.samples))


def _moved_sample(sample: Sample, found: Mapping[Handle, Handle]) -> Sample:
    segments = ((found.get(handle, handle), start, stop) for handle, start, stop in sample.segments)
    return replace(sample, segments=tuple(segments))
