"""Sizes as people write them. Used by the configuration and the arena's command line."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: int | str) -> int:
    """Bytes of 8589934592, "8GiB", "500 MB". ValueError for anything else."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"not a size: {text!r} (examples: 8GiB, 500MB, 1073741824)")
    return int(float(match[1]) * _UNITS[match[2].lower()])
