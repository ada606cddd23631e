"""What the engine remembers of a request: one Row per choice, grown token by token.

Made by the event loop; touched by the engine thread alone until the request is done, and then by the loop again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from shmrl.inference.embedded.params import SamplingParams


@dataclass(slots=True, eq=False)
class Row:
    """One sequence being generated: what was fed, what was drawn, and what the draws were like.

    Attributes:
        tokens, logprobs, ranks, head_ids, head_logprobs, kept: one entry per drawn token.
        routing: pieces [n, L, K] covering every fed token in order; the last drawn token is never fed.
        spans: (weight version, start, end) over `tokens`.
        finish: None while running; then "stop", "length" or "abort".

    Example: after 4 tokens on a prompt of 12: len(tokens) == 4, routing pieces of 12 + 1 + 1 + 1 rows.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    head_ids: list[np.ndarray] = field(default_factory=list)
    head_logprobs: list[np.ndarray] = field(default_factory=list)
    kept: list[np.ndarray | None] = field(default_factory=list)
    routing: list[np.ndarray] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None
    _text: str = ""
    _stream: DecodeStream | None = None

    @property
    def length(self) -> int:
        """Tokens so far; all but the last one are in the cache."""
        return len(self.prompt) + len(self.tokens)

    def all_routing(self) -> np.ndarray | None:
        """[length - 1 (or fewer after an abort before the first token), L, K]; None when nothing was captured."""
        return np.concatenate(self.routing) if self.routing else None

    def mark(self, version: str) -> None:
        """The newest token came from these weights."""
        n = len(self.tokens)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], n)
        else:
            self.spans.append((version, n - 1, n))

    def check_stop(self, eos: frozenset[int], tokenizer: Tokenizer | None) -> None:
        """Set `finish` if the newest token ends the row."""
        token, n = self.tokens[-1], len(self.tokens)
        found = self._stop_string(tokenizer) if self.params.stop else None
        if n >= self.params.min_tokens:
            if token in self.params.stop_token_ids:
                self.finish, self.stop_reason = "stop", token
            elif token in eos and not self.params.ignore_eos:
                self.finish = "stop"
            elif found is not None:
                self.finish, self.stop_reason = "stop", found
        if self.finish is None and n >= self.max_tokens:
            self.finish = "length"

    def _stop_string(self, tokenizer: Tokenizer | None) -> str | None:
        """The stop string that the newest token completed; text before min_tokens cannot complete one."""
        assert tokenizer is not None, "the server refuses stop strings without a tokenizer"
        if self._stream is None:
            self._stream = DecodeStream(skip_special_tokens=self.params.skip_special_tokens)
        piece = self._stream.step(tokenizer, self.tokens[-1]) or ""
        self._text += piece
        for stop in self.params.stop:
            if piece and stop in self._text[-(len(piece) + len(stop) - 1) :]:
                return stop
        return None


@dataclass(slots=True, eq=False)
class Request:
    """One HTTP request: `n` rows over one prompt. The engine thread calls `done` once, when no row runs any more.

    `error` is what made it fail; its rows are then incomplete.
    """

    id: str
    rows: list[Row]
    done: Callable[[Request], None]
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or all(row.finish is not None for row in self.rows)


def make_rows(prompt: list[int], params: SamplingParams, *, max_model_len: int, default_seed: int) -> list[Row]:
    """The rows of one request. Choice i draws with seed + i; generation ends where the model's context does."""
    room = max_model_len - len(prompt)
    seed = default_seed if params.seed is None else params.seed
    most = min(room, params.max_tokens or room)
    return [Row(prompt, params, (seed + i) % 2**64, most) for i in range(params.n)]
