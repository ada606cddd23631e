"""The orchestrator's process, from connecting to the last checkpoint: `main(tree, resume)` is the role's entry point.

Order: bind for the ranks, attach the arena, reach every env server, the engines and the ranks in parallel; warm up;
`begin` (the ranks publish the version to start from, the engines take it up); then steps. While the ranks train step
n - `_train`, a task - the batch of step n + 1 is collected as far as the staleness gate allows. An evaluation runs
between a step's publication and its report line, with nothing else changing the weights.

An orchestrator that comes after one that died (`--resume`, with the same arena and living ranks) takes over instead of
beginning: what is in the arena is adopted or freed, a step that was shipped is awaited, and the next one is collected.

Nothing is spawned here. The first SIGINT or SIGTERM drains: the step being trained is finished, everything else
released, the ranks told to checkpoint; the exit code is 130 or 143 then. The second one, or one before the first step,
stops at once: the process releases what it holds and dies of the signal, so that a launcher can tell the two apart.
0 is returned only if all steps are done, the ledger is empty and the arena holds no block of this run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from shmrl import wire
from shmrl.arena import Arena, render
from shmrl.config import RunTree
from shmrl.config.budget import bytes_per_token, longest_episode
from shmrl.config.shape import model_shape
from shmrl.env.client import EnvClient
from shmrl.errors import RunError, ServerDied
from shmrl.inference.client import EngineClient
from shmrl.monitor import exposition
from shmrl.monitor.metrics import LoopLag
from shmrl.node.client import Client
from shmrl.node.host import read_token, require_arena
from shmrl.orchestrator.admission import Admission
from shmrl.orchestrator.adoption import adopt
from shmrl.orchestrator.arenas import Arenas, Node
from shmrl.orchestrator.dispatcher import Dispatcher
from shmrl.orchestrator.episodes import Episodes
from shmrl.orchestrator.ledger import Hold, Ledger
from shmrl.orchestrator.link import TrainerLink
from shmrl.orchestrator.policy import Policy
from shmrl.orchestrator.replicas import Place, Replica, places
from shmrl.orchestrator.report import StepReport
from shmrl.orchestrator.shipped import ShippedStep, ShippedSteps
from shmrl.orchestrator.sinks import Batch, EvalSink, TrainSink
from shmrl.orchestrator.sources import Source
from shmrl.orchestrator.together import reach, together
from shmrl.orchestrator.waiting import Waiting
from shmrl.orchestrator.warmup import WarmUp
from shmrl.payload import micro_batches_to_wire, pack
from shmrl.types import Handle, MicroBatch, Sample

log = logging.getLogger(__name__)

FAILED_BATCHES = 3
SETTLE_S = 10.0
FLUSH_S = 10.0  # what other nodes are still to be told at the end
LEAKS = 20  # blocks that are named when a run leaves some
RELIEF_S = 0.25  # how often a batch that is being collected looks at the arena


def main(tree: RunTree, resume: bool = False) -> int:
    """Run the orchestrator; 0, or 130 / 143 after a drain. Raises ShmrlError when the run cannot go on."""
    code = asyncio.run(_run(tree, resume))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    return code


async def _run(tree: RunTree, resume: bool) -> int:
    """0, or 128 + the signal that drained the run, or minus the signal that stopped it without a drain."""
    orchestrator = Orchestrator(tree, resume, await places(tree))
    orchestrator.catch_signals()
    try:
        await orchestrator.run()
    except asyncio.CancelledError:
        if orchestrator.signal is None:
            raise
    finally:
        await orchestrator.close()
    if orchestrator.signal is not None:
        return 128 + orchestrator.signal if orchestrator.drained else -orchestrator.signal
    return 0


def _admission(tree: RunTree) -> Admission:
    """An episode of which nothing is known yet is as long as it can be trained on."""
    longest = longest_episode(tree) * sum(bytes_per_token(tree, model_shape(tree)).values())
    return Admission(int(longest), spills=tree.arena.on_full == "spill")


class Orchestrator:
    """One run's orchestrator: owns the connections and the order of things; the parts own their rules."""

    def __init__(self, tree: RunTree, resume: bool, places: Sequence[Sequence[Place]]) -> None:
        self.tree, self.resumed = tree, resume
        self.signal: int | None = None
        self._stepping = self._draining = False
        self.drained = False  # everything is released and the ranks were told to finish
        self._wake = asyncio.Event()  # a group left, the training ended, a signal came
        self.attempt = secrets.token_hex(2)  # keeps the tags of a run's attempts apart
        self._background: set[asyncio.Task[None]] = set()
        config = tree.orchestrator
        token = read_token(tree.arena)
        arena = Arena.attach(require_arena(tree.arena))
        self.arenas = Arenas(arena, Client(token, ca=tree.node.ca) if token else None)
        self.arenas.lost = self._node_lost
        self.ledger = Ledger(self.arenas, tree.trainer.ranks, config.seq_len)
        self.shipped = ShippedSteps(tree.socket_dir / "steps")
        if resume:
            self.shipped.load(str(tree.arena.address))
        else:
            self.shipped.clear()
            arena.discard(tree.run.name)  # what an earlier attempt left behind in a node's arena
        nominal = config.batch_size or config.inflight
        self.episodes = Episodes(self.ledger, tree.run.name, config.inflight, FAILED_BATCHES * nominal)
        self.engine = EngineClient(tree.inference.engine_urls, timeout_s=tree.inference.request_timeout_s)
        self.sources = [
            Source(tree, i, [Replica(EnvClient(place.address, token), place) for place in at], self.engine.urls)
            for i, at in enumerate(places)
        ]
        train = [source for source in self.sources if source.split == "train"]
        self.sink = TrainSink(tree, self.ledger, self.episodes)
        self.dispatcher = Dispatcher(
            tree, train, self.episodes, self.sink, self.attempt, self._wake.set, self.arenas, _admission(tree)
        )
        self.dispatcher.retained = self.shipped
        self.evals = [EvalSink(s, self.ledger, self.episodes, self.attempt) for s in self.sources if s.split == "eval"]
        self.link = TrainerLink(
            tree.trainer_address,
            tree.trainer.ranks,
            token,
            self.shipped,
            returning=tree.run.restarts.trainer > 0,
            shares=arena.origin if tree.arena.transport == "required" else None,
            job=tree.job if tree.deployment.trainer_nodes > 1 else None,
        )
        self.policy = Policy(self.engine, tree, self.link)
        self.lag = LoopLag()
        self.report = StepReport(tree, self.arenas, self.episodes, self.sources, self.lag)
        self.waiting = Waiting(tree, self.arenas, self.episodes, self.sink, self.dispatcher)
        exposition.also(lambda: self.report.latest)

    # --- the whole -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Everything from connecting to `finish`."""
        self.spawn(self.waiting.run())
        step = await self._connect()
        self.spawn(self.lag.run())
        self.spawn(self.episodes.watch())
        self.spawn(self.policy.watch())
        if self.link.begun or self.shipped.last is not None:
            training = await self._take_over(step)
        else:
            training = None
            self.report.open(step or None)
            await self._begin(step)
        if step == 0 and self.evals and training is None and self.report.last is None:
            self.report.write({"step": 0, **await self._evaluate(0)})
        await self._steps(step, training)
        await self._stop_episodes()
        await self.link.finish()
        for source in self.sources:
            source.replicas.report()
        self._let_go(self.tree.run.max_steps)
        self.drained = True

    async def _connect(self) -> int:
        """Reach everyone; the step that is completed already."""
        timeout_s, last = self.tree.orchestrator.connect_timeout_s, self.shipped.last
        if last is not None and last.step > (self.report.last or 0):
            self.link.unreported = last.step
        peers = {f"env server {s.name}": s.connect(timeout_s, self.arenas, resumed=self.resumed) for s in self.sources}
        peers |= {"inference": self.policy.reach(timeout_s), "trainer": self.link.hellos(timeout_s)}
        await reach(peers, awaits=self.waiting.awaits)
        if self.resumed:  # what an orchestrator before this one had asked for ends
            name = self.tree.run.name
            await reach({f"env server {s.name} to end its episodes": s.take_over(name) for s in self.sources})
        else:
            self.arenas.discard(self.tree.run.name)  # of an earlier attempt, in other nodes' arenas
        for source in self.sources:
            source.derive_masks = self.policy.derive_masks
        step = self.link.completed
        if step and not self.resumed:
            raise RunError(f"the trainer stands at step {step}, and this run was not started with --resume")
        reached = step + 1 if step + 1 == self.link.unreported else step
        if last is not None and last.step != reached:
            log.warning("the ranks stand at step %d: what was shipped as step %d is given up", reached, last.step)
            self.shipped.clear()
        if self.shipped.last is not None:
            self.dispatcher.restore(self.shipped.last.state)
        elif step:
            self._restore(step)
        servers, engines = ", ".join(source.name for source in self.sources), ", ".join(self.engine.urls)
        log.info("ready: env servers %s; engines %s; trainer ranks %d", servers, engines, self.tree.trainer.ranks)
        return step

    def _restore(self, step: int) -> None:
        """Sampler positions of the step that the trainer resumed."""
        path = self.tree.run.output_dir / "checkpoints" / f"step_{step}" / "orchestrator.json"
        try:
            self.dispatcher.restore(json.loads(path.read_text()))
        except OSError as error:
            raise RunError(
                f"the trainer stands at step {step}, but that step's state is not there ({error}): start the "
                "trainer with --resume, too"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} cannot be read ({type(error).__name__}: {error}): remove {path.parent} to resume from the "
                "checkpoint before it"
            ) from None

    async def _take_over(self, completed: int) -> asyncio.Task[None] | None:
        """Go on where an orchestrator before this one stood; the training that was under way, if one was."""
        self.link.warmed_up = self.tree.warmup.steps > 0
        self.report.open(completed)
        groups = await adopt(self.arenas, self.tree.run.name, self.sources, self.ledger, self.sink, self.shipped)
        self.dispatcher.skip_to(groups)
        self._let_go(completed - self.tree.arena.retain_steps)
        last = self.shipped.last
        if last is not None and last.step > completed:
            self.dispatcher.serving(completed)
            self.dispatcher.steps_out += 1
            self.report.resume(last.record)
            return self.spawn(self._complete(last.step))
        path = self.tree.published_dir(completed)
        await self._serve(str(path if path.exists() else self.tree.initial_weights), completed)
        return None

    async def _begin(self, version: int) -> None:
        """After the warm-up, if there is one, the ranks publish the version to start from; the engines serve it before
        any episode starts."""
        if version == 0 and not self.link.saved:
            self.waiting.stage("warm-up", 1)
            await WarmUp(self).run()
        await self._serve(await self.link.begin(version, self.dispatcher.state()), version)

    async def _serve(self, path: str, version: int) -> None:
        await self.policy.serve(path, version)
        self.dispatcher.serving(version)

    # --- steps ---------------------------------------------------------------------------------------------------

    async def _steps(self, completed: int, training: asyncio.Task[None] | None) -> None:
        """Collect step n + 1 while step n is trained, to the last step or until the run drains. training: that of the
        step behind the completed ones, if it is under way."""
        self._stepping = True
        first = completed + 1 if training is None else completed + 2
        self.dispatcher.collecting(first)
        dispatching = self.spawn(self.dispatcher.run())
        for step in range(first, self.tree.run.max_steps + 1):
            began = time.monotonic()
            self.waiting.stage("collect", step)
            batch = await self._collect(step, dispatching, training)
            collect_s = time.monotonic() - began
            if training is not None:
                self.waiting.stage("train", step - 1)
                await training
            if batch is not None:
                batch = await self._whole(batch, dispatching)
            if batch is None:
                break
            if self._draining:
                self.sink.give_up(batch.episodes)
                break
            training = self.spawn(self._train(batch, collect_s))
        if training is not None:
            self.waiting.stage("train", self.report.underway)
            await training

    async def _collect(
        self, step: int, dispatching: asyncio.Task[None], training: asyncio.Task[None] | None
    ) -> Batch | None:
        """The batch of `step`, None when the run drains. Whatever fails in the background meanwhile is raised here."""
        while True:
            self._wake.clear()
            if self.dispatcher.failure is not None:
                raise self.dispatcher.failure
            for task in (dispatching, training):
                if task is not None and task.done():
                    task.result()
            if self._draining:
                return None
            if not self.arenas.in_doubt and (batch := self.sink.cut(step)) is not None:
                self.dispatcher.collecting(step + 1)  # at once: what starts from here on is for a later batch
                self.dispatcher.steps_out += 1
                return batch
            if not self.dispatcher.steps_out:
                self.dispatcher.relieve()
            self.dispatcher.wake()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELIEF_S):
                    await self._wake.wait()

    async def _whole(self, batch: Batch, dispatching: asyncio.Task[None]) -> Batch | None:
        """A batch without what was lost since it was cut; another one if nothing is left; None when the run drains."""
        while True:
            await self.arenas.certain()
            if lost := self.sink.drop_lost_of(batch.episodes):
                log.error("step %d goes on without %d episodes of a lost node", batch.step, lost)
            if batch.kept:
                return batch
            self.dispatcher.steps_out -= 1
            self.dispatcher.collecting(batch.step)
            again = await self._collect(batch.step, dispatching, None)
            if again is None:
                return None
            batch = again

    async def _train(self, batch: Batch, collect_s: float) -> None:
        """Ship one step, serve what it publishes, and account for it once it is durable."""
        step, tree = batch.step, self.tree
        self.sink.shipped(batch)
        await self.policy.leave_accelerator()
        extra = {"run_id": tree.run.name, "state": self.dispatcher.state()}
        messages = await self._armed("step", step, batch.samples, extra)
        record = await self.report.begin(batch, collect_s, sum(map(len, messages)))
        where = str(tree.run.output_dir), str(tree.arena.address)
        asked_with = str(tree.arena.token_file or ""), str(tree.node.ca or "")
        self.shipped.add(ShippedStep(step, tree.run.name, *where, record, tuple(messages), *asked_with))
        for rank in range(tree.trainer.ranks):
            await self.link.catch_up(rank)
        await self._complete(step)

    async def _complete(self, step: int) -> None:
        """Serve what a shipped step publishes, and write its line once it is durable."""
        due = self._eval_due(step)
        path = await self.link.published(step)
        if due:
            self.dispatcher.pause()
        await self._serve(path, step)
        metrics = await self.link.report(step, "train")
        self._let_go(step - self.tree.arena.retain_steps)
        self.dispatcher.steps_out -= 1
        self.dispatcher.wake()
        if due and not self._draining:
            metrics |= await self._evaluate(step)
            self.dispatcher.resume()
        await self.report.end(metrics)

    def _let_go(self, newest: int) -> None:
        """Steps up to this one are not read again."""
        for step in self.shipped:
            if step <= newest:
                self.ledger.let_go(step)
                self.shipped.let_go(step)

    async def ship_warmup(self, step: int, samples: Sequence[Sample]) -> None:
        """Send every rank its references of a warm-up step."""
        self.link.warmed_up = True
        for rank, raw in enumerate(await self._armed("warmup", step, samples, {})):
            await self.link.send(rank, raw)

    async def _armed(self, kind: str, step: int, samples: Sequence[Sample], extra: dict[str, Any]) -> list[bytes]:
        """Pack the samples and arm the done sets of their blocks, wherever those are; the message of each rank."""
        groups, size = self._packed(samples), self.tree.trainer.context_parallel
        ranks = [micros for micros in groups for _ in range(size)]  # neighbours share their sequences
        self.ledger.ship(groups, step, readers=size)
        await self.arenas.flush()
        common = {"kind": kind, "step": step, "loss_tokens": sum(sample.S for sample in samples), **extra}
        if nodes := self.arenas.urls({handle for sample in samples for handle in sample.handles}):
            common["nodes"] = nodes
        return [wire.pack({**common, "micro_batches": micro_batches_to_wire(micros)}) for micros in ranks]

    def _packed(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        return pack(
            samples,
            seq_len=self.tree.orchestrator.seq_len,
            num_ranks=self.tree.trainer.data_ranks,
            pad_to_multiple_of=self.tree.trainer.pad_to_multiple_of,
        )

    # --- other nodes ---------------------------------------------------------------------------------------------

    def _node_lost(self, node: Node) -> None:
        """Its engines and replicas drop out, its blocks are written off; what of them is shipped becomes micro batches
        that the ranks drop."""
        written_off = self.ledger.write_off(node.origin)
        dropped = self.sink.drop_lost()
        log.error(
            "node %s is lost, and with it %d blocks; %d episodes that waited for their batch have failed: %s",
            node.name, written_off, dropped, node.lost,
        )  # fmt: skip
        self.policy.drop_host(node.host, f"node {node.name} is lost")
        for source in self.sources:
            for replica in source.replicas.alive:
                if replica.origin == node.origin and not source.replicas.lose(replica, f"node {node.name} is lost"):
                    self.dispatcher.fail(ServerDied(f"source {source.name!r} has lost its last replica: {node.lost}"))
        self.dispatcher.give_up_lost()

    # --- evaluation ----------------------------------------------------------------------------------------------

    def _eval_due(self, step: int) -> bool:
        return any(self._wants(sink, step) for sink in self.evals)

    def _wants(self, sink: EvalSink, step: int) -> bool:
        return step % sink.config.interval == 0 or step == self.tree.run.max_steps

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Every source due at this version, side by side."""
        with self.waiting.meanwhile("evaluate", step):
            found = await together(*[sink.evaluate(step) for sink in self.evals if self._wants(sink, step)])
        return {name: value for metrics in found for name, value in metrics.items()}

    # --- signals and the end -------------------------------------------------------------------------------------

    def catch_signals(self) -> None:
        """First signal: drain; second: stop now. Before the first step there is nothing to drain."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number, task)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher starts us with it blocked

    def _signalled(self, number: signal.Signals, task: asyncio.Task[Any]) -> None:
        again, self.signal = self.signal is not None, number
        if again or not self._stepping:
            task.cancel()
        else:
            log.info("draining: the step being trained is finished; the next signal stops at once")
            self._draining = True
            self.dispatcher.pause()
            self._wake.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        self._wake.set()

    async def _stop_background(self) -> None:
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)

    async def _stop_episodes(self) -> None:
        await self._stop_background()
        await self.dispatcher.stop()
        self.sink.close()
        await self.episodes.close()

    async def close(self) -> None:
        """Release everything on every way out, but for a failure after which another orchestrator takes over; after a
        clean end, nothing may be left. RunError lists what is."""
        held: dict[Handle, Hold] = {}
        if self.tree.run.restarts.orchestrator and not self.drained and self.signal is None:
            await self._stop_background()
        else:
            await self._stop_episodes()
            held = self.ledger.close()
            self.shipped.clear()
            if any(replica.lost for source in self.sources for replica in source.replicas.every):
                self.arenas.discard(self.tree.run.name)  # what their last workers stored behind the end of theirs
            await self.arenas.flush(FLUSH_S)
        await self.link.close()
        await asyncio.gather(*[source.close() for source in self.sources], self.engine.aclose())
        await asyncio.to_thread(self.report.close)
        left = await self._left_in_arenas() if self.drained else []
        await self.arenas.close()
        if self.drained and (held or left):
            lines = [f"{hold.tag}: held by the ledger for {hold.samples} samples" for hold in held.values()]
            lines += map(render.leak, left)
            head = f"{len(held)} blocks in the ledger and {len(left)} in the arena were never released:"
            raise RunError("\n  ".join([head, *lines[:LEAKS]]))

    async def _left_in_arenas(self) -> list[dict[str, Any]]:
        """This run's blocks, once the env servers have had time to free what was cancelled."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            left = [found.row for found in await self.arenas.find(self.tree.run.name)]
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.05)
