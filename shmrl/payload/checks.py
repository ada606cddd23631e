"""The checks behind `Branch` and the wire forms: every array is looked at once, before anything is stored.

Called in env workers by branch.py, routing.py and forms.py. Each check raises PayloadError with field, position and
value.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmrl.errors import PayloadError
from shmrl.payload import _payload
from shmrl.payload.registry import Field, Ragged, get_field

LOGPROBS_MODES = ("raw", "processed")


@dataclass(frozen=True, slots=True)
class Rows:
    """The checked rows of one field: values [rows, *row shape], or flat values [n] with counts [rows] when ragged.

    Example: Rows(values=int32[6], counts=int32[3]) for the mask rows (5, 9), (5,) and (7, 7, 2)
    """

    values: Any  # an array, or the `Stitched` that stands for one
    counts: NDArray[np.int32] | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.values) if self.counts is None else len(self.counts)


def integers(value: ArrayLike, field: str, ndim: int, *, limit: int) -> NDArray[np.int32]:
    """`value` as contiguous int32 with all elements in [0, limit); PayloadError otherwise."""
    array = numbers(value, field, "iub")
    if array.ndim != ndim:
        raise PayloadError.of(field, f"{array.ndim} dimensions, expected {ndim}", value=array.shape)
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= limit:
            bad = low if low < 0 else high
            at = int(np.argmax(array.ravel() == bad))
            raise PayloadError.of(field, f"{bad} at position {at} is outside [0, {limit})", at, value=bad)
    return np.ascontiguousarray(array, np.int32)


def numbers(value: Any, field: str, kinds: str) -> NDArray[Any]:
    """`value` as an array of one of the numpy `kinds`; refuses None and object arrays, naming where."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise PayloadError.of(field, f"not a rectangular array ({error})") from error
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.aligned:  # what C reads by the element
        array = array.copy()
    if array.dtype.kind in kinds or array.size == 0:
        return array if array.dtype.kind in kinds else array.astype("f4" if "f" in kinds else "i4")
    if array.dtype.kind == "O":
        for position, item in np.ndenumerate(array):
            if not isinstance(item, (int, float, np.number)):
                raise PayloadError.of(field, f"{item!r} at position {position} is not a number", position, value=item)
    raise PayloadError.of(field, f"elements of type {array.dtype} (kinds allowed: {kinds})", value=str(array.dtype))


def check_finite(field: str, array: NDArray[Any]) -> None:
    """NaN and +inf are errors; -inf is a probability of zero and stays."""
    bad = np.isnan(array) | np.isposinf(array)
    if bad.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), array.shape))
        position = at[0] if len(at) == 1 else at
        raise PayloadError.of(field, f"{array[at]} at position {position}", position, value=float(array[at]))


def check_ids(field: str, rows: NDArray[Any], num_experts: int, first: int = 0) -> None:
    """Ids [R, L, K] in [0, num_experts) and distinct within a row: a capture buffer left at zero fails here.

    first: the token of row 0, for the message.
    """
    if not rows.size:
        return
    rows = np.ascontiguousarray(rows)
    code, where = _payload.check_ids(
        rows, type_code(rows.dtype), rows.size // rows.shape[-1], rows.shape[-1], num_experts
    )
    if code:
        at = tuple(int(i) for i in np.unravel_index(where, rows.shape))
        token = first + at[0]
        what = "repeats in its row" if code == -errno.EEXIST else f"is outside [0, {num_experts})"
        raise PayloadError.of(
            field,
            f"id {rows[at]} at token {token}, layer slot {at[1]}, column {at[2]} {what}: {rows[at[:2]].tolist()}",
            (token, *at[1:]),
            value=int(rows[at]),
        )


def type_code(dtype: np.dtype[Any]) -> int:
    """How the C side names an integer type: its size, negative when signed."""
    return -dtype.itemsize if dtype.kind == "i" else dtype.itemsize


def checked_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy; numpy values, which msgpack cannot carry, and unknown modes are errors."""
    for key, value in meta.items():
        if isinstance(value, np.generic):
            raise PayloadError.of("meta", f"{key!r} is a numpy {value.dtype}, give a plain number", key)
        if isinstance(value, np.ndarray):
            raise PayloadError.of("meta", f"{key!r} is an array; arrays go in `fields`", key)
    mode = meta.get("logprobs_mode")
    if mode is not None and mode not in LOGPROBS_MODES:
        raise PayloadError.of(
            "meta", f"logprobs_mode {mode!r} is none of {LOGPROBS_MODES}", "logprobs_mode", value=mode
        )
    return dict(meta)


def checked_loss_mask(value: ArrayLike, T: int) -> NDArray[np.bool_]:
    """bool [T] of zeros and ones."""
    array = integers(value, "loss_mask", 1, limit=2)
    if len(array) != T:
        raise PayloadError.of("loss_mask", f"{len(array)} positions for {T} tokens", value=len(array))
    return array.astype(np.bool_)


def checked_logprobs(value: ArrayLike, loss_mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """float32 [T]; what was sampled had a probability above zero."""
    array = np.ascontiguousarray(numbers(value, "logprobs", "fiu"), np.float32)
    if array.shape != loss_mask.shape:
        raise PayloadError.of("logprobs", f"shape {array.shape} for {len(loss_mask)} tokens", value=array.shape)
    check_finite("logprobs", array)
    missing = loss_mask & np.isneginf(array)
    if missing.any():
        at = int(np.argmax(missing))
        raise PayloadError.of("logprobs", f"-inf for the sampled token at position {at}", at, value=float("-inf"))
    return array


def checked_experts(
    given: Mapping[str, Any], num_experts: int | None, layers: Sequence[int] | None
) -> tuple[int, tuple[int, ...]]:
    """(num_experts or 0, global layer ids); routing needs the former, fields with layers default to the ids 0..L-1."""
    if "routing" in given and (num_experts is None or num_experts < 1):
        raise PayloadError.of("num_experts", f"routing needs num_experts, got {num_experts}", value=num_experts)
    if layers is None:
        layered = [value for name, value in given.items() if get_field(name).layer_axis == 0]
        shapes = [v.shape if hasattr(v, "shape") else numbers(v, "layers", "iufb").shape for v in layered]
        ids = tuple(range(shapes[0][1])) if shapes and len(shapes[0]) > 1 else ()
    else:
        ids = tuple(int(layer) for layer in layers)
    if len(set(ids)) != len(ids) or any(layer < 0 for layer in ids):
        raise PayloadError.of("layers", f"{list(ids)} are not distinct layer ids", value=ids)
    return int(num_experts or 0), ids


def by_field(routing: Any, head: Any, mask: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, by registered name; None means not captured."""
    given = {name: value for name, value in fields.items() if get_field(name) and value is not None}
    if routing is not None:
        given["routing"] = routing
    if head is not None:
        given["head_ids"], given["head_logprobs"] = _pair("head", head)
    if mask is not None:
        given["mask"] = _pair("mask", mask)
    if ("head_ids" in given) != ("head_logprobs" in given):
        raise PayloadError.of("head", "ids and logprobs come together")
    return given


