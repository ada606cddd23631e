"""Sizes as people write them. One reading for the configuration and for `Arena.create`; imports nothing of shmrl."""

from __future__ import annotations

import re

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
