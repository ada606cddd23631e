"""Engine wire forms -> arrays. One function per kind of value, each checking sizes before anything is kept.

Called by the env worker's `BranchBuilder` with what `shmrl.inference.client` received. vLLM sends routed experts as
base64 of a .npy, SGLang as base64 of raw int32, proxies as a dict {data, shape, start, dtype}; heads and masks come as
JSON lists. Base64 is decoded in C without the interpreter lock. Whatever is none of these is refused with its first
bytes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import PayloadError
from shmrl.payload import _payload

EXCLUDED = -9000.0
"""Log-probabilities at or below this are -inf: vLLM's JSON has -9999.0 for tokens that could not be drawn."""
_NPY_MAGIC = b"\x93NUMPY"
_NPY_BASE64 = "k05VTVBZ"
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{48,}")


def routed_experts(
    value: Any, *, layers: int | None = None, top_k: int | None = None
) -> tuple[NDArray[Any], int | None]:
    """(rows [n, L, K], start or None) of any known wire form of routed experts.

    Args:
        value: str: base64 of a .npy (vLLM) or of raw int32 (SGLang; needs layers and top_k); dict {data, shape, start,
            dtype} with data as base64 or bytes; or an integer array [n, L, K].
        layers, top_k: what the model has; checked where given.

    Example: routed_experts(choice["routed_experts"]) -> (uint8[17, 4, 2], None)
    """
    start: int | None = None
    if isinstance(value, Mapping):
        rows, start = _from_dict(value)
    elif isinstance(value, np.ndarray):
        rows = value
    elif isinstance(value, str) and value.startswith(_NPY_BASE64):
        rows = _from_npy(decode_base64(value, "routing"))
    elif isinstance(value, str) and layers and top_k:
        rows = _shaped(decode_base64(value, "routing"), np.dtype("<i4"), (-1, layers, top_k))
    else:
        raise PayloadError.of(
            "routing", f"unknown wire form {type(value).__name__}: {first_bytes(value)}", value=first_bytes(value)
        )
    _check_rows(rows, layers, top_k)
    return rows, start


