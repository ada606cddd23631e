"""Sinks: where finished episodes go. The train sink scores groups and cuts batches; the evaluation releases everything.

Both stand on the run's ledger and live in the orchestrator's process. An episode that reaches the train sink ends as
shipped, filtered (zero advantage, nothing to train, its group dropped) or stale; its blocks are released on the spot
unless it ships.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shmrl.config import EvalSource, RunTree
from shmrl.errors import RunError
from shmrl.orchestrator import advantages
from shmrl.orchestrator.episodes import Ask, Episodes
from shmrl.orchestrator.ledger import Ledger
from shmrl.orchestrator.sources import Source
from shmrl.orchestrator.together import together
from shmrl.types import EpisodeResult, Sample, Task

log = logging.getLogger(__name__)

ZERO = 1e-9  # advantages this small come from rounding the mean of equal rewards
BARREN_BATCHES = 10
SOLVED = 1.0 - 1e-9
KNOWN_TASKS = 1 << 16  # whose running mean is kept; of those the ones that came up last


@dataclass(slots=True, eq=False)
class Group:
    """Episodes of one task, scored together. `results` are the successful ones, their blocks held by the ledger.

    Example: Group(source, id="a3f1-17", number=17, task=Task("17", {...}), size=8, results=[...])
    """

    source: Source
    id: str
    number: int
    task: Task
    size: int
    results: list[EpisodeResult] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Scored:
    """One scored episode: `samples` carry its advantage, and are empty once there is nothing to train in it."""

    source: str
    group_id: str
    result: EpisodeResult
    advantage: float
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class Batch:
    """What one step trains: the episodes that were scored for it, pruned ones included (they count in the reward)."""

    step: int
    episodes: list[Scored]

    @property
    def samples(self) -> list[Sample]:
        return [sample for episode in self.episodes for sample in episode.samples]

    @property
    def kept(self) -> list[Scored]:
        """The episodes that ship."""
        return [episode for episode in self.episodes if episode.samples]


class TrainSink:
    """Buffers scored groups until a batch of episodes (or of tokens) is together.

    `batch` and `pending` are in one unit: episodes, or tokens where `token_batch_size` is set; `weight(n)` estimates n
    episodes in it.
    """

    def __init__(self, tree: RunTree, ledger: Ledger, episodes: Episodes) -> None:
        config = tree.orchestrator
        self.batch = config.batch_size or config.token_batch_size or 0
        self._by_tokens = config.batch_size is None
        self._nominal = config.batch_size or config.inflight
        self._tree, self._ledger, self._episodes = tree, ledger, episodes
        self._advantages = advantages.load(tree)
        self._buffer: deque[list[Scored]] = deque()
        self._seen_episodes = self._seen_tokens = 0
        self._barren = 0  # scored episodes since one had something to train
        self._rewards: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()  # task -> episodes, sum

    # --- units ---------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """What is buffered, in the batch's unit."""
        return sum(self._size(episodes) for episodes in self._buffer)

    def by_source(self) -> dict[str, int]:
        """What is buffered of each source, in the batch's unit."""
        found: dict[str, int] = {}
        for episodes in self._buffer:
            found[episodes[0].source] = found.get(episodes[0].source, 0) + self._size(episodes)
        return found

    @property
    def waiting_groups(self) -> int:
        """Finished groups that are buffered."""
        return len(self._buffer)

    def weight(self, episodes: int) -> float:
        """How much `episodes` more will add to `pending`: their count, or tokens by the mean seen so far."""
        if not self._by_tokens:
            return float(episodes)
        mean = self._seen_tokens / self._seen_episodes if self._seen_tokens else self._tree.orchestrator.seq_len
        return episodes * mean

    def _size(self, episodes: Sequence[Scored]) -> int:
        if self._by_tokens:
            return sum(sample.T for episode in episodes for sample in episode.samples)
        return len(episodes)

    # --- in ------------------------------------------------------------------------------------------------------

    def add(self, group: Group) -> None:
        """Score a finished group, release what is not worth a gradient, buffer the rest. RunError: fields missing."""
        for result in group.results:
            self._require_fields(group.source, result)
        rewards = [result.reward for result in group.results]
        lengths = [sum(sample.S for sample in result.samples) for result in group.results]
        wanted = self._wanted(group, rewards)
        scored = [
            self._scored(group, result, advantage, wanted)
            for result, advantage in zip(group.results, self._advantages(rewards, lengths), strict=True)
        ]
        self._buffer.append(scored)
        self._seen_episodes += len(scored)
        self._seen_tokens += sum(sample.T for episode in scored for sample in episode.samples)
        self._watch_barren(scored)

    def discard(self, group: Group) -> None:
        """A group that cannot be scored: its finished episodes are filtered and their blocks released."""
        for result in group.results:
            self._ledger.release(result.samples)
        self._episodes.end("filtered", len(group.results))
        group.results.clear()

    def take_lost(self, group: Group) -> int:
        """Drop the episodes of a group under way whose blocks were lost with their node; how many. They have failed."""
        lost = [result for result in group.results if any(map(self._ledger.is_lost, result.samples))]
        for result in lost:
            self._ledger.release(result.samples)
            group.results.remove(result)
        self._episodes.end("failed", len(lost))
        return len(lost)

    def drop_lost_of(self, episodes: list[Scored]) -> int:
        """The same for scored episodes that have something to train."""
        lost = [episode for episode in episodes if any(map(self._ledger.is_lost, episode.samples))]
        for episode in lost:
            self._ledger.release(episode.samples)
            episodes.remove(episode)
        self._episodes.end("failed", len(lost))
        return len(lost)

    def drop_lost(self) -> int:
        """The same for all that are buffered."""
        dropped = sum(map(self.drop_lost_of, self._buffer))
        self._buffer = deque(episodes for episodes in self._buffer if episodes)
        return dropped

    def _wanted(self, group: Group, rewards: Sequence[float]) -> bool:
        """Whether the group's task is neither too hard nor too easy, by all of its rewards so far."""
        if (limits := self._tree.orchestrator.filters.difficulty) is None or not rewards:
            return True
        task = (group.source.name, group.task.id)
        count, total = self._rewards.pop(task, (0, 0.0))
        count, total = count + len(rewards), total + math.fsum(rewards)
        self._rewards[task] = count, total
        if len(self._rewards) > KNOWN_TASKS:
            self._rewards.popitem(last=False)
        return limits[0] - ZERO <= total / count <= limits[1] + ZERO

    def _scored(self, group: Group, result: EpisodeResult, advantage: float, wanted: bool) -> Scored:
        samples: tuple[Sample, ...] = ()
        filters = self._tree.orchestrator.filters
        flat = filters.zero_advantage and abs(advantage) < ZERO
        low, high = filters.advantage_range or (math.inf, -math.inf)
        if flat or not wanted or low <= advantage <= high:
            self._ledger.release(result.samples)
        else:
            samples = self.fitted(result.samples, advantage)
        if not samples:
            self._episodes.end("filtered")
        return Scored(group.source.name, group.id, result, advantage, samples)

    def fitted(self, samples: Sequence[Sample], advantage: float) -> tuple[Sample, ...]:
        """The samples with their advantage, cut to seq_len; those with no sampled token left are released."""
        kept = []
        for sample in samples:
            longest = self._tree.orchestrator.seq_len
            self._episodes.truncated += longest < sample.T
            fits = self._ledger.cut(sample, min(sample.T, longest))
            if fits.S and fits.T:
                kept.append(replace(fits, advantage=advantage))
            else:
                self._ledger.release([fits])
        return tuple(kept)

    def _require_fields(self, source: Source, result: EpisodeResult) -> None:
        """A field the trainer replays must be there: training on without it would bias every ratio silently."""
        needed = [name for name in self._tree.captured if name != "mask" or source.config.sampling.truncated]
        for sample in result.samples:
            missing = [name for name in needed if name not in sample.fields]
            if sample.S and missing:
                raise RunError(
                    f"source {source.name!r}: a sample of task {result.task_id} (T = {sample.T}, S = {sample.S}) "
                    f"came without {', '.join(missing)}; it has {', '.join(sample.fields) or 'no fields'}. The engine "
                    "must return what trainer.router_replay, trainer.head and trainer.sampling_replay ask for"
                )

    def _watch_barren(self, scored: Sequence[Scored]) -> None:
        self._barren = 0 if any(episode.samples for episode in scored) else self._barren + len(scored)
        if self._barren >= BARREN_BATCHES * self._nominal:
            raise RunError(f"{self._barren} episodes in a row had nothing to train: {_why_barren(scored[-1])}")

    # --- out -----------------------------------------------------------------------------------------------------

    def cut(self, step: int) -> Batch | None:
        """The batch of `step` if it is together. Episodes too old for it are voided first; groups stay whole."""
        self._drop_stale(step)
        while self.pending >= self.batch:
            batch = Batch(step, [])
            size = 0
            while size < self.batch:
                episodes = self._buffer.popleft()
                size += self._size(episodes)
                batch.episodes += episodes
            if batch.kept:
                return batch
            log.warning(
                "step %d: none of %d episodes had anything to train; collecting again", step, len(batch.episodes)
            )
        return None

    def shipped(self, batch: Batch) -> None:
        """The batch goes out: the outcome of its episodes."""
        self._episodes.end("shipped", len(batch.kept))

    def _drop_stale(self, step: int) -> None:
        """Lag = the version trained on (step - 1) minus the version at the episode's first generated token."""
        oldest = step - 1 - self._tree.orchestrator.max_off_policy_steps
        for episodes in self._buffer:
            for episode in episodes:
                if episode.samples and episode.result.version_start < oldest:
                    self._ledger.release(episode.samples)
                    self._episodes.end("stale")
            episodes[:] = [episode for episode in episodes if episode.result.version_start >= oldest]
        self._buffer = deque(episodes for episodes in self._buffer if episodes)

    def give_up(self, episodes: Sequence[Scored]) -> None:
        """These will not ship, because the run ends: release them; their outcome is cancelled."""
        for episode in episodes:
            if episode.samples:
                self._ledger.release(episode.samples)
                self._episodes.end("cancelled")

    def close(self) -> None:
        """Give up what is buffered."""
        while self._buffer:
            self.give_up(self._buffer.popleft())


