"""TensorBoard and Weights & Biases beside metrics.jsonl: same names, one run for all processes, a table of rollouts.

The orchestrator hands each step's record over and goes on; a thread writes it. Whatever fails there - a library, a
disk, a network - costs a warning and that step's copy, never the run: metrics.jsonl has it all. Neither library is
imported unless it is asked for, and neither brings torch in.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shmrl.config import RunTree
from shmrl.config.addresses import redacted
from shmrl.errors import told

log = logging.getLogger(__name__)

Record = Mapping[str, Any]
Row = Mapping[str, Any]
WAITING = 256  # records that wait for a slow tracker; beyond them the newest is left out
CLOSE_S = 15.0
COLUMNS = ("step", "source", "task_id", "reward", "advantage", "tokens", "stop_reason", "conversation")
WARNINGS = 3  # of each tracker, then it is silent


class TensorBoard:
    """Event files in `<output_dir>/tensorboard`. completed: steps after it, of an attempt before, are not shown."""

    def __init__(self, tree: RunTree, completed: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._writer = EventFileWriter(str(tree.run.output_dir / "tensorboard"))
        if completed is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=completed + 1, session_log=start))

    def write(self, record: Record, rollouts: Sequence[Row]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
        if rollouts:
            cells = [[str(cell).encode() for cell in row] for row in (COLUMNS, *table(record["step"], rollouts))]
            sizes = [TensorShapeProto.Dim(size=len(cells)), TensorShapeProto.Dim(size=len(COLUMNS))]
            text = TensorProto(
                dtype=DT_STRING,
                string_val=[cell for row in cells for cell in row],
                tensor_shape=TensorShapeProto(dim=sizes),
            )
            plugin = SummaryMetadata.PluginData(plugin_name="text")
            values.append(Summary.Value(tag="rollouts", tensor=text, metadata=SummaryMetadata(plugin_data=plugin)))
        self._writer.add_event(self._event(wall_time=time.time(), step=record["step"], summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One run of Weights & Biases, which attempts that continue it share. Its files: `<output_dir>/wandb`."""

    def __init__(self, tree: RunTree, completed: int | None) -> None:
        import wandb

        config = tree.monitor.wandb
        assert config is not None
        self._wandb = wandb
        (tree.run.output_dir / "wandb").mkdir(exist_ok=True)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=tree.run.name,
            mode=config.mode,
            id=_run_id(tree.run.output_dir / "wandb" / "shmrl-run-id", completed),
            resume="allow",
            dir=str(tree.run.output_dir),
            config=json.loads(redacted(tree.without_secrets().model_dump_json())),
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )

    def write(self, record: Record, rollouts: Sequence[Row]) -> None:
        found: dict[str, Any] = dict(scalars(record))
        if rollouts:
            found["rollouts"] = self._wandb.Table(columns=list(COLUMNS), data=table(record["step"], rollouts))
        self._run.log(found, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """The trackers that the configuration names, behind one thread; `write` never waits and never raises."""

    def __init__(self, tree: RunTree, completed: int | None) -> None:
        asked: dict[str, tuple[type[TensorBoard] | type[Wandb], object]] = {
            "TensorBoard": (TensorBoard, tree.monitor.tensorboard),
            "Weights & Biases": (Wandb, tree.monitor.wandb),
        }
        self._make: dict[str, Callable[[], TensorBoard | Wandb]] = {
            name: partial(kind, tree, completed) for name, (kind, wanted) in asked.items() if wanted
        }
        self._rollouts = tree.run.output_dir / "rollouts"
        self._warned: dict[str, int] = {}
        self._records: queue.Queue[Record | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True) if self._make else None
        if self._thread is not None:
            self._thread.start()

    def write(self, record: Record) -> None:
        """Hand over one step's record."""
        if self._thread is not None:
            try:
                self._records.put_nowait(dict(record))
            except queue.Full:
                self._warn("trackers", f"step {record['step']} is left out: {WAITING} steps wait to be written")

    def close(self) -> None:
        """Write what waits, for CLOSE_S at most."""
        if self._thread is None:
            return
        try:
            self._records.put(None, timeout=CLOSE_S)
        except queue.Full:
            pass
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the last steps are not written to %s: it hangs", " and ".join(self._make))

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        made = {name: one for name, make in self._make.items() if (one := self._tried(name, make)) is not None}
        while (record := self._records.get()) is not None:
            rows = self._saved(record["step"])
            for name, one in made.items():
                self._tried(name, partial(one.write, record, rows))
        for name, one in made.items():
            self._tried(name, one.close)

    def _tried(self, name: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:  # of a library that is not ours: whatever it is, the run goes on
            self._warn(name, told(error))
            return None

    def _warn(self, name: str, what: str) -> None:
        self._warned[name] = self._warned.get(name, 0) + 1
        if self._warned[name] <= WARNINGS:
            log.warning("%s: %s; the run goes on, and metrics.jsonl has everything", name, what)

    def _saved(self, step: int) -> list[Row]:
        """The step's rollouts, as they were saved."""
        path = self._rollouts / f"step_{step}.jsonl"
        try:
            return [json.loads(line) for line in path.read_text().splitlines()]
        except (OSError, ValueError):
            return []


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by name, without the step."""
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
    return {name: float(value) for name, value in numbers.items()}


def table(step: int, rollouts: Sequence[Row]) -> list[list[Any]]:
    """A row of COLUMNS per rollout; a conversation is "role: content", a line per message."""
    return [[step, *(row.get(name) for name in COLUMNS[1:-1]), _conversation(row.get("messages"))] for row in rollouts]


def _conversation(messages: Any) -> str:
    return "\n".join(f"{one.get('role')}: {one.get('content')}" for one in messages or () if isinstance(one, dict))


def _run_id(path: Path, completed: int | None) -> str:
    """The id that attempts which continue a run share; a run that begins gets a new one."""
    if completed is not None and path.exists():
        return path.read_text().strip()
    made = secrets.token_hex(4)
    path.write_text(made)
    return made
