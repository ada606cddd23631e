"""Routed experts in the forms that engines send -> arrays, sizes checked before anything is kept.

Called by the env worker's `BranchBuilder` with what `shmrl.inference.client` received. vLLM sends routed experts as
base64 of a .npy, SGLang as base64 of raw int32, proxies as a dict {data, shape, start, dtype}. Base64 stays as it is
until its rows are written into a block, in C, without the interpreter lock. Whatever is none of these is refused with
its first bytes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmrl.errors import PayloadError
from shmrl.payload import _payload

_NPY_MAGIC = b"\x93NUMPY"
_NPY_BASE64 = "k05VTVBZ"
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{48,}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows [n, L, K] that are still base64. They are decoded where they are to lie, any range of them.

    Attributes: text; skip: decoded bytes before the first row (the header of a .npy); dtype; shape: (n, L, K).

    Example: Encoded("k05VTVBZ...", skip=128, dtype=uint8, shape=(17, 4, 2))
    """

    text: str
    skip: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def into(self, out: NDArray[Any], first: int = 0) -> None:
        """Rows first .. first + len(out) into `out`, C-contiguous, of this type. PayloadError where it is no base64."""
        row_nbytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
        _decode_at(self.text, self.skip + first * row_nbytes, out.reshape(-1).view(np.uint8))

    def rows(self, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Rows first .. last as an array of their own."""
        out = np.empty(((self.shape[0] if last is None else last) - first, *self.shape[1:]), self.dtype)
        self.into(out, first)
        return out


def routed_experts(
    value: Any, *, layers: int | None = None, top_k: int | None = None
) -> tuple[NDArray[Any], int | None]:
    """(rows [n, L, K], start or None) of any known wire form of routed experts, decoded: see `engine_rows`.

    Example: routed_experts(choice["routed_experts"]) -> (uint8[17, 4, 2], None)
    """
    rows, start = engine_rows(value, layers=layers, top_k=top_k)
    return (rows.rows() if isinstance(rows, Encoded) else rows), start


def engine_rows(
    value: Any, *, layers: int | None = None, top_k: int | None = None
) -> tuple[NDArray[Any] | Encoded, int | None]:
    """(rows [n, L, K], start or None) of any known wire form of routed experts; base64 stays as it is.

    Args:
        value: str: base64 of a .npy (vLLM) or of raw int32 (SGLang; needs layers and top_k); dict {data, shape, start,
            dtype} with data as base64 or bytes; or an integer array [n, L, K].
        layers, top_k: what the model has; checked where given.
    """
    start: int | None = None
    rows: NDArray[Any] | Encoded
    if isinstance(value, Mapping):
        rows, start = _from_dict(value)
    elif isinstance(value, np.ndarray):
        rows = value
    elif isinstance(value, str) and value.startswith(_NPY_BASE64):
        rows = _from_npy(value)
    elif isinstance(value, str) and layers and top_k:
        rows = _encoded(value, 0, np.dtype("<i4"), (-1, layers, top_k))
    else:
        raise PayloadError.of(
            "routing", f"unknown wire form {type(value).__name__}: {first_bytes(value)}", value=first_bytes(value)
        )
    _check_rows(rows, layers, top_k)
    return rows, start


def _decode_at(text: str, at: int, out: NDArray[np.uint8]) -> None:
    """Bytes at .. at + out.size of what `text` encodes; whole groups of three go to their place at once."""
    group, ahead = at // 3, at % 3
    if ahead:
        out = _part(text, group, ahead, out)
        group += 1
    groups = out.size // 3
    _decode(text, group, out[: 3 * groups])
    if out.size % 3:
        _part(text, group + groups, 0, out[3 * groups :])


def _part(text: str, group: int, ahead: int, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes of one group from `ahead` on, as many as fit in `out`; the rest of `out`."""
    part = np.zeros(3, np.uint8)
    _decode(text, group, part)
    taken = part[ahead : ahead + out.size]
    out[: taken.size] = taken
    return out[taken.size :]


def _decode(text: str, group: int, out: NDArray[np.uint8]) -> None:
    """Groups from number `group` on into `out`, 3 bytes for each; PayloadError at the first character that is none."""
    stop = 4 * group + out.size // 3 * 4
    written = _payload.decode_base64(text, out, 4 * group, stop)
    if written < 0:
        raise not_base64(text, -1 - written)
    if written < out.size and stop < len(text):
        raise not_base64(text, stop - 1)  # padding before the end


def not_base64(text: str, position: int) -> PayloadError:
    """What to raise for a text with something else at `position`."""
    return PayloadError.of(
        "routing",
        f"not base64: {len(text)} characters, stopped at {position} ({text[position : position + 1]!r}); "
        f"starts with {first_bytes(text)}",
        position,
        value=first_bytes(text),
    )


def first_bytes(value: Any) -> str:
    """The beginning of a value nobody understood, for an error message."""
    return repr((value if isinstance(value, (str, bytes)) else repr(value))[:32])


def _from_npy(text: str) -> Encoded:
    """An .npy of version 1 or 2, C order, integers."""
    head = _decoded_start(text, 12)
    if head[:6] != _NPY_MAGIC or head[6] not in (1, 2):
        raise PayloadError.of("routing", f"no .npy of version 1 or 2: {head!r}", value=head)
    size, body = (
        (int.from_bytes(head[8:10], "little"), 10) if head[6] == 1 else (int.from_bytes(head[8:12], "little"), 12)
    )
    raw = _decoded_start(text, body + size)[body:]
    dtype, shape = _npy_layout(raw)
    return _encoded(text, body + size, dtype, shape)


@lru_cache(maxsize=64)
def _npy_layout(raw: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """What the text of a .npy's header says. Answers of one length have the same, and parsing it takes long."""
    try:
        header = ast.literal_eval(raw.decode("latin1").strip())
        dtype, shape, fortran = np.dtype(header["descr"]), tuple(header["shape"]), header["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise PayloadError.of("routing", f"unreadable .npy header {raw[:64]!r}", value=raw[:64]) from error
    if fortran:
        raise PayloadError.of("routing", "the .npy is in Fortran order", value=header)
    return dtype, shape


def _from_dict(value: Mapping[str, Any]) -> tuple[NDArray[Any] | Encoded, int | None]:
    missing = {"data", "shape", "dtype"} - value.keys()
    if missing:
        raise PayloadError.of("routing", f"the dict lacks {sorted(missing)}: {sorted(value)}", value=sorted(value))
    data, start = value["data"], value.get("start")
    try:
        dtype, shape = np.dtype(value["dtype"]), tuple(int(n) for n in value["shape"])
    except (TypeError, ValueError) as error:
        raise PayloadError.of("routing", f"dtype {value['dtype']!r}, shape {value['shape']!r}: {error}") from error
    stated = None if start is None else int(start)
    if isinstance(data, str):
        return _encoded(data, 0, dtype, shape), stated
    raw = np.frombuffer(data, np.uint8)
    full = _full_shape(raw.size, dtype, shape, lambda: raw[:64].tobytes())
    return (raw.view(dtype).reshape(full) if raw.size else np.empty(full, dtype)), stated


def _decoded_start(text: str, nbytes: int) -> bytes:
    """The first bytes of what `text` encodes, fewer where it ends."""
    out = np.empty(min(nbytes, _decoded_size(text)), np.uint8)
    _decode_at(text, 0, out)
    return out.tobytes()


def _decoded_size(text: str) -> int:
    if len(text) % 4:
        raise not_base64(text, len(text))
    return len(text) // 4 * 3 - len(text[-2:]) + len(text[-2:].rstrip("="))


def _encoded(text: str, skip: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Encoded:
    nbytes = _decoded_size(text) - skip
    return Encoded(text, skip, dtype, _full_shape(nbytes, dtype, shape, lambda: _decoded_start(text, skip + 64)[skip:]))


def _full_shape(
    nbytes: int, dtype: np.dtype[Any], shape: tuple[int, ...], start: Callable[[], bytes]
) -> tuple[int, ...]:
    """`shape` with its -1, if any, worked out: byte count = prod(shape) * itemsize, else an error with `start()`."""
    if dtype.kind not in "iu":
        raise PayloadError.of("routing", f"elements of type {dtype}, expected integers", value=str(dtype))
    row = int(np.prod([n for n in shape if n >= 0], dtype=np.int64)) * dtype.itemsize
    wanted = row if -1 not in shape else nbytes // row * row if row else 0
    if nbytes != wanted:
        first = start()
        twice = "; this is base64 of base64" if _BASE64.match(first) else ""
        raise PayloadError.of(
            "routing",
            f"{nbytes} bytes for shape {shape} of {dtype} ({row} bytes){twice}; starts with {first[:16]!r}",
            value=nbytes,
        )
    return tuple(nbytes // row if n < 0 and row else max(n, 0) for n in shape)


def _check_rows(rows: NDArray[Any] | Encoded, layers: int | None, top_k: int | None) -> None:
    good = (
        rows.ndim == 3
        and layers in (None, rows.shape[1])
        and top_k in (None, rows.shape[2])
        and rows.dtype.kind in "iu"
    )
    if not good:
        wanted = f"integers [n, {layers or 'L'}, {top_k or 'K'}]"
        raise PayloadError.of("routing", f"{rows.dtype} {rows.shape}, expected {wanted}", value=rows.shape)
