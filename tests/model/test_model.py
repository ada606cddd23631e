"""The arena's protocol, exhaustively: no fault as it is built, and each way in which it was wrong is still found.

word.c: word, holders, sweep and claim; alloc.c: lock, takeover, rebuild, pending frees, files of spilled blocks;
done.c: who may say done().
"""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent

LEAK = "leak: a retired block without a holder"
BROKEN = {
    "word": {
        "undo only clears the bit": {LEAK},
        "sweep only clears bits": {LEAK},
        "sweep finishes what it cleared": {LEAK},
        "claim without sweep": {LEAK},
        "shared bit before the private count": {"use after free"},
        "sweeper without a byte of its own": {"use after free"},
        "sweep leaves done to the readers": {"leak: every reader is done"},
        "the word read before the bit is set": {"use after free"},
    },
    "alloc": {
        "free at once, the page later": {"the page of a block is in the map"},
        "takeover without a sequence": {"two owners of the lock"},
        "takeover by timeout": {"two owners of the lock"},
        "the word before the file": {"leak: a file without its block"},
        "a rebuild leaves the file": {"leak: a file without its block"},
        "the link before the word": {"the rebuild finds a block without a page"},
        "pending without a second look": {"leak: a freed block that nobody returns"},
        "sweep leaves the lock": {"a live process waits for the lock for ever"},
    },
}
SCENARIOS = {"word": 10, "alloc": 7}


def lines_of(model, directory):
    """What a model prints."""
    binary = directory / model
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", binary, HERE / f"{model}.c"], check=True)
    return subprocess.run([binary], capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()


@pytest.mark.parametrize("model", BROKEN)
def test_every_interleaving_and_kill(model, tmp_path):
    verdicts, states = {}, 0
    for line in lines_of(model, tmp_path):
        protocol, rest = line.split(" | ")
        _, found = rest.rsplit(": ", 1) if rest.endswith("ok") else rest.split(": ", 1)
        count, verdict = found.split(" states, ")
        verdicts.setdefault(protocol, []).append(verdict)
        states += int(count)
    assert verdicts.pop("as built") == ["ok"] * SCENARIOS[model]
    assert {protocol: set(found) for protocol, found in verdicts.items()} == BROKEN[model]
    assert states > 50_000


def test_who_may_say_done(tmp_path):
    assert lines_of("done", tmp_path) == [
        "as built: index, ledger counts, ships again: 114 orders, 0 freed before a rank had read, 0 never freed",
        "process slot, a fresh one after the restart: 78 orders, 16 freed before a rank had read, 0 never freed",
        "process slot, reused crosswise: 78 orders, 8 freed before a rank had read, 0 never freed",
        "reader index alone: 78 orders, 8 freed before a rank had read, 0 never freed",
        "process slot, a late rank in the one another left: never freed",
    ]
