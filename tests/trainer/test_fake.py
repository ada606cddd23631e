"""`shmrl trainer --fake-data`: steps on invented episodes that have every captured field, and nothing left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.runs import ROOT


def test_two_ranks_share_sequences_and_say_how_fast(tmp_path):
    flags = {"run.max-steps": 2, "run.output-dir": tmp_path / "out", "orchestrator.batch-size": 16}
    flags |= {"trainer.ranks": 2, "trainer.context-parallel": 2, "trainer.fsdp": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "shmrl", "trainer", "configs/reverse-text.toml", "--fake-data"]
        + [f"--{key}={value}" for key, value in flags.items()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, median = done.stdout.splitlines()
    line = r"step {}: [\d.]+ s, ([\d,]+) tokens/s on 2 ranks, [\d.]+ GiB at most on rank 0"
    assert re.fullmatch(line.format(1), first)
    assert int(re.fullmatch(line.format(2), second)[1].replace(",", "")) > 0
    assert re.fullmatch(r"median of all steps but the first: [\d.]+ s", median)
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob("shmrl-fake-*")) == []
    assert [path for path in Path(tmp_path).rglob("*") if path.is_socket()] == []
