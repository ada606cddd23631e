"""Block descriptors and process entries as values: what statistics, ls, holders and the inspectors are made of.

Works on copies of raw bytes (csrc/arena_layout.h): in attached processes and in inspectors of dead arenas alike.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

_BLOCK = struct.Struct("<QQQQQQIIII4Q4Q112sqQ")
_PROCESS = struct.Struct("<QQQQQ88s")
STATES = ("free", "writing", "ready", "retired", "freeing")
ORPHAN, SHIPPED, DISCARDED, SPILLED, UNCHECKED = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class Process:
    """One attached (or dead and not yet swept) process."""

    index: int
    pid: int
    name: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block that is not free. `span_bytes` is what it takes from the arena, `nbytes` its payload.

    Example: BlockInfo(slot=3, generation=0, state="ready", flags=("shipped",), owner=1, nbytes=6291456,
             span_bytes=6356992, tag="run/reverse-text/g4/e17", age_s=12.5, readers=3, done=(0,), ...)
    """

    slot: int
    generation: int
    state: str
    flags: tuple[str, ...]
    owner: int | None
    nbytes: int
    span_bytes: int
    tag: str
    birth_ns: int
    readers: int
    done: tuple[int, ...]
    held_by: tuple[int, ...]
    step: int | None
    offset: int
    nonce: int
    tail_nbytes: int

    @property
    def source(self) -> str:
        """Second component of the tag run/source/group/episode."""
        parts = self.tag.split("/")
        return parts[1] if len(parts) > 1 else ""

    def row(self, now_ns: int, names: dict[int, str]) -> dict[str, Any]:
        """As a dict for people: ages instead of clocks, names instead of indices."""
        out = asdict(self)
        for key in ("birth_ns", "offset", "nonce", "tail_nbytes"):
            del out[key]
        out["age_s"] = round(max(0, now_ns - self.birth_ns) / 1e9, 3)
        out["owner"] = None if self.owner is None else names.get(self.owner, f"process {self.owner}")
        out["held_by"] = [names.get(p, f"process {p}") for p in self.held_by]
        return out


def blocks(raw: bytes) -> Iterator[BlockInfo]:
    """Every block that is not free, in slot order. A descriptor caught in the middle of a change may be skipped."""
    for slot in range(len(raw) // 256):
        found = block_at(raw, slot)
        if found is not None:
            yield found


def block_at(raw: bytes, slot: int) -> BlockInfo | None:
    """The block in a slot; None if it is free, on its way there, or beyond the table."""
    if 256 * slot >= len(raw) or raw[256 * slot + 3] >> 4 not in (1, 2, 3):
        return None
    return _block(slot, _BLOCK.unpack_from(raw, 256 * slot))


def processes(raw: bytes) -> dict[int, Process]:
    """The used entries by index."""
    out = {}
    for index in range(len(raw) // 128):
        used, _, _, pid, since, name = _PROCESS.unpack_from(raw, 128 * index)
        if used:
            out[index] = Process(index, pid, name.split(b"\0", 1)[0].decode(errors="replace"), since)
    return out


def names(table: dict[int, Process]) -> dict[int, str]:
    """index -> "name (pid)"."""
    return {index: f"{p.name} ({p.pid})" for index, p in table.items()}


def _bits(words: tuple[int, ...]) -> tuple[int, ...]:
    value = sum(word << 64 * i for i, word in enumerate(words))
    return tuple(i for i in range(value.bit_length()) if value >> i & 1) if value else ()


def _block(slot: int, f: tuple[Any, ...]) -> BlockInfo:
    word, flags = f[0], f[0] >> 16 & 0xFFF
    named = (
        (ORPHAN, "orphan"),
        (SHIPPED, "shipped"),
        (DISCARDED, "discarded"),
        (SPILLED, "spilled"),
        (UNCHECKED, "unchecked"),
    )
    return BlockInfo(
        slot=slot,
        generation=word >> 32,
        state=STATES[word >> 28 & 15],
        flags=tuple(name for bit, name in named if flags & bit),
        owner=None if flags & ORPHAN else word & 0xFFFF,
        nbytes=f[2],
        span_bytes=f[5],
        tag=f[18].split(b"\0", 1)[0].decode(errors="replace"),
        birth_ns=f[4],
        readers=f[6],
        done=_bits(f[14:18]),
        held_by=_bits(f[10:14]),
        step=None if f[19] < 0 else f[19],
        offset=f[1],
        nonce=f[3],
        tail_nbytes=f[7],
    )


# ------------------------------------------------------------------------------------------------------------ grouping

KEYS: dict[str, Callable[[BlockInfo, dict[int, str]], str]] = {
    "source": lambda row, who: row.source,
    "step": lambda row, who: "" if row.step is None else str(row.step),
    "holder": lambda row, who: _holder(row, who),
}


def _holder(row: BlockInfo, who: dict[int, str]) -> str:
    """One name per block: the first reader of a freed one, else the owner, else "orphans"."""
    index = row.held_by[0] if row.state == "retired" and row.held_by else row.owner
    return "orphans" if index is None else who.get(index, f"process {index}")


def grouped(rows: Iterable[BlockInfo], by: str, who: dict[int, str]) -> dict[str, dict[str, int]]:
    """{key: {"blocks", "bytes"}}; every block counts under exactly one key."""
    out: dict[str, dict[str, int]] = {}
    for row in rows:
        count(out, KEYS[by](row, who), row.span_bytes)
    return out


def count(out: dict[str, dict[str, int]], key: str, nbytes: int) -> None:
    """Adds one block of nbytes under a key."""
    entry = out.setdefault(key, {"blocks": 0, "bytes": 0})
    entry["blocks"] += 1
    entry["bytes"] += nbytes
