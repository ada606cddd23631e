"""The comparison with peers: it runs, notices wrong bytes, and names who did not take part."""

import subprocess
import sys
from pathlib import Path

import pytest

from benches.peers import bars, roles, runner
from benches.peers.interface import Consumer

ROOT = Path(__file__).parents[1]


def test_quick_run():
    """Tables of every peer named; one whose package is absent is listed, not dropped."""
    wanted = "shmrl; SharedMemory; HTTP, http.client; TransferQueue"
    command = [sys.executable, "-m", "benches.peers", "--quick", "--peers", wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[:4] == ["peer", "---", "shmrl", "SharedMemory"]
    assert "HTTP, http.client / shmrl, checksums" not in done.stdout  # no ratio of somebody who was not asked for
    assert "0.8 MB: SharedMemory / shmrl" in done.stdout
    assert "TransferQueue: not installed" in done.stdout


class _Wrong(Consumer):
    def get(self, ref):
        blob = ref.copy()
        blob[-1] ^= 1
        return blob


def test_one_wrong_byte_is_noticed():
    role = roles.ConsumerRole("shmrl")
    role.store, role.blobs = _Wrong(None), roles.sources(4096)
    with pytest.raises(ValueError, match="blob 3: 4096 bytes that differ"):
        role.take([role.blobs[3]], 3)


def test_sources_are_routing():
    """Rows of eight distinct ids, eight different blobs."""
    blobs = roles.sources(4096)
    assert len({blob.tobytes() for blob in blobs}) == 8
    assert all(len(set(row)) == 8 for blob in blobs for row in blob.reshape(-1, 8).tolist())


def test_ratios_are_taken_within_a_round():
    """A machine that is slow for a whole round changes no ratio."""

    def turn(seconds):
        return runner.Turn(runner.Times([seconds], [seconds], [0.0]), runner.Times([seconds], [seconds], [0.0]))

    rounds = [{"shmrl": turn(s), "iceoryx2": turn(2 * s)} for s in (1e-3, 1e-1, 1e-3)]
    assert bars.ratio(rounds, "iceoryx2", "shmrl", bars.behind) == pytest.approx(2)
    assert bars.ratio(rounds, "Ray", "shmrl", bars.behind) is None
    (bar,) = bars.of_blobs(rounds)
    assert (bar.what, bar.at_least, bar.held) == ("iceoryx2 / shmrl", 1.5, True)
    assert bar.ratio == pytest.approx(2)
