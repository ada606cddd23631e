"""Sizes as people write them. One reading for the configuration and for `Arena.create`; imports nothing of shmrl."""

from __future__ import annotations

import re
from collections.abc import Mapping

PAGE = 65536  # bytes of the arena that are handed out at once (SRL_PAGE in csrc/); a share below it would hold nothing
NAMED_SHARES, LONGEST_SHARE = 15, 47  # csrc/arena_layout.h: one more is unnamed; bytes of a name
_UNITS = {"": 1, "b": 1}
_UNITS |= {letter + tail: 1000 ** (i + 1) for i, letter in enumerate("kmgt") for tail in ("", "b")}
_UNITS |= {f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgt")}


def parse_bytes(size: int | str) -> int:
    """Bytes of 8589934592, "8GiB" (powers of 1024), "500 MB" or "1.5g" (powers of 1000). ValueError otherwise."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a size: {size!r} (examples: 8GiB, 500MB, 1073741824)")
    return int(float(match[1]) * unit)


def size(nbytes: float) -> str:
    """A size as people read it. Example: size(3 << 29) == '1.5 GiB'"""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


def parse_shares(shares: Mapping[str, float | int | str], capacity: int) -> dict[str, int]:
    """Bytes by source of {"math": 0.5, "code": "2GiB"}: fractions of `capacity` (floats), or sizes. ValueError.

    >>> parse_shares({"math": 0.5, "code": "1GiB"}, 4 << 30)
    {'math': 2147483648, 'code': 1073741824}
    """
    if len(shares) > NAMED_SHARES:
        raise ValueError(f"shares of {len(shares)} sources: at most {NAMED_SHARES}")
    out = {source: _share(source, given, capacity) for source, given in shares.items()}
    if (total := sum(out.values())) > capacity:
        raise ValueError(f"shares of {total:,} bytes together ({out}) exceed the capacity of {capacity:,}")
    return out


def _share(source: str, given: float | int | str, capacity: int) -> int:
    if not 1 <= len(source.encode()) <= LONGEST_SHARE or "/" in source or "\0" in source:
        raise ValueError(f"a share for {source!r}: a source's name has 1 to {LONGEST_SHARE} bytes, no '/' and no NUL")
    if isinstance(given, float):
        if not 0 < given <= 1:
            raise ValueError(f"share {given} of {source!r}: a fraction is above 0 and at most 1.0")
        return int(given * capacity)
    if (nbytes := parse_bytes(given)) < PAGE:
        raise ValueError(f"share of {nbytes} bytes for {source!r}: at least {PAGE}, or a fraction up to 1.0")
    return nbytes
