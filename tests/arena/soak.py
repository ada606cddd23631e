"""Random kills for as long as one likes: storms over every backing, each of which must leave nothing.

`python -m tests.arena.soak MINUTES [SEED]` says a line per storm and ends with what was done; a fault is a traceback.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shmrl.arena import Arena, files
from tests.arena.storm import settled

ROOT = Path(__file__).parents[2]
KILLS, WORKERS = 60, 4
BACKINGS = ("shm", "memfd", "file")


def one(backing, base, seed):
    """A storm over an arena of its own -> blocks that were made in it."""
    with Arena.create("24MiB", backing=backing, base=base if backing == "file" else None, run_id="soak") as arena:
        try:
            call = f"from tests.arena.storm import storm; storm({arena.address!r}, {KILLS}, {WORKERS}, {seed})"
            command = [sys.executable, "-c", call]
            done = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=300, check=False)
            assert done.stdout.strip() == f"kills={KILLS}", f"{backing}, seed {seed}: {done.stdout}{done.stderr}"
            created = settled(arena)
        finally:
            arena.unlink()
        address = arena.address
    assert not [path for path in files.SHM.iterdir() if address.split(":")[1] in path.name]
    return created


def soak(seconds, seed=0):
    """Storms until the time is over, each backing once at least -> (storms, kills, blocks made)."""
    began, storms, created = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as base:
        while storms < len(BACKINGS) or time.monotonic() - began < seconds:
            backing = BACKINGS[storms % len(BACKINGS)]
            made = one(backing, base, seed + storms)
            storms, created = storms + 1, created + made
            print(f"{backing} seed {seed + storms - 1}: {KILLS} kills, {made} blocks, nothing left", flush=True)
        assert not list(Path(base).iterdir())
    return storms, KILLS * storms, created


if __name__ == "__main__":
    print(*soak(60 * float(sys.argv[1]), *map(int, sys.argv[2:])))
