"""Random kills for as long as one likes: storms over every backing, in full arenas that spill and whose sources have
shares, each of which must leave nothing in memory, no file, and to everybody his share.

`python -m tests.arena.soak MINUTES [SEED]` says a line per storm and ends with what was done; a fault is a traceback.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shmrl.arena import Arena, commands, files
from tests.arena.storm import settled

ROOT = Path(__file__).parents[2]
KILLS, WORKERS = 60, 4
BACKINGS = ("shm", "memfd", "file")
SHARES = {"s0": 0.25, "s1": "128KiB", "r": 0.25}  # sources of the storm; s2 has none


def one(backing, base, seed):
    """A storm over an arena of its own -> (blocks that were made in it, how many spilled, of the last ones)."""
    where = {"backing": backing, "base": base if backing == "file" else None, "spill_dir": base, "shares": SHARES}
    with Arena.create("1MiB", run_id="soak", **where) as arena:
        try:
            call = f"from tests.arena.storm import storm; storm({arena.address!r}, {KILLS}, {WORKERS}, {seed}, 'spill')"
            command = [sys.executable, "-c", call]
            done = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=300, check=False)
            assert done.stdout.strip() == f"kills={KILLS}", f"{backing}, seed {seed}: {done.stdout}{done.stderr}"
            spilled = sum(one["event"] == "spill" for one in commands.tail(arena.address))
            created = settled(arena)
            assert not list(Path(base).glob("*/*"))
        finally:
            arena.unlink()
        address = arena.address
    assert not [path for path in files.SHM.iterdir() if address.split(":")[1] in path.name]
    return created, spilled


def soak(seconds, seed=0):
    """Storms until the time is over, each backing once at least -> (storms, kills, blocks made, events of a spill)."""
    began, storms, created, spilled = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory() as base:
        while storms < len(BACKINGS) or time.monotonic() - began < seconds:
            backing = BACKINGS[storms % len(BACKINGS)]
            made, files_made = one(backing, base, seed + storms)
            storms, created, spilled = storms + 1, created + made, spilled + files_made
            told = f"{KILLS} kills, {made} blocks, at least {files_made} in files, nothing left"
            print(f"{backing} seed {seed + storms - 1}: {told}", flush=True)
        assert not list(Path(base).iterdir())
    return storms, KILLS * storms, created, spilled


if __name__ == "__main__":
    print(*soak(60 * float(sys.argv[1]), *map(int, sys.argv[2:])))
