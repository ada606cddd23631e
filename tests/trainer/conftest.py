"""A tiny model on disk, run trees that train it, and rollouts of it."""

import pytest
from transformers import AutoModelForCausalLM

from benches.rollouts import rollouts
from shmrl import Arena
from shmrl.config import RunTree, TinyModel
from shmrl.inference.embedded.tiny import write_tiny
from shmrl.trainer.parallel import Ranks
from tests.trainer.families import scale_weights

SHAPE = TinyModel(
    layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=8, moe_intermediate=32, max_positions=256
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A Qwen3-MoE of 2 layers, 32 wide, 8 experts, whose routers and logits are far from uniform."""
    path = write_tiny(SHAPE, tmp_path_factory.mktemp("model") / "tiny", seed=0)
    lm = AutoModelForCausalLM.from_pretrained(path)
    scale_weights(lm, 3.0)
    lm.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def branches(model_dir):
    """Twelve rollouts with routing, a head of 4 and the kept sets of top_p = 0.9 below top_k = 32."""
    return rollouts(model_dir, 12, seed=1, top_p=0.9, top_k=32, logprobs=4)


@pytest.fixture
def arena():
    arena = Arena.create(capacity="64MiB")
    yield arena
    arena.unlink()
    arena.close()


def run_tree(model, output_dir, address, *, warmup=None, max_steps=4, sampling=None, **trainer):
    """A RunTree that trains `model` from the source of `branches`; more keywords are keys of [trainer]."""
    defaults = {"head": 4, "router_replay": True, "checkpoint": {"interval": 2}, "optimizer": {"lr": 1e-2}}
    source = {
        "name": "bench",
        "env": {"id": "reverse-text"},
        "sampling": sampling or {"top_p": 0.9, "top_k": 32, "max_tokens": 24},
    }
    return RunTree.model_validate(
        {
            "run": {"output_dir": output_dir, "max_steps": max_steps},
            "model": {"path": model},
            "warmup": warmup or {},
            "arena": {"address": address},
            "inference": {"max_model_len": 256},
            "orchestrator": {"batch_size": 8, "connect_timeout_s": 60, "train": {"source": [source]}},
            "trainer": {**defaults, **trainer},
        }
    )


@pytest.fixture
def ranks():
    """A world of one."""
    ranks = Ranks("cpu")
    yield ranks
    ranks.close()


@pytest.fixture
def make_tree(model_dir, tmp_path, arena):
    """make_tree(ranks=1, loss={...}, ...): `run_tree` of the tiny model, this test's arena and directory."""

    def make(*, model=model_dir, **options):
        return run_tree(model, tmp_path / "run", arena.address, **options)

    return make
