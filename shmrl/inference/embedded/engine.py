"""Continuous batching: one thread that admits rows, feeds them one token per step together, and retires them.

The server talks to it through an inbox; everything that touches the model or a running row happens on this thread,
between steps. A step that raises is repeated on halves of its rows until the row that fails is alone: only its request
fails. Positions and noise are functions of the row, so repeating a step changes nothing.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer

from shmrl.errors import EngineError
from shmrl.inference.embedded.model import Model
from shmrl.inference.embedded.rows import Request, Row
from shmrl.inference.embedded.sampler import Batch, Picked, Sampler

log = logging.getLogger(__name__)
T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
PREFILL_TOKENS = 8192  # padded tokens fed in one prefill, so that running rows are not kept waiting for long


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine's load and totals."""

    running: int
    waiting: int
    kv_usage: float
    prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]


class Engine:
    """Serves requests over one model.

    Args:
        max_num_seqs: rows running at once; more wait. raw_logprobs: see `Sampler`.

    Attributes:
        version: label of the weights that serve. error: what the engine thread died of; then `on_death` is called.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        max_num_seqs: int = 64,
        max_model_len: int = 1024,
        raw_logprobs: bool = False,
    ) -> None:
        self.model, self._tokenizer = model, tokenizer
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.version = _label(model.path)
        self.error: BaseException | None = None
        self._sampler = Sampler(model.vocab, model.device, raw=raw_logprobs)
        self._eos = model.eos_ids
        self._waiting: deque[tuple[Row, Request]] = deque()
        self._running: list[tuple[Row, Request]] = []  # index = cache slot
        self._batch: tuple[int, int, Batch] | None = None
        self._prompt_tokens = self._generation_tokens = 0
        self._finished: Counter[str] = Counter()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._state: Literal["running", "draining", "paused"] = "running"
        self._drained: list[Future[None]] = []
        self._closing = False
        self.on_death: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="shmrl-engine", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------------- called by the server

    def submit(self, request: Request) -> None:
        """Queue a request; its `done` is called when it has finished, failed or was aborted."""
        self._post(lambda: self._waiting.extend((row, request) for row in request.rows))

    def abort(self, request: Request | None = None) -> Future[None]:
        """End one request, or all, as they are: finish reason "abort"."""
        return self.call(lambda: self._abort(request))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop stepping; resolves when it has. "abort" ends what runs or waits, "wait" lets running rows finish first
        and "keep" leaves them with their cache, to go on after `resume`. New requests queue until then."""
        future: Future[None] = _promise()
        self._post(lambda: self._pause(mode, future))
        return future

    def resume(self) -> Future[None]:
        """Step again."""
        return self.call(lambda: self._set_state("running"))

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, or about to be once its running rows have finished."""
        return self._state != "running"

    def load_weights(self, path: str | Path) -> Future[None]:
        """Take up another checkpoint between two steps; on EngineError the old weights go on serving."""
        return self.call(lambda: self.model.load_weights(path))

    def set_version(self, version: str) -> Future[None]:
        """Tokens drawn from now on carry this version."""
        return self.call(lambda: setattr(self, "version", version))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread between two steps."""
        future: Future[T] = _promise()
        self._post(lambda: _resolve(future, function))
        return future

    def stats(self) -> Stats:
        """Load and totals; any thread."""
        running = list(self._running)
        used = sum(row.length for row, _ in running)
        return Stats(
            running=len(running),
            waiting=len(self._waiting),
            kv_usage=used / (self.max_num_seqs * self.max_model_len),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
        )

    def close(self) -> None:
        """Abort everything and end the thread."""
        self._post(self._close)
        self._thread.join()

    # ------------------------------------------------------------------------------------------------ engine thread

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self.error is not None:
                raise EngineError(f"the engine thread has died: {self.error}")
            if self._closing:
                raise EngineError("the engine is closed")
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            log.exception("the engine thread died")
            with self._wake:
                self.error = error
            for row, request in (*self._running, *self._waiting):
                request.error = EngineError(f"the engine thread has died: {error}")
                self._finish(row, request)
            self.on_death()

    def _turn(self) -> None:
        with self._wake:
            while not self._inbox and not self._ready():
                self._wake.wait()
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            command()
        if self._ready():
            with torch.inference_mode():
                self._step()
        if self._state == "draining" and not self._running:
            self._set_state("paused")

    def _ready(self) -> bool:
        if self._state == "running":
            return bool(self._running or self._waiting)
        return self._state == "draining" and bool(self._running)

    def _step(self) -> None:
        """One token for everybody: newcomers get theirs from the prefill of their prompts, the others from a decode."""
        first = len(self._running)
        if self._state == "running":
            self._admit()
        if len(self._running) > first:
            self._advance(first, len(self._running), prefill=True)
        if first:
            self._advance(0, first, prefill=False)
        self._retire()

    def _admit(self) -> None:
        widest, count = 0, 0
        while self._waiting and len(self._running) < self.max_num_seqs:
            row, request = self._waiting[0]
            if request.error is not None:
                self._waiting.popleft()
                continue
            widest, count = max(widest, len(row.prompt)), count + 1
            if count > 1 and widest * count > PREFILL_TOKENS:
                break
            self._waiting.popleft()
            self._running.append((row, request))
            self._prompt_tokens += len(row.prompt)

    def _advance(self, lo: int, hi: int, *, prefill: bool) -> None:
        """Feed slots [lo, hi) and draw a token for each; on an exception, find the row that cannot be fed."""
        rows = [row for row, _ in self._running[lo:hi]]
        try:
            picked, routing = self._forward(rows, lo, prefill)
        except Exception as error:
            if len(rows) == 1:
                self._fail(self._running[lo][1], error)
                return
            middle = (lo + hi) // 2
            self._advance(lo, middle, prefill=prefill)
            self._advance(middle, hi, prefill=prefill)
            return
        for i, row in enumerate(rows):
            try:
                self._record(row, picked, routing, i)
            except Exception as error:
                self._fail(self._running[lo + i][1], error)

    def _forward(self, rows: list[Row], lo: int, prefill: bool) -> tuple[Picked, np.ndarray | None]:
        if prefill:
            logits, routing = self.model.prefill([row.prompt for row in rows], lo)
        else:
            logits, routing = self.model.decode([row.tokens[-1] for row in rows], [row.length - 1 for row in rows], lo)
        if not bool(torch.isfinite(logits).all()):
            raise EngineError("the model's logits are not finite")
        allowed = self._ban_stops(logits, rows)
        return self._sampler(allowed, self._batch_of(rows, lo), [row.length for row in rows], logits), routing

    def _ban_stops(self, logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
        """A row below its min_tokens cannot draw what would end it."""
        early = [i for i, row in enumerate(rows) if len(row.tokens) < row.params.min_tokens]
        if early:
            logits = logits.clone()
        for i in early:
            params = rows[i].params
            logits[i, list({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)})] = -torch.inf
        return logits

    def _batch_of(self, rows: list[Row], lo: int) -> Batch:
        """The rows' parameters as tensors, kept until somebody joins or leaves."""
        if self._batch is None or self._batch[:2] != (lo, len(rows)):
            batch = Batch([row.params for row in rows], [row.seed for row in rows], self.model.device)
            self._batch = (lo, len(rows), batch)
        return self._batch[2]

    def _record(self, row: Row, picked: Picked, routing: np.ndarray | None, i: int) -> None:
        if routing is not None:
            row.routing.append(routing[i, : len(row.prompt)] if not row.tokens else routing[i])
        row.tokens.append(picked.tokens[i])
        row.logprobs.append(picked.logprobs[i])
        row.kept.append(picked.kept[i])
        if row.params.logprobs is not None:
            row.ranks.append(picked.ranks[i])
            row.head_ids.append(picked.head_ids[i, : row.params.logprobs])
            row.head_logprobs.append(picked.head_logprobs[i, : row.params.logprobs])
        row.mark(self.version)
        self._generation_tokens += 1
        row.check_stop(self._eos, self._tokenizer)

    def _retire(self) -> None:
        """Take finished rows out; the last slot moves into each hole."""
        for slot in reversed(range(len(self._running))):
            row, request = self._running[slot]
            if row.finish is None and request.error is None:
                continue
            self._batch = None
            last_row, _ = self._running[-1]
            if slot != len(self._running) - 1:
                self.model.cache.move(len(self._running) - 1, slot, last_row.length - 1)
                self._running[slot] = self._running[-1]
            self._running.pop()
            self._finish(row, request)

    def _finish(self, row: Row, request: Request) -> None:
        self._finished[row.finish or "error"] += 1
        if request.finished:
            done, request.done = request.done, lambda request: None
            done(request)

    def _fail(self, request: Request, error: Exception) -> None:
        log.error("request %s failed: %s: %s", request.id, type(error).__name__, error)
        request.error = error

    def _abort(self, request: Request | None) -> None:
        ended = [pair for pair in (*self._running, *self._waiting) if request in (None, pair[1])]
        for row, _ in ended:
            row.finish = row.finish or "abort"
        waiting = [pair for pair in ended if pair in self._waiting]
        self._waiting = deque(pair for pair in self._waiting if pair[0].finish is None)
        for row, owner in waiting:
            self._finish(row, owner)
        self._retire()

    def _pause(self, mode: PauseMode, future: Future[None]) -> None:
        if mode == "abort":
            self._abort(None)
        self._drained.append(future)
        self._set_state("draining" if mode == "wait" and self._running else "paused")

    def _set_state(self, state: Literal["running", "draining", "paused"]) -> None:
        self._state = state
        if state != "draining":
            for future in self._drained:
                future.set_result(None)
            self._drained.clear()

    def _close(self) -> None:
        self._closing = True
        self._abort(None)


def _promise() -> Future[T]:
    """A future that its waiter cannot cancel: the engine always sets it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def _label(path: Path) -> str:
    """The version of the weights an engine starts with: N of a directory named step_N, else 0."""
    step = re.fullmatch(r"step_(\d+)", path.name)
    return step[1] if step else "0"