def _why_barren(last: Scored) -> str:
    """What kept these episodes from being trained, seen at the last one."""
    if not any(sample.S for sample in last.result.samples):
        return "nothing was sampled in them; look at the engine's answers and at the environment's calls of the model"
    return (
        f"every group's rewards were equal, or orchestrator.filters leave none of them (the last reward: "
        f"{last.result.reward:g}, its advantage {last.advantage:g}); harder tasks, another reward or wider filters"
    )


# ------------------------------------------------------------------------------------------------------- evaluation


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """Unbiased chance that one of k draws is solved (reward 1), of n rollouts with c solved: 1 - C(n-c,k)/C(n,k)."""
    n, solved = len(rewards), sum(reward >= SOLVED for reward in rewards)
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


class EvalSink:
    """Runs one source's evaluation and keeps its scores only: every payload is released as it arrives."""

    def __init__(self, source: Source, ledger: Ledger, episodes: Episodes, attempt: str) -> None:
        self._source, self._ledger, self._episodes, self._attempt = source, ledger, episodes, attempt
        self._tasks: list[Task] = []

    @property
    def config(self) -> EvalSource:
        config = self._source.config
        assert isinstance(config, EvalSource)
        return config

    async def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of this source at policy version `step`: mean reward over successes, pass@k, failures."""
        self._tasks = self._tasks or await self._source.first_tasks(self.config.num_examples)
        asks = [ask for number in range(len(self._tasks)) for ask in self._asks(step, number)]
        replies = await together(*[self._rewards(ask) for ask in asks])
        rows: dict[str, list[float]] = {ask.group_id: [] for ask in asks}
        for ask, rewards in zip(asks, replies, strict=True):
            rows[ask.group_id] += rewards
        return self._metrics(list(rows.values()))

    def _asks(self, step: int, number: int) -> list[Ask]:
        """The requests for one example: one per rollout, or one for all where the environment scores groups."""
        group_id, task = f"{self._attempt}-e{step}.{number}", self._tasks[number]
        seeds = tuple(self._source.seed("eval", number, i) for i in range(self.config.rollouts_per_example))
        if self._source.scores_groups:
            return [Ask(self._source, task, group_id, 0, seeds, "eval", step)]
        return [Ask(self._source, task, group_id, i, (seed,), "eval", step) for i, seed in enumerate(seeds)]

    async def _rewards(self, ask: Ask) -> list[float]:
        """Rewards of a request's successes, under one permit."""
        async with self._episodes.permits:
            results = await self._episodes.run(ask)
        good = [result for result in results if result.success]
        for result in good:
            self._ledger.release(result.samples)
        return [result.reward for result in good]

    def _metrics(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        prefix, n = f"eval/{self._source.name}", self.config.rollouts_per_example
        rewards = [reward for row in rows for reward in row]
        found = {f"{prefix}/failed": float(len(rows) * n - len(rewards))}
        if rewards:
            found[f"{prefix}/reward"] = math.fsum(rewards) / len(rewards)
        full = [row for row in rows if len(row) == n]
        for k in (2**power for power in range(n.bit_length())):
            if full:
                found[f"{prefix}/pass@{k}"] = math.fsum(pass_at(k, row) for row in full) / len(full)
        return found
