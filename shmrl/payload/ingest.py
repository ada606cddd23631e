"""`BranchBuilder`: one conversation's arrays while it runs, in an env worker; a `Branch` when it ends.

Called by the episode's chat client after every answer of the engine. Owns the flat token sequence and stitches what the
engine captured over turns, aborts and resumes. A prompt that does not continue the tokens so far is another branch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmrl.errors import MissingField, PayloadError
from shmrl.payload.branch import Branch
from shmrl.payload.forms import Encoded, engine_rows, routed_experts
from shmrl.payload.heads import Head, Heads, KeptSets
from shmrl.payload.routing import Routing
from shmrl.payload.sharing import Opening


class Generation(Protocol):
    """What the builder reads of an engine's answer (`shmrl.inference.answers.Generation` is one). Heads and masks may
    be lists."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def top_logprobs(self) -> Heads | Sequence[Head] | None: ...
    @property
    def routed_experts(self) -> Any: ...
    @property
    def sampling_mask(self) -> KeptSets | Sequence[Sequence[int]] | None: ...
    @property
    def weight_versions(self) -> Sequence[tuple[Any, int, int]]: ...


class BranchBuilder:
    """Accumulates turns.

    Args:
        num_experts, layers, top_k: the model's; num_experts=None means routing is not captured. layers: global ids of
            those with a router. decoder_layers: how many there are in all; engines that return a column for each of
            them, dense ones included (vLLM), have the others' meaningless columns dropped.
        head_k: width of the captured top-k (0: no head); rows are stored with the sampled token first.
        mask: whether sampling masks are captured. vocab: ids end before it (None: not known, not checked).

    Example:
        >>> builder = BranchBuilder(num_experts=8, layers=range(4), head_k=20, mask=True)
        >>> builder.add_turn(prompt_ids, await client.generate(prompt_ids, sampling))
        >>> sample = encode(arena, builder.branch({"source": "reverse-text", "reward": 0.8}), tag=tag)
    """

    def __init__(
        self,
        *,
        num_experts: int | None = None,
        layers: Sequence[int] = (),
        decoder_layers: int | None = None,
        top_k: int | None = None,
        head_k: int = 0,
        mask: bool = False,
        vocab: int | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self._loss: list[bool] = []
        self._logprobs: list[float] = []
        self._top_k, self._head_k, self._decoder_layers = top_k, head_k, decoder_layers
        self._routing = None if num_experts is None else Routing(num_experts, layers)
        self._covered = 0
        self._heads: list[tuple[Any, Any]] = []
        self._kept: list[KeptSets] = []
        self._with_mask, self._vocab = mask, vocab

    @property
    def covered(self) -> int:
        """Routing rows there already: what the next request may pass as routed_experts_prompt_start."""
        return self._covered

    def extends(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a turn with this prompt continues the tokens so far."""
        return list(prompt_ids[: len(self.tokens)]) == self.tokens

    def add_turn(self, prompt_ids: Sequence[int], generation: Generation, *, trainable: bool = True) -> None:
        """Appends what the prompt adds to the tokens so far, then the generated tokens. A turn of none changes nothing.

        trainable=False: the tokens were sampled, but do not train; their head and mask rows are dropped here.
        Raises PayloadError if the prompt does not extend the tokens so far, or an array does not fit its tokens.
        """
        if not self.extends(prompt_ids):
            at = next(
                (i for i, (a, b) in enumerate(zip(self.tokens, prompt_ids, strict=False)) if a != b), len(prompt_ids)
            )
            raise PayloadError.of(
                "tokens", f"the prompt leaves the branch at position {at} of {len(self.tokens)}: start another one", at
            )
        new = [int(token) for token in generation.token_ids]
        if not new:
            return
        self._check_vocab("tokens", new)
        if len(generation.logprobs) != len(new):
            raise PayloadError.of(
                "logprobs",
                f"{len(generation.logprobs)} for {len(new)} generated tokens",
                value=len(generation.logprobs),
            )
        self._add_routing(generation.routed_experts, len(prompt_ids) + len(new))
        if trainable:
            self._add_head(generation, new)
            self._add_mask(generation, new)
        prompt = [int(token) for token in prompt_ids[len(self.tokens) :]]
        self.tokens += prompt + new
        self._loss += [False] * len(prompt) + [trainable] * len(new)
        kept = list(generation.logprobs) if trainable else [0.0] * len(new)
        self._logprobs += [0.0] * len(prompt) + kept
        self.versions += [_version(label) for label, _, _ in generation.weight_versions]

    def opening(self) -> Opening | None:
        """What lies before the first sampled token, for `SharedRows`; None where nothing does or rows are missing."""
        n = self._loss.index(True) if True in self._loss else len(self._loss) - 1
        if n < 1:
            return None
        tokens = np.array(self.tokens[:n], np.int32)
        if self._routing is None:
            return Opening(tokens)
        try:
            return Opening(tokens, self._routing.stitch(len(self.tokens)).first(n), self._routing.layers)
        except PayloadError:  # `branch` will raise it
            return None

    def branch(self, meta: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] | None = None) -> Branch:
        """The finished branch; `meta` is completed with the versions seen and the head's layout."""
        loss = np.asarray(self._loss, np.bool_)
        full: dict[str, Any] = {**meta}
        if self.versions:
            full.setdefault("version_start", self.versions[0])
            full.setdefault("version_end", self.versions[-1])
        head = mask = None
        if self._head_k:
            full.update(head_has_sampled=True, head_k=self._head_k)
            width = self._head_k + 1
            head = (
                np.concatenate([np.empty((0, width), np.int32), *(ids for ids, _ in self._heads)]),
                np.concatenate([np.empty((0, width), np.float32), *(logprobs for _, logprobs in self._heads)]),
            )
        if self._with_mask:
            kept = KeptSets.joined(self._kept)
            counts = np.zeros(len(loss), np.int32)
            counts[loss] = kept.counts
            mask = (kept.ids, counts)
        routing, layers, experts = None, None, None
        if self._routing is not None:
            routing, layers, experts = (
                self._routing.stitch(len(self.tokens)),
                self._routing.layers,
                self._routing.num_experts,
            )
        return Branch(
            self.tokens,
            loss,
            self._logprobs,
            routing=routing,
            head=head,
            mask=mask,
            layers=layers,
            num_experts=experts,
            meta=full,
            messages=messages,
        )

    def _add_routing(self, value: Any, total: int) -> None:
        """An engine's rows end with the last token it fed, so their number says where they start."""
        if self._routing is None:
            return
        if value is None:
            raise MissingField.of("routing", f"the engine returned none for {total} tokens", value=None)
        rows, stated = self._routing_rows(value, self._routing.layers)
        start = total - 1 - len(rows)
        if start < 0 or (stated is not None and stated != start) or start > self._covered:
            raise PayloadError.of(
                "routing",
                f"{len(rows)} rows for {total} tokens, of which {self._covered} have rows"
                + (f", said to start at {stated}" if stated is not None else ""),
                start,
                value=len(rows),
            )
        self._routing.add(rows, start=start)
        self._covered = total - 1

    def _routing_rows(self, value: Any, layers: tuple[int, ...]) -> tuple[NDArray[Any] | Encoded, int | None]:
        """Rows with one column per layer that has a router, and where they start, if the engine says so."""
        if self._decoder_layers in (None, len(layers)):
            return engine_rows(value, layers=len(layers), top_k=self._top_k)
        rows, stated = routed_experts(value, layers=self._decoder_layers, top_k=self._top_k)
        return rows[:, layers], stated

    def _add_head(self, generation: Generation, new: list[int]) -> None:
        if not self._head_k:
            return
        if generation.top_logprobs is None:
            raise MissingField.of("head", f"none for {len(new)} generated tokens", value=None)
        heads = Heads.of(generation.top_logprobs)
        if len(heads) != len(new):
            raise PayloadError.of("head", f"{len(heads)} rows for {len(new)} generated tokens", value=len(heads))
        rows = heads.rows(new, self._head_k)
        self._check_vocab("head", rows[0])
        self._heads.append(rows)

    def _add_mask(self, generation: Generation, new: list[int]) -> None:
        """No mask: the engine restricted nothing, as far as it knows; `Branch` refuses that on truncated sources."""
        if not self._with_mask:
            return
        given = generation.sampling_mask
        kept = KeptSets.unrestricted(len(new)) if given is None else KeptSets.of(given)
        if len(kept) != len(new):
            raise PayloadError.of("mask", f"{len(kept)} kept sets for {len(new)} generated tokens", value=len(kept))
        self._check_vocab("mask", kept.ids)
        self._kept.append(kept)

    def _check_vocab(self, field: str, ids: ArrayLike) -> None:
        """An id beyond the model's vocabulary would be an index out of range in a rank, far from its cause."""
        if self._vocab is not None and np.size(ids) and (high := int(np.max(ids))) >= self._vocab:
            raise PayloadError.of(field, f"id {high} is outside the model's vocabulary of {self._vocab}", value=high)


def _version(label: Any) -> int:
    """The policy version of an engine's weight label: 7 of 7, "7" and "step-7"."""
    found = re.search(r"\d+$", str(label))
    if found is None:
        raise PayloadError.of("weight_versions", f"weight version {label!r} has no number", value=label)
    return int(found.group())
