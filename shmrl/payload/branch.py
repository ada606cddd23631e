"""`Branch`: one trainable root-to-leaf path with its arrays, checked. Nothing unchecked is ever stored.

Made by the env worker (usually through `BranchBuilder`) when an episode ends, consumed by `encode`. Holds
references to the caller's arrays where their types allow it; narrowing happens later, straight into the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shmrl.errors import MissingField, PayloadError
from shmrl.payload import _payload
from shmrl.payload.checks import (
    Rows,
    by_field,
    check_finite,
    check_ids,
    check_negative,
    check_sampled_first,
    checked_experts,
    checked_logprobs,
    checked_loss_mask,
    checked_meta,
    fixed_rows,
    integers,
    ragged_rows,
    truncation,
)
from shmrl.payload.registry import Field, all_fields, get_field
from shmrl.payload.routing import Stitched


class Branch:
    """One branch of an episode, validated.

    Args:
        tokens: ints [T]; loss_mask: bool [T], set where the policy sampled a token that trains; logprobs: float [T],
            the sampled token's own, 0 elsewhere.
        routing: ints [R, L, K] with R = T - 1 (the last token was never fed) or T; needs num_experts. What `Routing`
            stitched stays where it is, and its ids are checked when it is written. layers: the global ids of the L
            stored layers (default 0..L-1).
        head: (ids [S, K], logprobs [S, K]), S = set bits of loss_mask; with meta["head_has_sampled"] column 0 is the
            sampled token.
        mask: (ids [sum(counts)], counts [T]); 0 where nothing was sampled, or where the sampler kept everything.
        fields: registered fields by name: rows, or (values, counts) for ragged ones.
        meta: small values for the header: source, group, episode, task, reward, rewards, stop_reason, version_start,
            version_end, logprobs_mode, temperature, top_p, top_k, min_p, head_has_sampled, head_k, ...
        messages: the conversation, stored as text for whoever shows a rollout.

    Attributes: tokens int32 [T], loss_mask bool [T], logprobs float32 [T], T, S, R, rows (field name -> Rows), layers,
    num_experts, meta, messages.

    Raises PayloadError with field, position and value.

    Example:
        Branch([5, 6, 7], [0, 1, 1], [0.0, -0.1, -0.7], routing=np.ones((2, 1, 1), int), num_experts=8)
    """

    __slots__ = ("R", "S", "T", "layers", "logprobs", "loss_mask", "messages", "meta", "num_experts", "rows", "tokens")

    def __init__(
        self,
        tokens: ArrayLike,
        loss_mask: ArrayLike,
        logprobs: ArrayLike,
        *,
        routing: ArrayLike | None = None,
        head: tuple[ArrayLike, ArrayLike] | None = None,
        mask: tuple[ArrayLike, ArrayLike] | None = None,
        layers: Sequence[int] | None = None,
        num_experts: int | None = None,
        fields: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.meta = checked_meta(meta or {})
        self.messages = None if messages is None else list(messages)
        self.tokens = integers(tokens, "tokens", 1, limit=2**31)
        self.T = len(self.tokens)
        if not self.T:
            raise PayloadError.of("tokens", "a branch needs at least one token", value=0)
        self.loss_mask = checked_loss_mask(loss_mask, self.T)
        self.S = int(np.count_nonzero(self.loss_mask))
        self.logprobs = checked_logprobs(logprobs, self.loss_mask)
        given = by_field(routing, head, mask, fields or {})
        self.num_experts, self.layers = checked_experts(given, num_experts, layers)
        self.rows = {
            field.name: self._checked(field, given[field.name]) for field in all_fields() if field.name in given
        }
        self.R = self.rows["routing"].count if "routing" in self.rows else 0
        self._check_layers()
        self._check_head()
        self._check_mask()

    def _checked(self, field: Field, value: Any) -> Rows:
        if isinstance(value, Stitched):
            return self._stitched(field, value)
        rows = ragged_rows(field, value, self.loss_mask) if field.is_ragged else fixed_rows(field, value)
        self._check_count(field, rows.count)
        if field.dtype is None:
            check_ids(field.name, rows.values, self.num_experts)
        elif field.dtype.kind == "f":
            check_finite(field.name, rows.values)
        return rows

    def _stitched(self, field: Field, value: Stitched) -> Rows:
        if value.num_experts != self.num_experts:
            raise PayloadError.of(field.name, f"rows of {value.num_experts} experts for {self.num_experts}")
        self._check_count(field, len(value))
        return Rows(value)

    def _check_count(self, field: Field, count: int) -> None:
        if field.align == "sampled" and count != self.S:
            raise PayloadError.of(field.name, f"{count} rows for {self.S} sampled tokens", value=count)
        if field.align == "input" and count not in (self.T - 1, self.T):
            raise PayloadError.of(
                field.name,
                f"{count} rows for {self.T} tokens; expected {self.T - 1} (the last token was never fed) or "
                f"{self.T} ({self._name()})",
                value=count,
            )

    def _check_layers(self) -> None:
        for name, rows in self.rows.items():
            axis = get_field(name).layer_axis
            if axis is not None and rows.values.shape[1 + axis] != len(self.layers):
                raise PayloadError.of(
                    name,
                    f"rows of shape {rows.values.shape[1:]} for {len(self.layers)} layer ids",
                    value=rows.values.shape[1 + axis],
                )

    def _check_head(self) -> None:
        if "head_ids" not in self.rows:
            return
        ids, logprobs = self.rows["head_ids"].values, self.rows["head_logprobs"].values
        if ids.shape != logprobs.shape:
            raise PayloadError.of("head", f"ids {ids.shape}, logprobs {logprobs.shape}", value=logprobs.shape)
        check_negative("head", ids)
        has_sampled = bool(self.meta.get("head_has_sampled"))
        k = self.meta.get("head_k")
        if k is not None and ids.shape[1] != k + has_sampled:
            wanted = f"{k + has_sampled} columns (top-{k}{' behind the sampled token' if has_sampled else ''})"
            raise PayloadError.of("head", f"{ids.shape[1]} columns, expected {wanted}", value=ids.shape[1])
        if has_sampled and self.S:
            check_sampled_first(ids, self.tokens[self.loss_mask])

    def _check_mask(self) -> None:
        truncated = truncation(self.meta)
        rows = self.rows.get("mask")
        if rows is None or rows.counts is None:
            if truncated and self.S:
                raise MissingField.of(
                    "mask",
                    f"{self._name()} was sampled with {truncated} and has no sampling mask for its {self.S} "
                    "sampled tokens",
                )
            return
        positions = np.flatnonzero(self.loss_mask)
        sampled = self.tokens[self.loss_mask]
        if truncated and (rows.counts == 0).any():
            at = int(positions[np.argmin(rows.counts)])
            kind = PayloadError if rows.counts.any() else MissingField
            raise kind.of(
                "mask", f"no kept ids at position {at} of {self._name()}, sampled with {truncated}", at, value=0
            )
        check_negative("mask", rows.values)
        bad = _payload.check_kept(rows.values, rows.counts, sampled)
        if bad >= 0:
            at, token = int(positions[bad]), int(sampled[bad])
            raise PayloadError.of(
                "mask", f"the sampled id {token} at position {at} is not in its kept set", at, value=token
            )

    def _name(self) -> str:
        parts = [str(self.meta[key]) for key in ("source", "group", "episode", "branch") if key in self.meta]
        return "/".join(parts) or "the branch"
