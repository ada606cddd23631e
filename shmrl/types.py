"""The small, frozen values that move between processes: handles and what refers to them, never arrays.

Owned by no room: the env worker makes a `Sample`, the orchestrator packs `MicroBatch`es of them, a trainer rank
assembles those. Nothing here grows with the number of tokens. Imports neither numpy nor torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

_HANDLE = struct.Struct("<BBIIII6s8s")
HANDLE_VERSION = 1


class Handle(bytes):
    """32 bytes that name one generation of one block of one arena. Hashable, comparable, safe to send anywhere.

    Layout (little endian): version 8, flags 8, node 32, arena 32, slot 32, generation 32, nbytes 48, nonce 64 bits.
    Nothing in it is trusted: the arena checks slot, generation and nonce against the block's descriptor.

    Example:
        >>> h = Handle.pack(node=7, arena=9, slot=3, generation=1, nbytes=6_291_456, nonce=b"\\0" * 8)
        >>> len(h), h.nbytes, Handle.parse(str(h)) == h
        (32, 6291456, True)
    """

    __slots__ = ()

    def __new__(cls, raw: bytes) -> Handle:
        if len(raw) != 32:
            raise ValueError(f"a handle is 32 bytes, got {len(raw)}")
        return super().__new__(cls, raw)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Handle:
        """The handle of 32 raw bytes; ValueError for any other length."""
        return cls(raw)

    @classmethod
    def pack(
        cls, *, node: int, arena: int, slot: int, generation: int, nbytes: int, nonce: bytes, flags: int = 0
    ) -> Handle:
        """A handle of its parts (what `Arena.seal` does)."""
        size = nbytes.to_bytes(6, "little")
        return cls(_HANDLE.pack(HANDLE_VERSION, flags, node, arena, slot, generation, size, nonce))

    @classmethod
    def parse(cls, text: str) -> Handle:
        """The handle whose `str()` this is; ValueError otherwise."""
        if not text.startswith("h") or len(text) != 65:
            raise ValueError(f"not a handle: {text!r} (expected 'h' and 64 hexadecimal digits)")
        return cls(bytes.fromhex(text[1:]))

    def __str__(self) -> str:
        return "h" + self.hex()

    def __repr__(self) -> str:
        return f"Handle(slot={self.slot}, generation={self.generation}, nbytes={self.nbytes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Handle, (bytes(self),))

    @property
    def version(self) -> int:
        return self[0]

    @property
    def flags(self) -> int:
        return self[1]

    @property
    def node(self) -> int:
        """Hash of boot id, hostname and the device of the arena's directory."""
        return int.from_bytes(self[2:6], "little")

    @property
    def arena(self) -> int:
        """The first 32 bits of the arena's id."""
        return int.from_bytes(self[6:10], "little")

    @property
    def origin(self) -> str:
        """Which arena of which node it is of, as 16 hexadecimal digits: the key of a step's table of node servers."""
        return self[2:10].hex()

    @property
    def slot(self) -> int:
        """Index of the block's descriptor."""
        return int.from_bytes(self[10:14], "little")

    @property
    def generation(self) -> int:
        """How often the descriptor had been freed when this block was reserved."""
        return int.from_bytes(self[14:18], "little")

    @property
    def nbytes(self) -> int:
        """Payload size in bytes (columns table and checksums not counted)."""
        return int.from_bytes(self[18:24], "little")

    @property
    def nonce(self) -> bytes:
        return bytes(self[24:32])


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable branch, by reference: what the orchestrator scores, filters and packs. Its size is O(1) in T.

    Attributes:
        segments: (handle, start, stop) in the block's own positions; one unless a prefix is shared.
        T: tokens, S: sampled tokens (set bits of the loss mask), R: stored routing rows (T - 1 when the tail was
            never fed; a truncated sample has R = T).
        fields: names of the captured columns beyond tokens / loss_mask / logprobs, e.g. ("routing", "head", "mask").
        meta: small scalars of the block's header the orchestrator needs: source, group, episode, task, reward,
            version_start, version_end, logprobs_mode, temperature, ... Never an array.
        advantage, weight: set by the algorithm; the trainer multiplies the sample's loss by them.

    Example:
        Sample(segments=((Handle(...), 0, 37),), T=37, S=12, R=36, fields=("routing", "mask"),
               meta={"source": "reverse-text", "reward": 0.83, "version_start": 4, "version_end": 4})
    """

    segments: tuple[tuple[Handle, int, int], ...]
    T: int
    S: int
    R: int
    fields: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    advantage: float = 0.0
    weight: float = 1.0

    def truncated(self, n: int) -> Sample:
        """The first n tokens of this sample; touches no array. ValueError if n > T or n < 0.

        S becomes an upper bound (how many of the first n tokens were sampled is in the block); assembly counts.
        """
        if not 0 <= n <= self.T:
            raise ValueError(f"cannot truncate a sample of {self.T} tokens to {n}")
        kept: list[tuple[Handle, int, int]] = []
        left = n
        for handle, start, stop in self.segments:
            take = min(stop - start, left)
            if take:
                kept.append((handle, start, start + take))
            left -= take
        return replace(self, segments=tuple(kept), T=n, S=min(self.S, n), R=min(self.R, n))

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Every block this sample refers to, each once."""
        return tuple(dict.fromkeys(handle for handle, _, _ in self.segments))


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [start, stop) of one block, as part of sequence `sequence` of a micro batch.

    Example: Slice(handle, 0, 37, ("routing",), sequence=2)
    """

    handle: Handle
    start: int
    stop: int
    fields: tuple[str, ...]
    sequence: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank runs in one forward pass: samples in packing order, then `padding` described pad tokens.

    A dummy (no samples, only padding) keeps the number of micro batches equal on all ranks; its loss is zero.

    Attributes:
        fields: the columns to assemble; empty means every one its samples have.
        shapes: row shape of each field ((L, K, E) for routing), so that a dummy assembles to the same arrays.

    Example: MicroBatch(samples=(a, b), padding=3) with a.T = 37, b.T = 24 assembles to N = 64 positions.
    """

    samples: tuple[Sample, ...]
    padding: int = 0
    fields: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence, padding not included."""
        return tuple(sample.T for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """N: every position, padding included."""
        return sum(sample.T for sample in self.samples) + self.padding

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Every range of every block this micro batch reads, in packing order."""
        return tuple(self._slices())

    def _slices(self) -> Iterator[Slice]:
        for index, sample in enumerate(self.samples):
            for handle, start, stop in sample.segments:
                yield Slice(handle, start, stop, sample.fields, index)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Every block this micro batch refers to, each once."""
        return tuple(dict.fromkeys(piece.handle for piece in self._slices()))


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An episode's failure as data: the exception's type name, its message, and the causes, oldest last. where: the
    innermost frame of the environment's own code, if it was raised there.

    Example: ErrorInfo(type="EngineError", message="503 from http://...", chain=("ClientError: refused",))
    """

    type: str
    message: str
    chain: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        """Example: "ValueError: no such word (my_env.py:23, in rollout)" """
        return f"{self.type}: {self.message}" + (f" ({self.where})" if self.where else "")

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """The record of an exception and of its causes."""
        chain: list[str] = []
        cause = error.__cause__ or error.__context__
        while cause is not None and len(chain) < 8:
            chain.append(f"{type(cause).__name__}: {_said(cause)}")
            cause = cause.__cause__ or cause.__context__
        return cls(type(error).__name__, _said(error), tuple(chain))

    @classmethod
    def timeout(cls, limit_s: float) -> ErrorInfo:
        """Of an episode that its deadline ended."""
        return cls("Timeout", f"no end within {limit_s:g} s (serve.request_timeout_s)")


