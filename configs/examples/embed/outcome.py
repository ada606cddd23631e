"""What the examples here are compared by: a SHA-256 of every sequence that a trainer got."""

import hashlib
import json
from itertools import accumulate


def fingerprints(batch) -> list[str]:
    """A SHA-256 per sequence, of every recorded row that `assemble` copied; how it was packed plays no part."""
    arrays, found = batch.arrays(), []
    ends = list(accumulate(batch.seq_lens.tolist()))
    for start, stop in zip([0, *ends], ends, strict=False):
        digest = hashlib.sha256()
        for name in sorted(arrays.keys() - {"seq_lens"}):
            rows, counts, covered = arrays[name], arrays.get(f"{name}/counts"), arrays.get(f"{name}/covered")
            if counts is not None:
                rows = rows[counts[:start].sum() : counts[:stop].sum()]
            elif covered is not None:
                rows = rows[start:stop][covered[start:stop]]  # elsewhere is what fills a gap
            else:
                rows = rows[start:stop]
            digest.update(f"{name} {rows.dtype} {rows.shape}".encode() + rows.tobytes())
        found.append(digest.hexdigest())
    return found


def report(name: str, seen: list[str], arena) -> None:
    """The line that all examples end with: the same SHA-256 in each, and an arena without blocks."""
    whole = hashlib.sha256("".join(sorted(seen)).encode()).hexdigest()
    print(json.dumps({"example": name, "sequences": len(seen), "sha256": whole, "blocks": arena.stats()["blocks"]}))
