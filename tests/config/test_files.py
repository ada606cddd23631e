"""Every configuration file in the repository loads."""

from pathlib import Path

import pytest

from shmrl.config import load_run

ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.toml"))


@pytest.mark.parametrize("name", FILES)
def test_it_loads(name):
    tree = load_run([ROOT / name])
    assert tree.run.output_dir.parts[0] == "runs"


def test_the_configs_that_scripts_call_by_name_are_there():
    named = {"configs/reverse-text.toml", "configs/vllm-tiny.toml", "configs/debug/multi-env/rl.toml"}
    assert named <= set(FILES)
    tree = load_run([ROOT / "configs/reverse-text.toml"])
    assert set(tree.captured) == {"routing", "head", "mask"}
    assert (tree.trainer.ranks, tree.sources[0][1].serve.pool.workers) == (2, 2)