LONGEST_MESSAGE = 64 << 10
"""Characters of an error's message that travel."""


def _said(error: BaseException) -> str:
    """Its message. Whoever wrote the exception may have its message fail, or be a data set."""
    try:
        text = str(error)
    except Exception as fault:
        return f"(no message: its __str__ raised {type(fault).__name__})"
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of an environment's task set; `data` is the environment's own and must survive msgpack.

    Example: Task(id="17", data={"text": "olleh"}, seed=17)
    """

    id: str
    data: dict[str, Any]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """How an episode gets on, told while it runs.

    Attributes:
        phase: "model" (a turn is being generated), "environment" (the turn is there), "scoring" (the rollout has
            returned), "storing" (its branches go into the arena).
        episode: which one of a group. turns, tokens: generated so far. messages: new since the delta before; only in
            evaluation.

    Example: Delta("environment", episode=0, turns=1, tokens=17, messages=({"role": "user", "content": "ab"}, ...))
    """

    phase: str
    episode: int = 0
    turns: int = 0
    tokens: int = 0
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What an env server answers for one episode: scores and references, never arrays.

    Attributes:
        success: False when the episode itself failed; then `error` says how and `samples` is empty.
        reward, rewards, metrics: the total, its named parts, and unweighted observations.
        version_start, version_end: policy versions at the first and the last generated token.
        samples: one per trainable branch, owned by whoever received this (adopt them first).
        messages: the conversation; only in evaluation (training keeps text in the block).

    Example: EpisodeResult(success=True, task_id="17", reward=0.83, stop_reason="stop", num_turns=1, samples=(...,))
    """

    success: bool
    task_id: str
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    num_turns: int = 0
    num_tokens: int = 0
    version_start: int = 0
    version_end: int = 0
    samples: tuple[Sample, ...] = ()
    messages: tuple[dict[str, Any], ...] | None = None
    error: ErrorInfo | None = None
    wire_bytes: int = 0
