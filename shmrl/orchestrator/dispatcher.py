"""The dispatcher: which episode starts next, and when not to start one.

One background task of the orchestrator. An episode needs a permit; groups under way are continued before a fresh one
starts (their shared prompt is warm in the engine's cache); a fresh group's source is drawn by ratio from a generator
seeded by (run seed, group number), so that the number of groups started is all a resumed run has to know.

The staleness gate: a fresh group will be trained in step `target` = the step being collected plus the batches that are
already buffered or under way. Its lag there is at least (target - 1) - served, so it starts only while that is within
max_off_policy_steps. With 0 this is strictly synchronous: nothing of batch n starts before version n-1 serves.

The arena's gate (`admission.py`): a fresh group also starts only if all of it will find room. Where the estimate was
too low and writers wait for space that nobody can give (`relieve`), the youngest group is given up and starts again
later; if there is only one, the arena is too small for the run, which then ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shmrl.arena.memory import human
from shmrl.config import RunTree, TrainSource
from shmrl.config.budget import HIGH
from shmrl.errors import RunError
from shmrl.orchestrator.admission import Admission, Room, Standstill, share_bytes
from shmrl.orchestrator.arenas import Arenas
from shmrl.orchestrator.episodes import Ask, Episodes, Outcome
from shmrl.orchestrator.sinks import Group, TrainSink
from shmrl.orchestrator.sources import Source

log = logging.getLogger(__name__)

STANDSTILL_S = 2.0  # nothing moves for this long and writers wait: something has to give


@dataclass(slots=True, eq=False)
class Running:
    """A group under way: how many of its episodes have their permit, and the requests that run now."""

    group: Group
    started: int = 0
    tasks: dict[asyncio.Task[None], Ask] = field(default_factory=dict)
    failed: int = 0

    @property
    def wanted(self) -> int:
        """Episodes that can still be trained."""
        return self.group.size - self.failed

    @property
    def missing(self) -> int:
        """Episodes that may still write."""
        return self.wanted - len(self.group.results)


class Dispatcher:
    """Keeps episodes of the train sources under way and hands finished groups to the sink.

    `attempt` is a short id of this process's life; it keeps group ids of attempts apart. `on_group` is called after
    every group that left (finished or dropped), and when `failure` is set: something that ends the run. `admission`
    knows what groups of a source take of `arenas`.
    """

    def __init__(
        self,
        tree: RunTree,
        sources: Sequence[Source],
        episodes: Episodes,
        sink: TrainSink,
        attempt: str,
        on_group: Callable[[], None],
        arenas: Arenas,
        admission: Admission,
    ) -> None:
        self.step = 1  # the step whose batch is being collected
        self.served = 0  # the version the engines serve
        self.groups = 0  # groups started since step 1, over all attempts
        self.failure: BaseException | None = None
        self.steps_out = 0  # steps that were cut and are not done: their blocks will come back
        self.retained: Iterable[int] = ()  # steps whose blocks are kept on purpose, whoever waits
        self._tree, self._sources, self._episodes, self._sink = tree, list(sources), episodes, sink
        self._attempt, self._on_group = attempt, on_group
        self._arenas, self._admission = arenas, admission
        self._standstill = Standstill(STANDSTILL_S)
        self._again: deque[Group] = deque()  # given up for want of room; they come first
        self._returned = 0  # requests that ended, one way or another
        self._ratios = [source.config.ratio for source in sources if isinstance(source.config, TrainSource)]
        self._running: list[Running] = []
        self._unfinished: deque[Running] = deque()  # groups with episodes still to start
        self._paused = False
        self._woken = asyncio.Event()

    # --- state of a checkpoint -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Sampler positions, for the checkpoint's orchestrator.json; O(1). Groups under way count as done."""
        return {"groups": self.groups, "positions": {source.name: source.position for source in self._sources}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken; a source that was not there then starts at its beginning."""
        self.groups = int(state["groups"])
        for source in self._sources:
            source.position = int(state["positions"].get(source.name, 0))

    def skip_to(self, number: int) -> None:
        """Groups below `number` were started by an orchestrator before this one: their tasks are not given again."""
        while self.groups < number:
            self._drawn(self.groups).position += 1
            self.groups += 1

    # --- what the loop tells -------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something the gate looks at has changed."""
        self._woken.set()

    def collecting(self, step: int) -> None:
        """The batch of `step` is being collected now: give up running episodes that would be stale in it."""
        self.step = step
        oldest = step - 1 - self._tree.orchestrator.max_off_policy_steps
        for running in list(self._running):
            self._lose(running, [task for task, ask in running.tasks.items() if ask.version < oldest], "stale")
        self.wake()

    def serving(self, version: int) -> None:
        """The engines serve `version`."""
        self.served = version
        self.wake()

    def pause(self) -> None:
        """Start nothing until `resume` (an evaluation is running)."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.wake()

    async def stop(self) -> None:
        """Cancel what is under way and release what came back of unfinished groups."""
        self._paused = True
        tasks = [task for running in self._running for task in running.tasks]
        for running in list(self._running):
            self._drop(running)
        if tasks:
            await asyncio.wait(tasks)

    # --- the gate and the choice ---------------------------------------------------------------------------------

    def _open_gate(self) -> bool:
        """True while a fresh group could still be trained within the allowed lag, and is wanted at all."""
        config, sink = self._tree.orchestrator, self._sink
        ahead = sink.pending + sink.weight(sum(running.wanted for running in self._running))
        target = self.step + int(ahead // sink.batch)
        lag = target - 1 - self.served
        return not self._paused and target <= self._tree.run.max_steps and lag <= config.max_off_policy_steps

    def held_back(self) -> str:
        """Why no fresh group starts now; "" while groups do."""
        if self._paused:
            return "an evaluation runs"
        if self._admission.holding:
            return "groups wait for room in the arena"
        if not self._open_gate():
            return "" if self._running else "what started now would lag too far behind the step in training"
        return "all permits (orchestrator.max_inflight) are taken" if self._episodes.permits.locked() else ""

    async def _next(self) -> Running | None:
        """A group under way with episodes to start, else a fresh one if the gate is open."""
        if self._paused:
            return None
        if self._unfinished:
            return self._unfinished[0]
        if not self._open_gate():
            return None
        source = self._again[0].source if self._again else self._drawn(self.groups)
        return await self._fresh(source) if self._has_room(source) else None

    def _drawn(self, number: int) -> Source:
        """The source of a fresh group, by ratio."""
        draw = random.Random(f"{self._tree.run.seed}/{number}")
        return draw.choices(self._sources, self._ratios)[0]

    async def _fresh(self, source: Source) -> Running:
        if self._again:
            group = self._again.popleft()
        else:
            number, task = self.groups, await source.next_task()
            self.groups += 1
            group = Group(source, f"{self._attempt}-{number}", number, task, source.group_size)
        running = Running(group)
        self._running.append(running)
        self._unfinished.append(running)
        return running

    # --- room in the arena ---------------------------------------------------------------------------------------

    def _room(self) -> Room:
        """In the fullest of the arenas; groups under way are spread evenly over them."""
        pressure = self._arenas.pressure()
        promised = sum(self._episode_bytes(running.group.source) * running.missing for running in self._running)
        ready = self.steps_out > 0 or self._sink.pending >= self._sink.batch
        returning = ready or (not self._running and self._others_read())
        share = -(-promised // pressure["arenas"])
        return Room(pressure["used_bytes"], share, pressure["capacity_bytes"], len(self._running), returning)

    def _episode_bytes(self, source: Source) -> int:
        return self._admission.episode_bytes(source.name)

    def _has_room(self, source: Source) -> bool:
        """Whether a fresh group of `source` may start; the log says when groups begin to wait, and when they go on."""
        room, held = self._room(), self._admission.holding
        nbytes = source.group_size * self._episode_bytes(source)
        admitted = self._admission.admits(nbytes, room)
        if held != self._admission.holding:
            log.info(
                "groups %s: %s of %s used, %d groups under way may write %s, one of %s takes about %s",
                "wait for room in the arena" if self._admission.holding else "start again",
                human(room.used), human(room.capacity), room.groups, human(room.promised), source.name, human(nbytes),
            )  # fmt: skip
        return admitted

    def relieve(self) -> None:
        """Called again and again while a batch is collected and no step is trained. When writers wait, nothing moves
        and nobody reads, only giving up groups makes room: the youngest one that has something to give, and with it the
        even younger ones, which have nothing to lose. The oldest goes on; RunError if it is alone. Writers that may
        spill make their own room."""
        if self._admission.spills:
            return
        state = (self._arenas.moved(), self._returned)
        waiting = bool(self._arenas.pressure()["waiting"])
        if not self._standstill.observe(time.monotonic(), waiting, state) or self._others_read():
            return
        if len(self._running) == 1:
            raise RunError(self._too_small(self._running[0].group))
        others = self._running[1:]
        giving = [index for index, running in enumerate(others) if running.group.results]
        for running in reversed(others[giving[-1] if giving else 0 :]):
            self._requeue(running)

    def _others_read(self) -> bool:
        """Whether a step's blocks are still there though nobody retains them (a rank that lags behind): they will come
        back without our doing."""
        retained = {str(step) for step in self.retained}
        return any(step and step not in retained for step in self._arenas.steps())

    def _requeue(self, running: Running) -> None:
        """Give a group up for now. It gets another id, because its blocks may still be on their way out."""
        group, room = running.group, self._room()
        log.warning(
            "no room in the arena for the %d groups under way: %s of %s used, and writers wait; group %s is given up "
            "with %d of %d episodes done, and starts again later",
            room.groups, human(room.used), human(room.capacity), group.id, len(group.results), group.size,
        )  # fmt: skip
        name, _, times = group.id.partition(".")
        self._drop(running)
        self._again.appendleft(replace(group, id=f"{name}.{int(times or 0) + 1}", results=[]))
        self._episodes.requeued += 1

    def _too_small(self, group: Group) -> str:
        room, sink = self._room(), self._sink
        episode = self._episode_bytes(group.source)
        batch = int(sink.batch / sink.weight(1)) * episode
        need = max(batch, group.size * episode, room.used + room.promised)
        return (
            f"the arena is too small: group {group.id} of source {group.source.name!r} cannot be finished. Its "
            f"{group.size} episodes take about {human(group.size * episode)}, {human(room.used)} of "
            f"{human(room.capacity)} are used, {sink.waiting_groups} finished groups wait for the rest of their batch "
            f"(about {human(batch)} in all), and no step is being trained that would give any back. Set arena.capacity "
            f"to {human(int(need / HIGH))} or more, or lower orchestrator.batch_size, orchestrator.group_size"
            f"{', arena.retain_steps' if self._tree.arena.retain_steps else ''} or orchestrator.seq_len, or let what "
            "does not fit go to a disk: arena.on_full = 'spill' with arena.spill_dir"
        )

    # --- running -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start episodes for ever; cancelled by the loop at the end. Raises what a source's task set raised."""
        while True:
            await self._episodes.permits.acquire()
            running = await self._next()
            if running is None or self._paused:
                self._episodes.permits.release()
                await self._woken.wait()
                self._woken.clear()
            else:
                self._start(running)
                await asyncio.sleep(0)  # a thousand starts in one turn would keep replies waiting

    def _start(self, running: Running) -> None:
        """The next episode of a group has its permit: ask for it, or for the whole group once it has all of them."""
        group = running.group
        running.started += 1
        if running.started == group.size:
            self._unfinished.remove(running)
        if not group.source.scores_groups:
            self._ask(running, range(running.started - 1, running.started))
        elif running.started == group.size:
            self._ask(running, range(group.size))

    def _ask(self, running: Running, indices: range) -> None:
        group = running.group
        seeds = tuple(group.source.seed("train", group.number, index) for index in indices)
        ask = Ask(group.source, group.task, group.id, indices.start, seeds, "train", self.served)
        task = asyncio.create_task(self._run(running, ask))
        task.add_done_callback(partial(self._ended, ask))
        running.tasks[task] = ask

    async def _run(self, running: Running, ask: Ask) -> None:
        """One request of a group. Whoever cancels this task records its episodes' outcome."""
        try:
            results = await self._episodes.run(ask)
        finally:
            running.tasks.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        good = [result for result in results if result.success]
        running.group.results += good
        together = [sample for result in running.group.results for sample in result.samples]
        for result in good:
            self._admission.saw(ask.source.name, share_bytes(result.samples, together, running.group.size))
        running.failed += len(results) - len(good)
        self._settle(running)

    def _ended(self, ask: Ask, task: asyncio.Task[None]) -> None:
        """The permits come back here: of a task that was cancelled before it began, nothing ran. An episode's own
        failure is data by now; what is raised here ends the run."""
        for _ in ask.seeds:
            self._episodes.permits.release()
        self._returned += 1
        self.wake()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The run cannot go on."""
        self.failure = self.failure or error
        self._on_group()

    def _settle(self, running: Running) -> None:
        """Hand the group on when its last episode is in, drop it when too few can be compared."""
        if running not in self._running:
            return
        if running.wanted < min(2, running.group.size):
            left, size = running.wanted, running.group.size
            log.info("group %s: dropped, as %d of its %d episodes can still count", running.group.id, left, size)
            self._drop(running)
            self._episodes.group_ended(running.failed, kept=False)
        elif running.started == running.group.size and not running.tasks:
            self._running.remove(running)
            self._episodes.group_ended(running.failed, kept=True)
            self._sink.add(running.group)
            self._episodes.group_left(running.group.source, running.group.id)
            self._on_group()

    def _lose(self, running: Running, tasks: Sequence[asyncio.Task[None]], outcome: Outcome) -> None:
        """Cancel some episodes of a group; it goes on without them if it can."""
        for task in tasks:
            count = len(running.tasks.pop(task).seeds)
            task.cancel()
            running.failed += count
            self._episodes.end(outcome, count)
        if tasks:
            self._settle(running)

    def give_up_lost(self) -> None:
        """A node is lost: what came from there of groups under way is as good as failed."""
        for running in list(self._running):
            lost = self._sink.take_lost(running.group)
            running.failed += lost
            if lost:
                self._settle(running)
        self.wake()

    def _drop(self, running: Running) -> None:
        """Give the whole group up: cancel what runs, release what came."""
        self._running.remove(running)
        if running in self._unfinished:
            self._unfinished.remove(running)
        for task, ask in running.tasks.items():
            task.cancel()
            self._episodes.end("cancelled", len(ask.seeds))
        running.tasks.clear()
        self._sink.discard(running.group)
        self._episodes.group_left(running.group.source, running.group.id)
        self._on_group()