def decode_base64(text: str | bytes, field: str) -> NDArray[np.uint8]:
    """The bytes of standard base64 as uint8 [n]; PayloadError at the first character that is none."""
    out = np.empty(len(text) // 4 * 3, np.uint8)
    written = _payload.decode_base64(text, out)
    if written < 0:
        position = -1 - written
        raise PayloadError.of(
            field,
            f"not base64: {len(text)} characters, stopped at {position} ({text[position : position + 1]!r}); "
            f"starts with {first_bytes(text)}",
            position,
            value=first_bytes(text),
        )
    return out[:written]


def first_bytes(value: Any) -> str:
    """The beginning of a value nobody understood, for an error message."""
    raw = (
        value
        if isinstance(value, (str, bytes))
        else bytes(value[:32])
        if isinstance(value, np.ndarray)
        else repr(value)
    )
    return repr(raw[:32])


def _from_npy(raw: NDArray[np.uint8]) -> NDArray[Any]:
    """An .npy of version 1 or 2, C order, integers; the array is a view of `raw`."""
    head = raw[:12].tobytes()
    if head[:6] != _NPY_MAGIC or head[6] not in (1, 2):
        raise PayloadError.of("routing", f"no .npy of version 1 or 2: {head!r}", value=head)
    size, body = (
        (int.from_bytes(head[8:10], "little"), 10) if head[6] == 1 else (int.from_bytes(head[8:12], "little"), 12)
    )
    text = raw[body : body + size].tobytes()
    try:
        header = ast.literal_eval(text.decode("latin1").strip())
        dtype, shape, fortran = np.dtype(header["descr"]), tuple(header["shape"]), header["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise PayloadError.of("routing", f"unreadable .npy header {text[:64]!r}", value=text[:64]) from error
    if fortran:
        raise PayloadError.of("routing", "the .npy is in Fortran order", value=header)
    return _shaped(raw[body + size :], dtype, shape)


def _from_dict(value: Mapping[str, Any]) -> tuple[NDArray[Any], int | None]:
    missing = {"data", "shape", "dtype"} - value.keys()
    if missing:
        raise PayloadError.of("routing", f"the dict lacks {sorted(missing)}: {sorted(value)}", value=sorted(value))
    data = value["data"]
    raw = decode_base64(data, "routing") if isinstance(data, str) else np.frombuffer(data, np.uint8)
    start = value.get("start")
    return _shaped(raw, np.dtype(value["dtype"]), tuple(value["shape"])), None if start is None else int(start)


def _shaped(raw: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`raw` read as `shape`, one dimension of which may be -1: byte count = prod(shape) * itemsize, or an error."""
    if dtype.kind not in "iu":
        raise PayloadError.of("routing", f"elements of type {dtype}, expected integers", value=str(dtype))
    row = int(np.prod([n for n in shape if n >= 0], dtype=np.int64)) * dtype.itemsize
    wanted = row if -1 not in shape else raw.size // row * row if row else 0
    if raw.size != wanted:
        twice = "; this is base64 of base64" if _BASE64.match(raw[:64].tobytes()) else ""
        raise PayloadError.of(
            "routing",
            f"{raw.size} bytes for shape {shape} of {dtype} ({row} bytes){twice}; starts with {raw[:16].tobytes()!r}",
            value=raw.size,
        )
    if raw.size == 0:
        return np.empty([max(n, 0) for n in shape], dtype)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def _check_rows(rows: NDArray[Any], layers: int | None, top_k: int | None) -> None:
    good = (
        rows.ndim == 3
        and layers in (None, rows.shape[1])
        and top_k in (None, rows.shape[2])
        and rows.dtype.kind in "iu"
    )
    if not good:
        wanted = f"integers [n, {layers or 'L'}, {top_k or 'K'}]"
        raise PayloadError.of("routing", f"{rows.dtype} {rows.shape}, expected {wanted}", value=rows.shape)


# --------------------------------------------------------------------------------------------------- heads and masks


TopLogprobs = Sequence[tuple[Sequence[int], Sequence[float]]]
"""(ids, log-probabilities) per sampled token, the sampled token first."""


def logprobs_content(content: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float], TopLogprobs]:
    """(token ids, logprobs, top logprobs) of `logprobs.content`.

    Understands {"token": "token_id:N"} (vLLM 0.30) and {"token_id": N} (0.32). PayloadError where an entry has neither,
    or a log-probability is null.
    """
    tops = [entry.get("top_logprobs") or [] for entry in content]
    return (
        [_entry_id(entry, at) for at, entry in enumerate(content)],
        [_entry_logprob(entry, at) for at, entry in enumerate(content)],
        [([_entry_id(e, at) for e in top], [_entry_logprob(e, at) for e in top]) for at, top in enumerate(tops)],
    )


def _entry_id(entry: Mapping[str, Any], position: int) -> int:
    if entry.get("token_id") is not None:
        return int(entry["token_id"])
    token = entry.get("token")
    if not isinstance(token, str) or not token.startswith("token_id:"):
        raise PayloadError.of(
            "logprobs",
            f"no token id at position {position}: {token!r} (ask for return_tokens_as_token_ids)",
            position,
            value=token,
        )
    return int(token[9:])


def _entry_logprob(entry: Mapping[str, Any], position: int) -> float:
    value = entry.get("logprob")
    if value is None:
        raise PayloadError.of("logprobs", f"null at position {position}", position, value=None)
    return float(value)


def head_rows(top: TopLogprobs, sampled: Sequence[int] | None, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """A head [S, k] of the plain top-k, or [S, k + 1] with the sampled token first when `sampled` is given.

    An engine lists the sampled token first and then the others: k entries if it is among the top k, else k + 1.
    -9999.0 becomes -inf. PayloadError for None and for rows that have too few entries.

    Example: head_rows([([7, 2, 9], [-0.2, -2.1, -3.0])], [7], 3) -> [[7, 7, 2, 9]], [[-0.2, -0.2, -2.1, -3.0]]
    """
    ids = np.empty((len(top), k + (sampled is not None)), np.int32)
    logprobs = np.empty(ids.shape, np.float32)
    for at, (row, values) in enumerate(top):
        ids[at], logprobs[at] = _head_row(row, values, None if sampled is None else sampled[at], k, at)
    logprobs[logprobs <= EXCLUDED] = -np.inf
    return ids, logprobs


def _head_row(
    ids: Sequence[int], logprobs: Sequence[float], sampled: int | None, k: int, at: int
) -> tuple[list[int], list[float]]:
    if len(ids) != len(logprobs) or len(ids) < k or len(ids) > k + 1:
        raise PayloadError.of(
            "head",
            f"{len(ids)} ids and {len(logprobs)} logprobs at sampled row {at}, expected {k} or {k + 1}",
            at,
            value=len(ids),
        )
    for column, value in enumerate(logprobs):
        if value is None:
            raise PayloadError.of("head", f"None at position {(at, column)}", (at, column), value=None)
    entries = list(zip(ids, logprobs, strict=True))
    top = entries[1:] if len(entries) == k + 1 else sorted(entries, key=lambda entry: -entry[1])
    if sampled is not None:
        own = [entry for entry in entries if entry[0] == sampled][:1]
        if not own:
            raise PayloadError.of(
                "head", f"the sampled token {sampled} is not in row {at}: {list(ids)}", at, value=sampled
            )
        top = own + top
    return [entry[0] for entry in top], [entry[1] for entry in top]


def mask_rows(sampling_mask: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(ids [sum], counts [S]) of `sampling_mask`, one list of kept ids per sampled token.

    Example: mask_rows([[5, 9], [5], [7, 7, 2]]) -> [5, 9, 5, 7, 7, 2], [2, 1, 3]
    """
    for at, row in enumerate(sampling_mask):
        if row is None or any(item is None for item in row):
            raise PayloadError.of("mask", f"None at position {at}", at, value=None)
    counts = np.fromiter((len(row) for row in sampling_mask), np.int32, len(sampling_mask))
    ids = np.fromiter((item for row in sampling_mask for item in row), np.int32, int(counts.sum(dtype=np.int64)))
    return ids, counts


def mask_from_logprobs(top: TopLogprobs) -> list[list[int]]:
    """The kept sets of an engine that reports none: the ids whose *processed* log-probability is not -inf, sorted.

    Right only with processed log-probabilities and as many of them as top_k (vLLM 0.30; equal to 0.32's own mask).
    """
    return [sorted({int(i) for i, value in zip(ids, values, strict=True) if value > EXCLUDED}) for ids, values in top]