def _pair(field: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise PayloadError.of(field, f"expected a pair of arrays, got {type(value).__name__}")
    return value[0], value[1]


def fixed_rows(field: Field, value: Any) -> Rows:
    """Rows of the registered shape and type; expert ids keep the type they came in until they are narrowed."""
    assert not isinstance(field.row_shape, Ragged)
    shape = field.row_shape
    array = numbers(value, field.name, "iu") if field.dtype is None else _elements(field.name, value, field.dtype)
    fits = array.ndim == 1 + len(shape) and all(
        not isinstance(want, int) or want == have for want, have in zip(shape, array.shape[1:], strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise PayloadError.of(field.name, f"shape {array.shape}, expected [rows, {wanted}]", value=array.shape)
    return Rows(array)


def _elements(name: str, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Contiguous, of the field's type; integers that would not survive the cast are errors."""
    array = numbers(value, name, "iuf" if dtype.kind == "f" else "iub")
    if dtype.kind in "iu" and array.dtype != dtype and array.size:
        limits = np.iinfo(dtype)
        bad = (array < limits.min) | (array > limits.max)
        if bad.any():
            at = int(np.argmax(bad))
            raise PayloadError.of(name, f"{array.flat[at]} does not fit in {dtype}", at, value=array.flat[at])
    return np.ascontiguousarray(array, dtype)


def ragged_rows(field: Field, value: Any, loss_mask: NDArray[np.bool_]) -> Rows:
    """(values, counts) with counts per row; fields aligned to sampled tokens give counts per token and keep theirs."""
    assert field.dtype is not None
    raw_values, raw_counts = _pair(field.name, value)
    counts = integers(raw_counts, f"{field.name} counts", 1, limit=2**31)
    values = _elements(field.name, raw_values, field.dtype)
    total = int(counts.sum(dtype=np.int64))
    if values.ndim != 1 or total != len(values):
        raise PayloadError.of(field.name, f"counts sum to {total}, there are {values.size} values", value=total)
    if field.cap is not None and counts.size and int(counts.max()) > field.cap:
        at = int(np.argmax(counts > field.cap))
        raise PayloadError.of(
            field.name, f"{counts[at]} values at position {at}, the cap is {field.cap}", at, value=int(counts[at])
        )
    if field.align == "sampled":
        counts = _sampled_counts(field.name, counts, loss_mask)
    return Rows(values, counts)


def _sampled_counts(name: str, counts: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    if len(counts) != len(loss_mask):
        raise PayloadError.of(name, f"{len(counts)} counts for {len(loss_mask)} tokens", value=len(counts))
    stray = (counts > 0) & ~loss_mask
    if stray.any():
        at = int(np.argmax(stray))
        raise PayloadError.of(
            name, f"{counts[at]} values at position {at}, which is not a trained token", at, value=int(counts[at])
        )
    return np.ascontiguousarray(counts[loss_mask])


def check_negative(field: str, ids: NDArray[Any]) -> None:
    """Token ids start at 0."""
    if ids.size and int(ids.min()) < 0:
        at = tuple(int(i) for i in np.unravel_index(int(np.argmin(ids)), ids.shape))
        raise PayloadError.of(field, f"negative id {ids[at]} at {at}", at, value=int(ids[at]))


def check_sampled_first(ids: NDArray[Any], sampled: NDArray[np.int32]) -> None:
    """Column 0 of a head that says so is the sampled token."""
    wrong = ids[:, 0] != sampled if ids.shape[1] else np.ones(len(ids), np.bool_)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise PayloadError.of(
            "head",
            f"column 0 of sampled row {row} is {ids[row, :1].tolist()}, the sampled token is {sampled[row]}",
            row,
            value=ids[row, :1].tolist(),
        )


def truncation(meta: Mapping[str, Any]) -> str:
    """How the source's sampling was truncated, as text; empty if the whole vocabulary could be drawn."""
    top_p, top_k, min_p = (meta.get(key) for key in ("top_p", "top_k", "min_p"))
    cuts = {"top_p": top_p is not None and top_p < 1, "top_k": top_k is not None and top_k > 0, "min_p": bool(min_p)}
    return ", ".join(f"{key}={meta[key]}" for key, cut in cuts.items() if cut)
